"""Events of a played trace: done when PyTorch's were, and asked in the order in which it asked.

PyTorch keeps the queues of its streams, and the blocks that wait for the end of a capture, in hash
tables; and whether an event is done that was recorded a moment ago is a race. Both are taken from
the history of the recording. Nothing else there depends on chance.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from tests.fakes.scripted_provider import ScriptedEvent, ScriptedEvents
from tests.oracles.allocator_traces import Step
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.memory.caching.stream_uses import StreamUses

# Per stream, in order: a block that waits, and whether its event is done.
Queues: TypeAlias = dict[int, list[tuple[Block, bool]]]
# Number of an operation, and of an entry among those that it added to the history.
Moment: TypeAlias = tuple[int, int]
NEVER: Moment = (1 << 62, 0)


class RecordedEvents(ScriptedEvents):
    """Events that are done when the recording says so.

    Note [Forgotten uses]. PyTorch 2.11 notes by block which uses were recorded during a capture, so
    as to drop them when it is over. Where the block was freed outside of a capture, the note stays,
    and if the same block is used again, recorded by the same stream outside of a capture, and freed
    during one, that use is dropped too: the block is reused while the stream may still read it.
    Ours waits. The history shows it: such a block completes although its stream is blocked, or
    before others that wait in a queue, where nothing else explains their order. Ours is made to
    forget that use too.

    Args:
        steps: of the trace.

    Attributes:
        forgotten_uses: how many uses PyTorch forgot.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.forgotten_uses = 0
        self._completions: dict[int, list[Moment]] = collections.defaultdict(list)
        for index, step in enumerate(steps):
            for place, entry in enumerate(step.entries):
                if entry.action == "free_completed":
                    self._completions[entry.address].append((index, place))
        # Streams that sleep are over on their own, at a time that only the history has.
        self._asleep: set[int] = set()
        # So many more events may be done within the operation that records them; None for all.
        self._done_count: int | None = None
        self._late: list[ScriptedEvent] = []

    def record(self, stream: int) -> ScriptedEvent:
        event = super().record(stream)
        if self._done_count is None:
            return event
        if not self._done_count and event.is_done:
            event.is_done = False
            self._late.append(event)
        self._done_count = max(0, self._done_count - 1)
        return event

    def sleep(self, stream: int) -> None:
        """Keeps a stream busy until it wakes by itself."""
        self.busy.add(stream)
        self._asleep.add(stream)

    def follow(self, uses: StreamUses, index: int, *, polls: bool) -> None:
        """Brings what waits into the order in which it completes in the operation ``index``.

        Args:
            uses: of the allocator; what is sorted here has no order that matters to it.
            index: of the operation that comes next.
            polls: what completes there had an event that was done; none is waited for.
        """
        if polls:
            self._wake(uses, index)
        moments = {block: self._find_completion(block, index) for block in uses.blocks}
        deferred = sorted(uses._deferred, key=moments.__getitem__)
        uses._deferred = {block: uses._deferred[block] for block in deferred}
        if uses.is_capturing:
            return
        ready = [block for block in deferred if moments[block][0] == index]
        for block in ready:
            self._forget_uses(uses, block, _list_streams(uses, block) & self.busy)
        self._arrange_queues(uses, ready, moments, index)
        if deferred:
            self._done_count = sum(len(_list_streams(uses, block)) for block in ready)

    def settle(self) -> None:
        """Ends an operation: what only lacked time is done from now on."""
        self._done_count = None
        for event in self._late:
            event.is_done = event.stream not in self.busy
        self._late.clear()

    def _wake(self, uses: StreamUses, index: int) -> None:
        for stream in sorted(self._asleep):
            waiting = [block for _, block in uses._pending.get(stream, ())]
            if any(self._find_completion(block, index)[0] == index for block in waiting):
                self._asleep.remove(stream)
                self.finish(stream)

    def _find_completion(self, block: Block, index: int) -> Moment:
        moments = self._completions[block.address]
        place = bisect.bisect_left(moments, (index, -1))
        return moments[place] if place < len(moments) else NEVER

    def _forget_uses(self, uses: StreamUses, block: Block, streams: set[int]) -> None:
        """Lets a block forget the uses that PyTorch forgot: see Note [Forgotten uses]."""
        if streams:
            uses._uses_in_captures.setdefault(block, set()).update(streams)
            self.forgotten_uses += len(streams)

    def _arrange_queues(
        self, uses: StreamUses, ready: list[Block], moments: dict[Block, Moment], index: int
    ) -> None:
        queued = {block for queue in uses._pending.values() for _, block in queue}
        completing = (block for block in {*queued, *ready} if moments[block][0] == index)
        wanted = sorted(completing, key=moments.__getitem__)
        # Those without uses come first. As few others as possible are taken for such ones.
        for count in range(len(wanted) + 1):
            first, rest = wanted[:count], wanted[count:]
            if not set(first).issubset(ready):
                return
            later = [block for block in ready if block not in first]
            if not all(_list_streams(uses, block) for block in later):
                continue
            streams = self._find_order(uses, later, rest)
            if streams is None:
                continue
            for block in first:
                self._forget_uses(uses, block, _list_streams(uses, block))
            pending = uses._pending
            uses._pending = {s: pending.get(s, collections.deque()) for s in streams}
            return

    def _find_order(
        self, uses: StreamUses, ready: list[Block], wanted: list[Block]
    ) -> tuple[int, ...] | None:
        """Returns the order of the streams in which these blocks complete; None without one."""
        queues: Queues = {
            stream: [(block, event.is_done) for event, block in queue]
            for stream, queue in uses._pending.items()
        }
        counts = {block: block.event_count for queue in queues.values() for block, _ in queue}
        for block in ready:
            streams = _list_streams(uses, block)
            counts[block] = len(streams)
            for stream in streams:
                queues.setdefault(stream, []).append((block, stream not in self.busy))
        for streams in itertools.permutations(queues):
            if list(_drain(queues, counts, streams)) == wanted:
                return streams
        return None


def _list_streams(uses: StreamUses, block: Block) -> set[int]:
    return (block.stream_uses or set()) - uses._uses_in_captures.get(block, set())


def _drain(queues: Queues, counts: dict[Block, int], streams: Sequence[int]) -> Iterator[Block]:
    """Returns the blocks that complete, in order, if the streams are asked in this order."""
    left = dict(counts)
    for stream in streams:
        for block, _ in itertools.takewhile(lambda entry: entry[1], queues[stream]):
            left[block] -= 1
            if not left[block]:
                yield block
