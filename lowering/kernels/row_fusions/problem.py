"""RowFusion: what a kernel computes along rows, and how its threads share the rows."""

from __future__ import annotations

import dataclasses

from tracegraph.lowering.kernels.attention.tiled import SHARED_LIMIT, RowValue
from tracegraph.lowering.kernels.device_head import TYPES
from tracegraph.lowering.kernels.element_functions import ElementFunction
from tracegraph.lowering.kernels.matmuls.few_rows_problem import ELEMENT_BYTES, VECTOR_BYTES, WARP

# Elements that a thread works on at once; rows begin at a multiple of eight.
EIGHT, FOUR = 8, 4
# Of a row that a warp works on alone; of any row.
WARP_COLUMNS, MAX_COLUMNS = 1024, 1 << 16
# Of an array, which a kernel finds by numbers of 32 bits.
MAX_ELEMENTS = (1 << 31) - 1
# Of a block: rows at once where each has a warp, threads where all have one row.
WARP_ROWS, MAX_THREADS = 8, 512
# Of a multiprocessor, which has room for the registers of so many.
BLOCKS = 2
# In registers of a thread: sums along the columns.
MAX_TOTALS = 96
SCRATCH_BYTES = 128


@dataclasses.dataclass(frozen=True)
class RowInput:
    """An array, or a part of it, that is read along a row: neighbours lie side by side.

    Attributes:
        parameter: the number of the kernel's parameter.
        base: where a row begins, in elements; of ``r``. It is a multiple of `EIGHT`.
        is_own: True where each row has elements of its own, which are copied ahead.
    """

    parameter: int
    base: ElementFunction
    is_own: bool


@dataclasses.dataclass(frozen=True)
class Output:
    """What is stored, of an element or of a row.

    Attributes:
        function: its value.
        kind: XLA's name of its type.
    """

    function: ElementFunction
    kind: str


@dataclasses.dataclass(frozen=True)
class RowFusion:
    """What a kernel computes along rows, see Note [Fusions along rows].

    More than six fields because these are what tells one kernel from another. Functions have the
    variables ``r`` of a row, ``t`` of a column, ``input0``, ``input1``, ... and ``row0``, ``row1``,
    ...

    Attributes:
        rows: how many.
        columns: elements of each.
        kinds: XLA's name of the type of each array that is read, in the order of the parameters.
        inputs: what is read along a row.
        row_values: the row values, each of ``t``, inputs and earlier ones.
        elements: what is stored for each element.
        row_outputs: what is stored for each row.
        sums: what is added up along the columns.
    """

    rows: int
    columns: int
    kinds: tuple[str, ...]
    inputs: tuple[RowInput, ...]
    row_values: tuple[RowValue, ...]
    elements: tuple[Output, ...]
    row_outputs: tuple[Output, ...]
    sums: tuple[ElementFunction, ...]

    @property
    def vector(self) -> int:
        """Elements that a thread works on at once: fewer where half of a warp would have none."""
        kinds = {*self.kinds, *(output.kind for output in self.elements)}
        is_wide = all(ELEMENT_BYTES[kind] * FOUR == VECTOR_BYTES for kind in kinds)
        return FOUR if is_wide and self.columns <= WARP * FOUR else EIGHT

    @property
    def readers(self) -> int:
        """Threads of a row."""
        if self.columns <= WARP_COLUMNS:
            return WARP
        vectors = -(-self.columns // EIGHT)
        return min(MAX_THREADS, -(-vectors // WARP) * WARP)

    @property
    def groups(self) -> int:
        """Rows that a block works on at once."""
        return WARP_ROWS if self.readers == WARP else 1

    @property
    def steps(self) -> int:
        """Vectors of a thread in a row."""
        return -(-self.columns // (self.readers * self.vector))

    @property
    def is_narrow(self) -> bool:
        """True where all that has rows of its own has 16 bits."""
        return all(
            ELEMENT_BYTES[self.kinds[each.parameter]] < 4 for each in self.inputs if each.is_own
        )

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor has at once."""
        return 1 if self.sums and self.readers == WARP else BLOCKS

    @property
    def row_bytes(self) -> int:
        """Of what is copied of a row."""
        kinds = [self.kinds[given.parameter] for given in self.inputs if given.is_own]
        return sum(ELEMENT_BYTES[kind] * self.columns for kind in kinds)


def find_row_problem(fusion: RowFusion) -> str:
    """Returns why there is no kernel for it, or an empty text."""
    if fusion.columns % EIGHT or not 0 < fusion.columns <= MAX_COLUMNS:
        return f"rows have {fusion.columns} elements"
    if unknown := {*fusion.kinds, *(each.kind for each in fusion.elements)}.difference(TYPES):
        return f"arrays are {', '.join(sorted(unknown))}"
    if not any(given.is_own for given in fusion.inputs):
        return "no array has rows"
    if len(fusion.sums) * fusion.steps * fusion.vector > MAX_TOTALS:
        return f"{len(fusion.sums)} sums of {fusion.columns} columns are too many for registers"
    if count_shared_bytes(fusion, 1) > SHARED_LIMIT:
        return f"{fusion.row_bytes} bytes of a row do not fit into shared memory"
    return ""


def count_blocks(fusion: RowFusion, processors: int) -> int:
    """Returns how many blocks a launch has: the first size of the sums' parts.

    Args:
        fusion: what is computed.
        processors: multiprocessors of the GPU.
    """
    return min(-(-fusion.rows // fusion.groups), fusion.resident * processors)


def count_shared_bytes(fusion: RowFusion, slots: int) -> int:
    """Returns the bytes of shared memory that a block takes with so many rows of each group."""
    joined = fusion.groups * fusion.columns * 4 if fusion.sums else 0
    return SCRATCH_BYTES + max(slots * fusion.groups * fusion.row_bytes, joined)
