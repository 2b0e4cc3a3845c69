"""The kernel of a matmul in float32, by tensor cores.

Note [Floats in three parts]
Tensor cores multiply bfloat16, values of eight bits, and add the products in float32. A float32 is
the sum of three bfloat16, to the last bit: itself rounded, what is left of it rounded, and what is
left then. Of the nine products of two values' parts the largest six matter: the others together
are at most about the last bit of the whole product, mostly much less, of either sign. With six
products for one, tensor cores of an H100 reach 165 TFLOPS, its units for float32 67.

* Two warpgroups multiply, each 64 rows by 128 columns. They load their rows and split them in
  registers. A third one loads the columns, splits them and stores the parts for both, a few stages
  ahead; barriers in shared memory tell which stages are full and which are empty.
* Sums of a tensor core are cut off, not rounded, so that their error grows with the depth. After 32
  depths they are added to those before by an addition that rounds. The small products come first.
* Loads of a side go along its memory, whichever way that is. Which depth and row is where in an
  instruction is free, as long as both sides agree, so no thread needs what another one has loaded.
* Blocks stay and take the next tile; where tiles are few, depths are split over blocks, and what
  reads the result adds up the parts.
* Infinite values have no parts: infinity minus infinity is NaN. A result that is not finite is
  computed again, one product after the other, so that it is what float32 gives; unless a value of
  its row or column is NaN, which is found sooner: training that has diverged would take twice as
  long.

Values below 2^-110 lose bits that bfloat16 has no exponents for.

(Sums of parts: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype
For Higher-Precision Computations", 2019. Instructions: PTX ISA, "Asynchronous Warpgroup Level
Matrix Instructions".)
"""

from __future__ import annotations

import dataclasses

from tracegraph.lowering.kernels.device_head import HEAD
from tracegraph.lowering.kernels.matmuls.few_rows_ends import indent
from tracegraph.lowering.kernels.matmuls.float_matmul_source import BODY, FUNCTIONS
from tracegraph.lowering.kernels.own_kernel import OwnKernel, name_kernel
from tracegraph.runtime.definition.nodes import LaunchShape

# The one compute capability with these instructions.
ARCHITECTURE = "9.0"
TILE, STEP, STAGES, VECTOR = 128, 32, 4, 4
MULTIPLIERS, SPLITTERS = 256, 128
PART_BYTES = TILE * STEP * 2
STAGE_BYTES = 3 * PART_BYTES
# Eight vectors of 16 bytes are what tensor cores read at once.
COLUMN_BYTES, DEPTH_BYTES = 128, TILE // 8 * 128
# Parts of the left and right side that are multiplied, the smallest products first.
PRODUCTS = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))
MAX_SPLIT = 8
# In steps of a block: what a tile takes besides them, and how many partial sums are added up by
# another kernel meanwhile. A step, and the start of the kernel, in microseconds on an H100.
_TILE_STEPS, _SUMS_A_STEP = 2, 500_000
_STEP_US, _START_US = 1.2, 5.0


@dataclasses.dataclass(frozen=True)
class FloatMatmul:
    """A matmul of two matrices in float32.

    Attributes:
        rows: of the left side and the result.
        columns: of the right side and the result.
        depth: what is multiplied and added up.
        left_by_depth: True if memory has the left side row by row, False for column by column.
        right_by_depth: True if memory has the right side column by column.
    """

    rows: int
    columns: int
    depth: int
    left_by_depth: bool
    right_by_depth: bool


def find_problem(matmul: FloatMatmul) -> str:
    """Returns why a matmul has no kernel, or nothing."""
    if not matmul.rows * matmul.columns * matmul.depth:
        return "a matrix is empty"
    left = matmul.depth if matmul.left_by_depth else matmul.rows
    right = matmul.depth if matmul.right_by_depth else matmul.columns
    if left % VECTOR or right % VECTOR:
        return f"a line of a matrix is no multiple of {VECTOR} elements"
    if matmul.columns % 2:
        return "a row of the result is no multiple of 2 elements"
    return ""


def count_tiles(matmul: FloatMatmul) -> int:
    """Returns how many tiles the result has."""
    return -(-matmul.rows // TILE) * -(-matmul.columns // TILE)


def choose_split(matmul: FloatMatmul, processors: int) -> int:
    """Returns in how many parts the depths are split, each a result of its own.

    Args:
        matmul: which one.
        processors: multiprocessors of the GPU, each of which takes a block.
    """
    splits = range(1, min(MAX_SPLIT, _count_steps(matmul)) + 1)
    return min(splits, key=lambda split: estimate_time(matmul, split, processors))


def estimate_time(matmul: FloatMatmul, split: int, processors: int) -> float:
    """Returns about how many microseconds the kernel takes, with the sum of its parts.

    Args:
        matmul: which one.
        split: see `choose_split`.
        processors: multiprocessors of the GPU.
    """
    turns = -(-count_tiles(matmul) * split // processors)
    steps = turns * (-(-_count_steps(matmul) // split) + _TILE_STEPS)
    added = split * matmul.rows * matmul.columns if split > 1 else 0
    return _START_US + _STEP_US * (steps + added / _SUMS_A_STEP)


def write_float_matmul(matmul: FloatMatmul, split: int, processors: int) -> OwnKernel:
    """Returns the kernel, see Note [Floats in three parts].

    Its parameters are the two sides and a result of the shape (split, rows, columns).

    Args:
        matmul: without a problem, see `find_problem`.
        split: see `choose_split`.
        processors: multiprocessors of the GPU.
    """
    items = count_tiles(matmul) * split
    text = _write_sizes(matmul, split) + FUNCTIONS
    body = BODY.replace("{PRODUCTS}\n", _write_products(matmul))
    symbol = name_kernel("float_matmul", text + body)
    threads = MULTIPLIERS + SPLITTERS
    parameters = "const float *left, const float *right, float *result"
    source = f"{HEAD}{text}KERNEL({threads}, 1) {symbol}({parameters}) {{\n{body}}}\n"
    shape = LaunchShape(
        (min(items, processors), 1, 1),
        (threads, 1, 1),
        shared_bytes=STAGES * (STAGE_BYTES + 2 * 8),
    )
    return OwnKernel(symbol, source, shape)


def _count_steps(matmul: FloatMatmul) -> int:
    return -(-matmul.depth // STEP)


def _write_sizes(matmul: FloatMatmul, split: int) -> str:
    tiles = count_tiles(matmul)
    sizes = {
        "ROWS": matmul.rows,
        "COLUMNS": matmul.columns,
        "DEPTH": matmul.depth,
        "LEFT_BY_DEPTH": int(matmul.left_by_depth),
        "RIGHT_BY_DEPTH": int(matmul.right_by_depth),
        "SPLIT": split,
        "TILE": TILE,
        "TILES": tiles,
        "ROW_TILES": -(-matmul.rows // TILE),
        "ITEMS": tiles * split,
        "STEP": STEP,
        "STEPS": _count_steps(matmul),
        "STAGES": STAGES,
        "ROW_STEP": 8 if matmul.left_by_depth else 1,
        "PART_BYTES": PART_BYTES,
        "STAGE_BYTES": STAGE_BYTES,
        "COLUMN_BYTES": COLUMN_BYTES,
        "DEPTH_BYTES": DEPTH_BYTES,
        "MULTIPLIERS": MULTIPLIERS,
        "SPLITTERS": SPLITTERS,
        "EACH": TILE * STEP // VECTOR // SPLITTERS,
    }
    return "".join(f"constexpr int {name} = {size};\n" for name, size in sizes.items())


def _write_products(matmul: FloatMatmul) -> str:
    turned = int(not matmul.right_by_depth)
    lines = []
    for left, right in PRODUCTS:
        for deep in range(STEP // 16):
            place = f"move_place(y, {right * PART_BYTES + deep * 2 * DEPTH_BYTES})"
            operands = f"sums, x[{deep}][{left}], {place}, {int(bool(lines))}"
            lines.append(f"multiply_async<{turned}>({operands});")
    return indent(lines, 12)
