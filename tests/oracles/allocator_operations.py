"""Operations on a caching allocator: random ones, and those of PyTorch's own tests.

An operation is a tuple, its name first. Blocks, pools, graphs and checkpoints are numbers given
here; streams are numbers too: 0 is the default stream, 1 and 2 may be blocked, 3 and 4 captured.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

Operation: TypeAlias = tuple[Any, ...]

MIB = 1 << 20
BLOCKABLE = (1, 2)
CAPTURABLE = (3, 4)
STREAM_COUNT = 5
# Sizes at which one of the allocator's rules begins or ends.
EDGES = (
    *(1, 511, 512, 513, 1024, MIB - 512, MIB - 1, MIB, MIB + 1, MIB + 512),
    *(2 * MIB, 2 * MIB + 1, 10 * MIB - 512, 10 * MIB - 1, 10 * MIB, 10 * MIB + 512),
    *(19 * MIB, 20 * MIB, 20 * MIB + 1, 21 * MIB),
)


class RandomOperations:
    """Writes operations one by one; knows what is live, and nothing of addresses.

    Args:
        seed: of the generator.
        streams: of the blocks.
        limit_bytes: that are live at once.
        biggest_bytes: of one block.

    Attributes:
        operations: what was written so far.
    """

    def __init__(
        self, seed: int, streams: Sequence[int], limit_bytes: int, biggest_bytes: int
    ) -> None:
        self.operations: list[Operation] = []
        self.random = random.Random(seed)
        self._streams, self._limit_bytes = streams, limit_bytes
        self._biggest_bytes = biggest_bytes
        self._live: dict[int, int] = {}
        self._block_count = self._live_bytes = 0
        self._aim = 60
        self._blocked: set[int] = set()
        self._uses: dict[int, int] = {}
        self._open_pools: list[int] = []
        self._graphs: list[int] = []
        self._graph_count = 0
        self._captured: set[int] = set()

    @property
    def is_capturing(self) -> bool:
        return bool(self._captured)

    @property
    def has_open_pool(self) -> bool:
        return bool(self._open_pools)

    def write(self, *operation: Any) -> None:
        """Appends one operation."""
        self.operations.append(operation)

    def change_blocks(self) -> None:
        """Allocates or frees, so that the number of live blocks wanders about."""
        if self.random.random() < 0.01:
            self._aim = self.random.choice((10, 30, 60, 120, 200))
        if self._live and len(self._live) >= self.random.uniform(0, 2 * self._aim):
            self.free(self._pick())
            return
        inside = self._captured and self.random.random() < 0.7
        streams = sorted(self._captured) if inside else self._streams
        nbytes = self._choose_bytes()
        while self._live and self._live_bytes + nbytes > self._limit_bytes:
            self.free(self._pick())
        self.write("alloc", self._block_count, nbytes, self.random.choice(streams))
        self._live[self._block_count] = nbytes
        self._live_bytes += nbytes
        self._block_count += 1

    def free(self, block: int) -> None:
        """Frees a live block."""
        self._live_bytes -= self._live.pop(block)
        self.write("free", block)

    def record_stream(self, streams: Sequence[int]) -> None:
        """Lets a stream use a live block."""
        if self._live:
            self.write("record", self._pick(), self.random.choice(streams))

    def block_stream(self) -> None:
        """Blocks a stream, or lets it go on."""
        stream = self.random.choice(BLOCKABLE)
        self.write("unblock" if stream in self._blocked else "block", stream)
        self._blocked ^= {stream}

    def empty_cache(self) -> None:
        """Empties the cache, which waits for all streams."""
        self._unblock_all()
        self.write("empty")

    def route(self) -> None:
        """Begins or ends to allocate from a private pool, at most two deep."""
        deep = len(self._open_pools)
        if deep >= 2 or (deep and self.random.random() < 0.7):
            self._end_pool()
            return
        usable = [pool for pool in self._list_used() if pool not in self._open_pools]
        if usable and self.random.random() < 0.55:
            pool = self.random.choice(usable)
        else:
            pool = len(self._uses)
            self._uses[pool] = 0
            self.write("pool_new", pool)
        self.write("pool_begin", pool)
        self._uses[pool] += 1
        self._open_pools.append(pool)

    def release_pool(self) -> None:
        """Gives up one use of a private pool."""
        usable = [pool for pool in self._list_used() if pool not in self._open_pools]
        if usable:
            self._release(self.random.choice(usable))

    def capture(self) -> None:
        """Begins a capture, forks or joins its streams, or ends it."""
        if not self._captured:
            shares = self._graphs and self.random.random() < 0.4
            shared = self.random.choice(self._graphs) if shares else None
            self.write("capture_begin", self._graph_count, shared, CAPTURABLE[0])
            self._captured = {CAPTURABLE[0]}
        elif self.random.random() < 0.35:
            self._end_capture()
        else:
            into = CAPTURABLE[1] not in self._captured or self.random.random() < 0.5
            self.write("fork", *(CAPTURABLE if into else reversed(CAPTURABLE)))
            self._captured = set(CAPTURABLE)

    def launch(self) -> None:
        """Launches a kernel on a recent block, on a captured stream."""
        if self._live:
            block = self.random.choice(list(self._live)[-20:])
            self.write("launch", block, self.random.choice(sorted(self._captured)))

    def reset_graph(self) -> None:
        """Lets a graph go."""
        if self._graphs:
            index = self.random.randrange(len(self._graphs))
            self.write("graph_reset", self._graphs.pop(index))

    def close(self) -> None:
        """Frees everything, in an order in which blocks outlive their pools."""
        if self._captured:
            self._end_capture()
        while self._open_pools:
            self._end_pool()
        self._unblock_all()
        blocks = list(self._live)
        self.random.shuffle(blocks)
        for block in blocks[::2]:
            self.free(block)
        while self._graphs:
            self.reset_graph()
        for pool in self._list_used():
            while self._uses[pool]:
                self._release(pool)
        for rest in (blocks[1::2], ()):
            # An allocation queries the events of what was freed before.
            self.write("alloc", self._block_count, 512, 0)
            self.write("free", self._block_count)
            self._block_count += 1
            self.write("empty")
            for block in rest:
                self.free(block)

    def _choose_bytes(self) -> int:
        kind = self.random.random()
        if kind < 0.12:
            return self.random.choice([edge for edge in EDGES if edge <= self._biggest_bytes])
        ranges = ((0.45, 0, 15), (0.68, 13, 20), (0.88, 20, 23.4))
        last = (1.0, 23.3, max(24.0, math.log2(self._biggest_bytes)))
        low, high = next((low, high) for share, low, high in (*ranges, last) if kind < share)
        return min(self._biggest_bytes, int(2 ** self.random.uniform(low, high)))

    def _pick(self) -> int:
        blocks = list(self._live)
        return self.random.choice(blocks[-40:] if self.random.random() < 0.6 else blocks)

    def _unblock_all(self) -> None:
        for stream in sorted(self._blocked):
            self.write("unblock", stream)
        self._blocked.clear()

    def _list_used(self) -> list[int]:
        return [pool for pool, count in self._uses.items() if count]

    def _end_pool(self) -> None:
        pool = self._open_pools.pop()
        self.write("pool_end", pool)
        if self._uses[pool] > 1 and self.random.random() < 0.4:
            self._release(pool)

    def _release(self, pool: int) -> None:
        self._uses[pool] -= 1
        self.write("pool_release", pool)

    def _end_capture(self) -> None:
        if CAPTURABLE[1] in self._captured:
            self.write("fork", *reversed(CAPTURABLE))
        self.write("capture_end", self._graph_count)
        self._graphs.append(self._graph_count)
        self._graph_count += 1
        self._captured = set()


def make_random(
    seed: int,
    count: int,
    *,
    streams: Sequence[int] = (0, 1, 2),
    kinds: Iterable[str] = (),
    fraction: float | None = None,
    limit_bytes: int = 2000 * MIB,
    biggest_bytes: int = 64 * MIB,
) -> list[Operation]:
    """Returns ``count`` random operations, and those that free everything.

    Args:
        seed: of the generator.
        count: how many.
        streams: of the blocks.
        kinds: of operations beside those on blocks: "record", "block", "pools", "captures".
        fraction: share of the device that may be reserved; None for all of it.
        limit_bytes: that are live at once.
        biggest_bytes: of one block.
    """
    allowed = frozenset(kinds)
    writer = RandomOperations(seed, streams, limit_bytes, biggest_bytes)
    recordable = range(STREAM_COUNT) if "captures" in allowed else streams
    if fraction is not None:
        writer.write("fraction", fraction)
    while len(writer.operations) < count:
        kind = _choose_kind(writer)
        if kind == "record" and kind in allowed:
            writer.record_stream(recordable)
        elif kind == "block" and kind in allowed:
            writer.block_stream()
        elif kind == "route" and "pools" in allowed:
            writer.route()
        elif kind == "release" and "pools" in allowed:
            writer.release_pool()
        elif kind == "capture" and "captures" in allowed:
            writer.capture()
        elif kind == "graph_reset" and "captures" in allowed:
            writer.reset_graph()
        elif kind == "launch" and writer.is_capturing:
            writer.launch()
        elif kind == "empty" and not writer.is_capturing:
            writer.empty_cache()
        elif kind == "reset":
            writer.write(writer.random.choice(("reset_peak", "reset_peak", "reset_accumulated")))
        else:
            writer.change_blocks()
    writer.close()
    return writer.operations


def _choose_kind(writer: RandomOperations) -> str:
    shares = {
        "record": 0.07,
        "block": 0.015,
        "route": 0.02,
        "release": 0.005,
        "capture": 0.01,
        "graph_reset": 0.006,
        "launch": 0.034,
        "empty": 0.004,
        "reset": 0.0025,
    }
    kinds, weights = list(shares), list(shares.values())
    return writer.random.choices([*kinds, "blocks"], [*weights, 1 - sum(weights)])[0]
