"""The DeviceProgram: the steps of a capture in program order, before they have addresses."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from tracegraph.lowering.request import BufferSpec, InputSpec, OutputSpec
from tracegraph.runtime.nodes import BufferUse, DeviceNode, Relocate


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
    """

    node: DeviceNode
    reads: tuple[BufferUse, ...]
    writes: tuple[BufferUse, ...]
    stream: int = 0

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    def move(self, relocate: Relocate) -> DeviceStep:
        """Returns the step with each of its byte ranges replaced."""
        return DeviceStep(
            self.node.move(relocate),
            tuple(relocate(use) for use in self.reads),
            tuple(relocate(use) for use in self.writes),
            self.stream,
        )


Step: TypeAlias = ExecutableCall | Copy | DeviceStep


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
