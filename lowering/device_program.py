"""The DeviceProgram: the steps of a capture in program order, before they have addresses."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from tracegraph.lowering.element_loops import ElementLoop
from tracegraph.lowering.request import BufferSpec, InputSpec, OutputSpec
from tracegraph.runtime.definition.graph_nodes import Construct, DeviceNode, Turn
from tracegraph.runtime.definition.nodes import BufferUse, Relocate, rename


@dataclasses.dataclass(frozen=True)
class ExecutableCall:
    """One call of a compiled region.

    More than six fields because a call is where program, memory and order meet.

    Attributes:
        name: the region's name.
        executable: called with the arrays of ``reads``; returns those of ``writes``.
        reads: whole buffers, in order of the executable's parameters.
        writes: whole buffers, in order of its results.
        stream: number of the stream it is on.
        is_captured: False when it runs eagerly between two graphs.
        in_place: how many of the first reads are donated to the executable; the write at the same
            place is the new value in the same buffer.
    """

    name: str
    executable: Any = dataclasses.field(repr=False)
    reads: tuple[BufferUse, ...]
    writes: tuple[BufferUse, ...]
    stream: int = 0
    is_captured: bool = True
    in_place: int = 0


@dataclasses.dataclass(frozen=True)
class Copy:
    """A device-to-device copy of a byte range."""

    name: str
    source: BufferUse
    target: BufferUse
    stream: int = 0

    @property
    def reads(self) -> tuple[BufferUse, ...]:
        """The source."""
        return (self.source,)

    @property
    def writes(self) -> tuple[BufferUse, ...]:
        """The target."""
        return (self.target,)


@dataclasses.dataclass(frozen=True)
class DeviceStep:
    """One node of a GPU graph, with what it reads and writes.

    Attributes:
        node: what it does, over named buffers.
        reads: the byte ranges that it reads; those that it only overwrites are not among them.
        writes: the byte ranges that it writes.
        stream: number of the stream it is on.
        loop: what its kernel computes for each element, where that was asked for and is known.
    """

    node: DeviceNode
    reads: tuple[BufferUse, ...]
    writes: tuple[BufferUse, ...]
    stream: int = 0
    loop: ElementLoop | None = dataclasses.field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    @property
    def kind(self) -> str:
        """The node's kind."""
        return self.node.kind

    @functools.cached_property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names, each once, empty ones included."""
        return tuple(dict.fromkeys((*self.reads, *self.writes, *self.node.ranges)))

    def move(self, relocate: Relocate) -> DeviceStep:
        """Returns the step with each of its byte ranges replaced; itself where none is another."""
        # Most ranges are named twice, by the step and by its node.
        places = tuple(map(relocate, self.ranges))
        if places == self.ranges:
            return self
        moved = dict(zip(self.ranges, places, strict=True))
        find = moved.__getitem__
        step = DeviceStep(
            self.node.move(find),
            tuple(map(find, self.reads)),
            tuple(map(find, self.writes)),
            self.stream,
            self.loop,
        )
        step.__dict__["ranges"] = tuple(dict.fromkeys(places))
        return step

    def rename(self, name: str) -> DeviceStep:
        """Returns the step with a node of another name, which is not taken for the same loop."""
        renamed = DeviceStep(rename(self.node, name), self.reads, self.writes, self.stream)
        # Of a body that is repeated they are found once.
        renamed.__dict__["ranges"] = self.ranges
        return renamed


@dataclasses.dataclass(frozen=True)
class ConditionalStep:
    """One conditional node of a GPU graph: a branch or a loop.

    More than six fields because, to what is around it, it is one step, and steps inside of it
    are ordered by their own reads and writes.

    Attributes:
        name: of the instruction that it computes.
        construct: what the value of its handle decides.
        bodies: the steps of each, in program order; those of a loop set its handle anew.
        setter: sets the handle right before.
        first_reads: the byte ranges whose old bytes it may need: read before they are written, or
            kept where a body that would write them does not run. None while that is not known.
        stream: number of the stream it is on.
        turn: what one turn of a loop does.
    """

    name: str
    construct: Construct
    bodies: tuple[tuple[GraphStep, ...], ...]
    setter: DeviceStep
    first_reads: tuple[BufferUse, ...] | None = None
    stream: int = 0
    turn: Turn | None = None

    @property
    def kind(self) -> str:
        """CUDA's word for the construct."""
        return self.construct.value

    @property
    def reads(self) -> tuple[BufferUse, ...]:
        """The byte ranges whose old bytes matter; everything inside while that is not known."""
        return self.touched if self.first_reads is None else self.first_reads

    @functools.cached_property
    def writes(self) -> tuple[BufferUse, ...]:
        """The byte ranges that it may write, and what it reads of them inside."""
        written = [use for step in self._list_inner() for use in step.writes]
        # What is read and was written inside lies in bytes that are written.
        return _collect((*written, *(use for use in self.touched if use not in self.reads)))

    @functools.cached_property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names, empty ones included."""
        return tuple(dict.fromkeys(use for step in self._list_inner() for use in step.ranges))

    def move(self, relocate: Relocate) -> ConditionalStep:
        """Returns the step with each of its byte ranges replaced."""
        first_reads = self.first_reads
        return dataclasses.replace(
            self,
            bodies=tuple(tuple(step.move(relocate) for step in body) for body in self.bodies),
            setter=self.setter.move(relocate),
            first_reads=None if first_reads is None else tuple(map(relocate, first_reads)),
        )

    @functools.cached_property
    def touched(self) -> tuple[BufferUse, ...]:
        """The byte ranges that a step inside of it reads or writes."""
        return _collect(use for step in self._list_inner() for use in (*step.reads, *step.writes))

    def _list_inner(self) -> list[GraphStep]:
        return [self.setter, *(step for body in self.bodies for step in body)]


GraphStep: TypeAlias = DeviceStep | ConditionalStep
Step: TypeAlias = ExecutableCall | Copy | GraphStep


def list_device_steps(steps: Iterable[GraphStep]) -> Iterator[DeviceStep]:
    """Yields every step with a node of its own, those inside of branches and loops included."""
    for step in steps:
        if isinstance(step, DeviceStep):
            yield step
        else:
            yield from list_device_steps(step._list_inner())


def list_uses(step: Step) -> list[BufferUse]:
    """Returns every byte range that a step names, in branches and loops too; none is empty."""
    if isinstance(step, DeviceStep):
        return [use for use in step.ranges if use.nbytes]
    named = step.ranges if isinstance(step, ConditionalStep) else ()
    return [use for use in (*step.reads, *step.writes, *named) if use.nbytes]


def index_users(steps: Iterable[Step]) -> defaultdict[str, list[int]]:
    """Returns the indices of the steps that name each buffer, in order.

    Args:
        steps: of a program; branches and loops name what is named inside of them.
    """
    users: defaultdict[str, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        for name in {use.buffer for use in list_uses(step)}:
            users[name].append(index)
    return users


def move_step(step: Step, relocate: Relocate) -> Step:
    """Returns a step with each of its byte ranges replaced; a call of a region has none to move."""
    if isinstance(step, Copy):
        return dataclasses.replace(step, source=relocate(step.source), target=relocate(step.target))
    assert not isinstance(step, ExecutableCall)
    return step.move(relocate)


def _collect(uses: Iterable[BufferUse]) -> tuple[BufferUse, ...]:
    return tuple(dict.fromkeys(use for use in uses if use.nbytes))


@dataclasses.dataclass(frozen=True)
class DeviceProgram:
    """Steps, buffers and the order that the streams declare.

    Attributes:
        name: the captured function's name.
        buffers: every buffer that a step touches, inputs and outputs included.
        steps: in program order.
        edges: pairs of step indices; the first must finish before the second (stream order and
            waits, not reduced).
        inputs: static inputs, constants included.
        outputs: flat results.
    """

    name: str
    buffers: tuple[BufferSpec, ...]
    steps: tuple[Step, ...]
    edges: tuple[tuple[int, int], ...]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
