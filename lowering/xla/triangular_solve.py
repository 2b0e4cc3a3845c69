"""Triangular solves: from XLA's thunk to one call of cuBLAS's ``trsm``.

XLA lays matrices out as cuBLAS wants them, columns first, and has copied B to where X will be. Its
temporary buffer holds the addresses of the matrices of a batch, written anew at each execution; in
a graph addresses do not change, so they are written once, when the graph is built, and the buffer
is not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tracegraph.lowering.device_program import DeviceStep
from tracegraph.lowering.xla.allow_list import check_listed
from tracegraph.lowering.xla.enums import read_name, read_value
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.scope import Scope
from tracegraph.runtime.definition.library_calls import TriangularSolve
from tracegraph.runtime.definition.library_nodes import LibraryCallNode
from tracegraph.runtime.definition.nodes import BufferUse

DTYPES = {"F32": "float32", "F64": "float64", "C64": "complex64", "C128": "complex128"}
ITEM_BYTES = {"F32": 4, "F64": 8, "C64": 8, "C128": 16}
TRANSPOSES = {"NO_TRANSPOSE": "N", "TRANSPOSE": "T", "ADJOINT": "C"}
# cuBLAS counts rows, columns and systems in 32 bits.
MAX_COUNT = 2**31 - 1


def decode_triangular_solve(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    """Returns the step of an ``xla.gpu.TriangularSolveThunkProto``: none where B is empty.

    Args:
        message: with listed fields only.
        name: of the instruction that it computes.
        scope: what it refers to.

    Raises:
        Refusal: a type or a shape that cuBLAS is not called with.
    """
    solve = _read_solve(message)
    a = scope.find_shaped_use(message.a_buffer)
    b = scope.find_shaped_use(message.b_buffer)
    item_bytes = ITEM_BYTES[read_name(message.b_buffer.shape, "element_type")]
    _check_bytes("A", a, solve.batch_count * solve.order**2 * item_bytes)
    _check_bytes("B", b, solve.batch_count * solve.rows * solve.columns * item_bytes)
    if a.overlaps(b):
        raise Refusal("solves in place of its own matrix")
    if not b.nbytes:
        return []
    operands = {"a": a, "b": b} | scope.add_workspace(solve)
    node = LibraryCallNode(name, solve, tuple(operands.items()))
    return [DeviceStep(node, reads=(a, b), writes=node.written)]


def _read_solve(message: Any) -> TriangularSolve:
    shapes = [message.a_buffer.shape, message.b_buffer.shape]
    for shape in shapes:
        check_listed(shape)
    types = [read_name(shape, "element_type") for shape in shapes]
    if types[0] != types[1] or types[1] not in DTYPES:
        raise Refusal(f"solves a matrix of {types[0]} for one of {types[1]}")
    a, b = (tuple(shape.dimensions) for shape in shapes)
    options = message.options
    if len(b) < 2 or len(a) != len(b) or a[:-2] != b[:-2]:
        raise Refusal(f"solves systems of the shapes {a} and {b}")
    batch_count, (rows, columns) = math.prod(b[:-2]), b[-2:]
    order = rows if options.left_side else columns
    if a[-2:] != (order, order) or max(rows, columns, batch_count) > MAX_COUNT:
        raise Refusal(f"solves systems of the shapes {a} and {b}")
    # A is as square as its transpose: XLA passes on the bytes, whatever it calls their axes.
    _check_columns("A", a, shapes[0], is_square=True)
    _check_columns("B", b, shapes[1], is_square=False)
    return TriangularSolve(
        dtype=DTYPES[types[1]],
        is_left=options.left_side,
        is_lower=options.lower,
        is_unit=options.unit_diagonal,
        transpose=read_value(options, "transpose_a", TRANSPOSES),
        rows=rows,
        columns=columns,
        batch_count=batch_count,
    )


def _check_columns(name: str, sizes: Sequence[int], shape: Any, *, is_square: bool) -> None:
    """Refuses a batch of matrices unless each is contiguous and, but for a square, by columns."""
    order = list(shape.layout.minor_to_major)
    rank = len(sizes)
    outer = [axis for axis in order[2:] if sizes[axis] != 1] if len(order) == rank else []
    inner = order[:2]
    is_by_columns = inner == [rank - 2, rank - 1] or 1 in sizes[-2:]
    is_sound = (
        sorted(order) == list(range(rank))
        and sorted(inner) == [rank - 2, rank - 1]
        and outer == sorted(outer, reverse=True)
        and shape.layout.tail_padding_alignment_in_elements in (0, 1)
        and not shape.layout.element_size_in_bits
        and not any(shape.is_dynamic_dimension)
    )
    if not is_sound or not (is_by_columns or is_square):
        raise Refusal(f"has {name} of {rank} axes in the order {order}, innermost first")


def _check_bytes(name: str, use: BufferUse, wanted: int) -> None:
    if use.nbytes != wanted:
        raise Refusal(f"has {name} of {wanted} bytes in {use.nbytes}")
