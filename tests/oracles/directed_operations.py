"""Operations that PyTorch's own tests do, one function for each of its test cases."""

from __future__ import annotations

import random

from tests.oracles.allocator_operations import MIB, Operation

# Of the five rows of the life-cycle test, by name.
LIFE_CYCLE_BYTES = {
    "512": 512,
    "1mib": MIB,
    "1mib_512": MIB + 512,
    "10mib_less": 10 * MIB - 512,
    "10mib_more": 10 * MIB + 512,
}


def make_life_cycle(nbytes: int) -> list[Operation]:
    """Captures ``b = a.clone()`` and five times ``b = b.clone() + 1``; ``b`` outlives the graph."""
    operations: list[Operation] = [("alloc", 0, nbytes, 3), ("capture_begin", 0, None, 3)]
    operations.append(("alloc", 1, nbytes, 3))
    last = 1
    for clone in range(2, 12, 2):
        operations += [("alloc", clone, nbytes, 3), ("alloc", clone + 1, nbytes, 3)]
        operations += [("free", clone), ("free", last)]
        last = clone + 1
    operations += [("capture_end", 0), ("snapshot",), ("empty",), ("graph_reset", 0), ("empty",)]
    return [*operations, ("snapshot",), ("free", last), ("free", 0), ("empty",)]


def make_uses_in_captures() -> list[Operation]:
    """Uses other streams before and inside of captures; their streams fork, and join in the end."""
    nbytes = 8 * MIB
    operations: list[Operation] = [("alloc", 0, nbytes, 3), ("record", 0, 1), ("block", 1)]
    operations += [("free", 0), ("capture_begin", 0, None, 3), ("alloc", 1, nbytes, 3)]
    operations += [("unblock", 1), ("alloc", 2, nbytes, 3), ("capture_end", 0)]
    operations += [("alloc", 3, nbytes, 3), ("free", 1), ("free", 2), ("free", 3)]
    operations += [("capture_begin", 1, None, 3), ("alloc", 10, nbytes, 3), ("launch", 10, 3)]
    operations += [("fork", 3, 4), ("launch", 10, 4), ("record", 10, 4), ("free", 10)]
    operations += [("alloc", 11, nbytes, 3), ("fork", 4, 3), ("alloc", 12, nbytes, 3)]
    operations += [("launch", 12, 3), ("alloc", 13, nbytes, 3), ("launch", 13, 3)]
    operations += [("alloc", 14, nbytes, 4), ("fork", 3, 4), ("alloc", 15, nbytes, 4)]
    operations += [("fork", 4, 3), ("capture_end", 1), ("snapshot",), ("alloc", 16, nbytes, 3)]
    operations += [("alloc", 17, nbytes, 0), ("snapshot",)]
    operations += [("free", block) for block in range(11, 18)]
    operations += [("graph_reset", 0), ("graph_reset", 1), ("alloc", 18, 512, 0), ("empty",)]
    return [*operations, ("free", 18), ("empty",)]


def make_user_pools(*, no_split: bool = False, use_on_oom: bool = False) -> list[Operation]:
    """Opens two pools inside of each other; blocks outlive them; the device is nearly full."""
    operations: list[Operation] = [("mempool_new", 0, use_on_oom, no_split), ("pool_count", 0)]
    operations += [("pool_begin", 0), ("pool_count", 0)]
    operations += [("alloc", block, MIB, 0) for block in range(3)]
    operations += [("empty",), ("free", 2), ("empty",), ("mempool_new", 1, False, False)]
    operations += [("pool_begin", 1), ("alloc", 3, 4 * MIB, 0), ("alloc", 4, 30 * MIB, 1)]
    operations += [("pool_end", 1), ("pool_release", 1), ("alloc", 5, 4 * MIB, 0)]
    operations += [("alloc", 6, 3 * MIB, 0), ("free", 5), ("alloc", 7, 2 * MIB, 0)]
    operations += [("pool_end", 0), ("pool_release", 0), ("pool_count", 0), ("snapshot",)]
    operations += [("alloc", 8, 4 * MIB, 0), ("free", 3), ("free", 4), ("free", 0), ("free", 6)]
    operations += [("empty",), ("snapshot",), ("fraction", 0.002), ("alloc", 9, 150 * MIB, 0)]
    operations += [("alloc", 10, 90 * MIB, 0), ("alloc", 11, 3 * MIB, 0), ("fraction", 1.0)]
    operations += [("free", 9), ("free", 10), ("free", 11), ("mempool_delete", 1)]
    operations += [("mempool_delete", 0), ("snapshot",), ("free", 1), ("free", 7), ("free", 8)]
    return [*operations, ("empty",)]


def make_checkpoints(seed: int) -> list[Operation]:
    """Takes the state of a pool and brings it back, four times, at random."""
    rng = random.Random(seed)
    sizes = (512, 512, 512, 2048, 100_000, MIB, 8 * MIB, 3 * MIB, 30 * MIB)
    operations: list[Operation] = [("pool_new", 0), ("pool_begin", 0)]
    live: list[int] = []
    count = 0

    def change(times: int, freed_share: float) -> None:
        nonlocal count
        for _ in range(times):
            if live and rng.random() < freed_share:
                operations.append(("free", live.pop(rng.randrange(len(live)))))
                continue
            operations.append(("alloc", count, rng.choice(sizes), 0))
            live.append(count)
            count += 1

    for turn in range(4):
        change(rng.randint(8, 30), 0.4)
        operations += [("pool_end", 0), ("snapshot",), ("checkpoint_get", turn, 0)]
        operations.append(("pool_begin", 0))
        kept = list(live)
        change(rng.randint(3, 20), 0.5)
        operations += [("pool_end", 0), ("snapshot",), ("checkpoint_set", turn, 0)]
        operations += [("snapshot",), ("pool_begin", 0)]
        live = kept
    operations += [("pool_end", 0), *(("free", block) for block in live)]
    return [*operations, *[("pool_release", 0)] * 9, ("empty",), ("snapshot",)]


def make_retries() -> list[Operation]:
    """Runs out of memory, frees some and asks again; waits for the events of 100 freed blocks."""
    operations: list[Operation] = [("fraction", 0.004), ("alloc", 0, 300 * MIB, 0)]
    operations += [("alloc", 1, 300 * MIB, 0), ("free", 0), ("alloc", 2, 300 * MIB, 0)]
    operations += [("record", 2, 1), ("sleep", 1), ("free", 2), ("alloc", 3, 400 * MIB, 0)]
    operations += [("wake", 1), ("free", 3), ("alloc", 4, 30 * MIB, 0), ("alloc", 5, 512, 1)]
    operations += [("alloc", 6, 200 * MIB, 1), ("free", 6), ("free", 4)]
    operations += [("alloc", 7, 500 * MIB, 0), ("free", 5), ("free", 7), ("alloc", 8, 1 << 45, 0)]
    operations.append(("empty",))
    for turn in range(100):
        operations += [("alloc", 100 + turn, 160 * MIB, 0), ("record", 100 + turn, 1)]
        operations += [("sleep", 1)] if turn % 25 == 0 else []
        operations.append(("free", 100 + turn))
    operations += [("wake", 1), ("alloc", 300, 512, 0), ("free", 300), ("empty",)]
    return [*operations, ("fraction", 1.0)]


def make_settings() -> list[Operation]:
    """Changes the settings between allocations; wrong ones are refused and change nothing."""
    operations: list[Operation] = [("alloc", 0, 84 * MIB, 0), ("free", 0), ("empty",)]
    operations += [("settings", "roundup_power2_divisions:4"), ("alloc", 1, 84 * MIB, 0)]
    operations += [("free", 1), ("alloc", 2, 1200, 0), ("free", 2), ("alloc", 20, 3000, 0)]
    operations += [("free", 20), ("settings", "garbage_collection_threshold:0.5")]
    operations += [("alloc", 3, 84 * MIB, 0), ("free", 3), ("empty",)]
    operations.append(("settings", "roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]"))
    operations += [("alloc", 4, 84 * MIB, 0), ("alloc", 5, 400 * MIB, 0), ("alloc", 6, 1100, 0)]
    operations += [("alloc", 7, 3 * MIB + 5, 0), *(("free", block) for block in range(4, 8))]
    operations += [("empty",), ("settings", ""), *(("settings", text) for text in WRONG_SETTINGS)]
    operations += [
        ("settings", "large_segment_size_mb:32"),
        ("settings", "max_split_size_mb:32"),
        ("alloc", 8, 40 * MIB, 0),
    ]
    operations += [("alloc", 9, 21 * MIB, 0), ("free", 8), ("alloc", 10, 30 * MIB, 0), ("free", 9)]
    operations += [("alloc", 11, 5 * MIB, 0), ("alloc", 12, 35 * MIB, 0), ("free", 10)]
    operations += [("free", 11), ("free", 12), ("settings", ""), ("alloc", 13, 5 * MIB, 0)]
    return [*operations, ("free", 13), ("empty",)]


WRONG_SETTINGS = (
    "foo:1",
    "garbage_collection_threshold:1.2",
    "max_split_size_mb:2",
    "release_lock_on_cudamalloc:none",
    "pinned_use_cuda_host_register:none",
    "pinned_num_register_threads:none",
    "pinned_num_register_threads:1024",
    "max_non_split_rounding_mb:5",
    "roundup_power2_divisions:3",
    "per_process_memory_fraction:1.1",
    "large_segment_size_mb:1",
    "expandable_segments:maybe",
    "max_split_size_mb=32",
)
