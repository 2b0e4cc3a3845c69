"""Matmuls that are scaled and subtracted: an update of weights, by gradient descent.

Note [Updates in matmuls]
cublasLt computes ``alpha * a @ b + beta * c`` without a further pass over ``c`` and the matmul.
XLA uses that for what is added to a matmul, and folds a constant factor into ``alpha``. What is
subtracted stays a kernel of its own, which reads both and writes the result. So a difference
becomes a sum, with the factor negated:

    c - factor * (a @ b)  =  (-factor) * (a @ b) + c

The matmul is not rounded in between. On an H200 (4096 x 640) @ (640 x 2048) in float32 takes
251 us that way, 264 us with a kernel behind it.

Weights in float32 that are multiplied in 16 bits have gradients in 16 bits, which are widened
before they are subtracted or added. cublasLt writes float32 of such operands, so that rounding,
and the pass that widens, are left out too.

XLA folds a factor only if nothing else is multiplied by it, and matrices of one shape share theirs.
So those of several layers differ in their last bits: by seven bits of a float32 for a hundred
layers, where the gradient that XLA rounds to 16 bits keeps eight. Matmuls of float32 keep their
factor.

The gradient of an embedding that is multiplied again at the end has a second part, a scatter of
the gradients of rows. It is added to the updated weights then, in their type: scattered in 16 bits
it would be many times slower.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tracegraph.ir.graph import Graph, Literal, Op, Operand, Value
from tracegraph.jax_internals import bind_op
from tracegraph.replacements.graph_view import GraphView, count_depth
from tracegraph.replacements.match import Machine, Match
from tracegraph.replacements.wide_ops import WideOps, add_scattered, widen_op

# The pass over a smaller result is one small kernel.
MIN_ELEMENTS = 1 << 18
# Of factors whose last bits may differ.
_LEAST = 1e-30


@dataclasses.dataclass(frozen=True)
class MatmulUpdates:
    """Finds matmuls that are scaled and subtracted, see Note [Updates in matmuls]."""

    name: str = "updates in matmuls"

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:
        """Returns one match per update; there is no cublasLt without a GPU."""
        if machine is None:
            return []
        view = GraphView(graph)
        uses = Counter(operand for op in graph.ops for operand in op.operands)
        uses.update(graph.outputs)
        found: list[Match] = []
        shared: Counter[Any] = Counter()
        for op in graph.ops:
            update = _find_update(view, uses, op) if op.name in ("sub", "add") else None
            if update is None:
                continue
            start, chain = update
            factors = op.results[0].aval.shape, chain.factor
            if chain.widens:
                chain = dataclasses.replace(chain, factor=_move(chain.factor, shared[factors]))
            shared[factors] += 1
            found.append(_make_match(op, start, chain))
        return found


@dataclasses.dataclass(frozen=True)
class Chain:
    """What leads from a matmul to what is subtracted or added.

    Attributes:
        ops: all of them, in the order of the graph.
        parts: the matmul and transpositions.
        factor: by which it is multiplied.
        scatter: what is added to the matmul, rows at indices; if there is one.
        widens: True where values of 16 bits become float32.
    """

    ops: tuple[Op, ...]
    parts: tuple[Op, ...]
    factor: float
    scatter: Op | None
    widens: bool


@dataclasses.dataclass(frozen=True)
class Update:
    """Adds what is scaled by a factor.

    Attributes:
        chain: what is added; its factor has the sign of an addition.
        inputs: what is given: that which is added to, then the operands of the chain.
    """

    chain: Chain
    inputs: tuple[Value, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Returns the one result."""
        chain, dtype = self.chain, arrays[0].dtype
        known: dict[Operand, Any] = dict(zip(self.inputs, arrays, strict=True))
        matmul, turns = chain.parts[0], chain.parts[1:]
        bound = widen_op(matmul, precise=False) if chain.widens else matmul
        sides = [known[each] for each in matmul.operands]
        multiplied = _multiply(bound, sides, _find_order(turns, chain.parts[-1]))
        factor = np.asarray(chain.factor, dtype)
        result = lax.add(lax.mul(multiplied, factor), known[self.inputs[0]])
        if chain.scatter is None:
            return [result]
        _, indices, updates = chain.scatter.operands
        moves = lax.mul(lax.convert_element_type(known[updates], dtype), factor)
        return [add_scattered(chain.scatter, result, known[indices], moves)]


def _find_order(turns: Sequence[Op], last: Op) -> tuple[int, ...]:
    """Returns the axes of a matmul's result in the order that transpositions leave them in."""
    order = tuple(range(len(last.results[0].shape)))
    for op in turns:
        order = tuple(order[axis] for axis in op.params["permutation"])
    return order


def _multiply(matmul: Op, sides: list[Any], order: tuple[int, ...]) -> Any:
    """Returns a matmul with its axes in another order; where that is enough, its sides change.

    XLA takes nothing in behind a transposition.
    """
    contracted, batch = matmul.params["dimension_numbers"]
    left = len(sides[0].shape) - len(contracted[0])
    if order == (*range(left, len(order)), *range(left)) and not batch[0]:
        params = {**matmul.params, "dimension_numbers": (contracted[::-1], batch)}
        matmul, sides = dataclasses.replace(matmul, params=params), sides[::-1]
        order = tuple(range(len(order)))
    (result,) = bind_op(matmul, sides)
    return result if order == tuple(range(len(order))) else lax.transpose(result, order)


def _move(factor: float, number: int) -> float:
    """Returns the float32 that is so many places from a factor, on both sides in turn.

    What is zero, or near the ends of float32, stays as it is.
    """
    if not _LEAST <= abs(factor) <= 1 / _LEAST:
        return factor
    places = (number + 1) // 2 * (1 if number % 2 else -1)
    bits = np.float32(factor).view(np.int32) + np.int32(places)
    return float(bits.view(np.float32))


def _find_update(view: GraphView, uses: Counter[Any], op: Op) -> tuple[Value, Chain] | None:
    """Returns what is added to, and what is added, if that comes from a matmul."""
    (result,) = op.results
    if result.aval.size < MIN_ELEMENTS or not jnp.issubdtype(result.dtype, np.floating):
        return None
    # XLA finds what is added, but for a matmul in another type.
    is_sum = op.name == "add"
    for start, moved in [op.operands, op.operands[::-1]][: 1 + is_sum]:
        chain = _follow(view, uses, moved)
        if chain is None or isinstance(start, Literal) or (is_sum and not chain.widens):
            continue
        return start, chain if is_sum else dataclasses.replace(chain, factor=-chain.factor)
    return None


def _make_match(op: Op, start: Value, chain: Chain) -> Match:
    operands = [*chain.parts[0].operands]
    if chain.scatter is not None:
        operands += chain.scatter.operands[1:]
    inputs: Any = tuple(dict.fromkeys([start, *operands]))
    reference = WideOps((*chain.ops, op), inputs, op.results)
    return Match(
        op, op.results, inputs, Update(chain, inputs), reference, count_depth(chain.parts[0])
    )


def _follow(view: GraphView, uses: Counter[Any], moved: Operand) -> Chain | None:
    """Returns what leads from a matmul to what is subtracted, where one op of it scales."""
    ops: list[Op] = []
    factors: list[float] = []
    parts: list[Op] = []
    scatter: Op | None = None
    widens = False
    while uses[moved] == 1 and (op := view.makers.get(moved)) is not None:
        ops.append(op)
        if op.name == "dot_general" and not any(isinstance(each, Literal) for each in op.operands):
            parts.append(op)
            if len(factors) != 1:
                return None
            return Chain(tuple(ops[::-1]), tuple(parts[::-1]), factors[0], scatter, widens)
        literals = [each for each in op.operands if isinstance(each, Literal)]
        if op.name == "mul" and literals and not scatter:
            factors.append(float(literals[0].value))
            (moved,) = [each for each in op.operands if not isinstance(each, Literal)]
        elif op.name == "transpose":
            parts.append(op)
            (moved,) = op.operands
        elif op.name == "convert_element_type" and _is_wider(op) and not scatter:
            widens = True
            (moved,) = op.operands
        elif op.name == "add_any" and widens and not scatter and not parts:
            found = _find_scatter(view, uses, op)
            if found is None:
                return None
            moved, scatter, zeros = found
            ops += [scatter, zeros]
        else:
            return None
    return None


def _is_wider(op: Op) -> bool:
    """True for an op that makes float32 of 16 bits."""
    before, after = (np.dtype(each.aval.dtype) for each in (op.operands[0], op.results[0]))
    return jnp.issubdtype(before, np.floating) and before.itemsize == 2 and after == np.float32


def _find_scatter(view: GraphView, uses: Counter[Any], op: Op) -> tuple[Operand, Op, Op] | None:
    """Returns the operand of a sum that is no scatter into zeros, that scatter, and the zeros."""
    for one, other in (op.operands, op.operands[::-1]):
        scatter = view.makers.get(one)
        if scatter is None or scatter.name != "scatter-add" or uses[one] != 1:
            continue
        zeros = view.makers.get(scatter.operands[0])
        if zeros is None or zeros.name != "broadcast_in_dim":
            continue
        value = zeros.operands[0]
        if isinstance(value, Literal) and value.value == 0:
            return other, scatter, zeros
    return None
