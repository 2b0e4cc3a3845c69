"""XlaProgram: one compiled region as XLA wrote it, over XLA's own allocations."""

from __future__ import annotations

import dataclasses
import enum

from tracegraph.lowering.device_program import GraphStep


class AllocationKind(enum.Enum):
    """What an allocation holds."""

    PARAMETER = "parameter"
    CONSTANT = "constant"
    OUTPUT = "output"
    TEMPORARY = "temporary"
    UNUSED = "unused"


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One of XLA's buffer allocations.

    Attributes:
        name: unique in its program: ``#`` and XLA's index.
        nbytes: its size.
        kind: what it holds; a parameter that a result updates in place is a PARAMETER.
        parameter: number of the flat argument, for a PARAMETER.
        content: the bytes of a CONSTANT.
        is_host: True for a TEMPORARY in host memory.
    """

    name: str
    nbytes: int
    kind: AllocationKind
    parameter: int | None = None
    content: bytes | None = dataclasses.field(default=None, repr=False)
    is_host: bool = False


@dataclasses.dataclass(frozen=True)
class XlaProgram:
    """The steps of one compiled region.

    Attributes:
        name: XLA's module name.
        allocations: in order of XLA's index.
        steps: in XLA's serial order; their byte ranges name allocations.
        outputs: for each flat result the allocation that it starts in, at offset 0.
        float_atomics: instructions whose sums may differ in the last bits from run to run.
    """

    name: str
    allocations: tuple[Allocation, ...]
    steps: tuple[GraphStep, ...]
    outputs: tuple[str, ...]
    float_atomics: tuple[str, ...] = ()
