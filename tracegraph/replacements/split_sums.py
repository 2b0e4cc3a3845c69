"""Matmuls whose sums XLA has split into a batch of shorter ones.

Note [Sums in one piece]
A matmul whose result has fewer tiles than the GPU has multiprocessors leaves some of them idle. So
XLA makes a batch of matmuls with shorter sums, which another kernel adds up, and asks cublasLt
for that batch. Algorithms of cublasLt split sums too, in as many parts as they like, but
only those of the matmul as it was. XLA may be told to leave it whole. On an H200 (640 x 4096) @
(4096 x 2048) in float32 takes 272 us as a batch of two, without the kernel that adds them up, and
239 us in one piece, which cublasLt cuts in three. What XLA splits for its own kernels is not looked
for.
"""

from __future__ import annotations

import functools
from typing import Any

from tracegraph.ir.graph import Graph, Literal, Op
from tracegraph.jax_internals import bind_op
from tracegraph.replacements.graph_view import count_depth
from tracegraph.replacements.match import Match
from tracegraph.replacements.wide_ops import WideOps
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.library_nodes import Matmul, MatmulNode


def find_split_sums(graph: Graph, definition: GraphDefinition) -> list[Match]:
    """Returns the matmuls of a graph that a definition computes as a batch; they compute the same.

    Args:
        graph: traced and optimised.
        definition: what XLA made of it.
    """
    batched = {
        _count_products(node.matmul)
        for stage in definition.stages
        for node in stage.nodes
        if isinstance(node, MatmulNode) and node.matmul.d.batch_count > 1
    }
    return [_match(op) for op in graph.ops if _is_plain(op) and _count_own_products(op) in batched]


def _count_products(matmul: Matmul) -> int:
    """Returns how many products a batch of matmuls has in all."""
    a, d = matmul.a, matmul.d
    return a.rows * a.columns * d.columns * d.batch_count


def _is_plain(op: Op) -> bool:
    """True for a matmul that is no batch of them."""
    if op.name != "dot_general" or any(isinstance(each, Literal) for each in op.operands):
        return False
    _, (batch, _) = op.params["dimension_numbers"]
    return not batch


def _count_own_products(op: Op) -> int:
    left, right = (each.aval for each in op.operands)
    return left.size * right.size // max(count_depth(op), 1)


def _match(op: Op) -> Match:
    inputs: Any = tuple(dict.fromkeys(op.operands))
    reference = WideOps((op,), inputs, op.results)
    compute = functools.partial(_compute, op, inputs)
    return Match(op, op.results, inputs, compute, reference, terms=count_depth(op))


def _compute(op: Op, inputs: tuple[Any, ...], *arrays: Any) -> list[Any]:
    known = dict(zip(inputs, arrays, strict=True))
    return bind_op(op, [known[each] for each in op.operands])
