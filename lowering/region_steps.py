"""What a region becomes before assembly: XLA's program for it, a call of it, or one step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from tracegraph.lowering.device_program import DeviceStep, ExecutableCall
from tracegraph.lowering.request import BufferSpec, Region
from tracegraph.runtime.definition.nodes import BufferUse

if TYPE_CHECKING:
    from tracegraph.lowering.xla.program import XlaProgram


@dataclasses.dataclass(frozen=True)
class XlaRegion:
    """A compiled region.

    Attributes:
        region: its inputs and outputs are parameters and results of ``program``, by position, with
            the buffers that hold them.
        program: what XLA wrote.
        in_place: how many of the first inputs are donated; ``program`` may write no others.
        behind: the bytes of the points that come before it, see `PointSteps`.
    """

    region: Region
    program: XlaProgram
    in_place: int = 0
    behind: tuple[BufferUse, ...] = ()


@dataclasses.dataclass(frozen=True)
class PointSteps:
    """A point between regions: one step that the device orders by a byte of its own.

    Device work is ordered by the bytes that it shares. So the step reads what the regions before it
    define and writes its byte, which all steps of the regions behind it read.

    Attributes:
        step: the event's.
        buffer: of its byte.
    """

    step: DeviceStep
    buffer: BufferSpec


RegionSteps: TypeAlias = XlaRegion | ExecutableCall | PointSteps
