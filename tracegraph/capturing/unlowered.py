"""Ops that no graph on a GPU holds yet: found by their names, or by what lowering refused.

Partial mode runs them as calls of XLA between two graphs. The names save a compilation that is
known to end in a refusal; other ops that become work which cannot be lowered are found after that
compilation, and cut out then.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from tracegraph.capturing.partition import find_marked_op, list_region_ops
from tracegraph.constraints.violation import Violation, locate_op
from tracegraph.ir.graph import Graph, Op
from tracegraph.runtime.errors import RefusedWork

# XLA's word for the work of these primitives, whatever their operands.
UNLOWERED_PRIMITIVES = {
    "rng_uniform": "rng_seed",
}


def find_unlowered(graph: Graph) -> dict[int, Violation]:
    """Finds the ops that are known to become work that no graph on a GPU holds.

    Args:
        graph: with calls inlined.

    Returns:
        The index of each such op of ``graph.ops``, with the reason, also when the reason lies in
        one of its subgraphs.
    """
    found = {}
    for index, op in enumerate(graph.ops):
        inner = _find_inner(op)
        if inner is not None:
            found[index] = _make_op_violation(op, inner, UNLOWERED_PRIMITIVES[inner.name])
    return found


def find_refused(
    graph: Graph,
    refused: Sequence[RefusedWork],
    uncapturable: Collection[int],
    *,
    is_precise: bool,
) -> dict[int, Violation]:
    """Finds the ops of work that lowering refused.

    Args:
        graph: that was lowered, in marked regions.
        refused: what was refused.
        uncapturable: indices of the ops that were not in these regions.
        is_precise: True to cut only what XLA names, where it names anything; False for all ops of
            the regions.

    Returns:
        The index of each op with the reason; empty when it lies in no op.
    """
    named: dict[int, Violation] = {}
    for work in refused:
        index = find_marked_op(work.path)
        if index is not None and index not in uncapturable and index < len(graph.ops):
            named.setdefault(
                index, _make_op_violation(graph.ops[index], graph.ops[index], work.kind)
            )
    if named and is_precise:
        return named
    regions = list_region_ops(graph, uncapturable)
    found: dict[int, Violation] = {}
    for work in refused:
        for index in regions.get(work.region, ()):
            found.setdefault(index, _make_neighbour_violation(graph.ops[index], work))
    return found | named


def _find_inner(op: Op) -> Op | None:
    """Returns the op itself or the first op inside of it that is known to be refused."""
    if _is_unlowered(op):
        return op
    for _, graph in op.subgraphs:
        for candidate in graph.ops:
            inner = _find_inner(candidate)
            if inner is not None:
                return inner
    return None


def _is_unlowered(op: Op) -> bool:
    # XLA drops what has no elements.
    if all(_count_elements(value.aval) == 0 for value in op.results):
        return False
    return op.name in UNLOWERED_PRIMITIVES


def _count_elements(aval: Any) -> int:
    return math.prod(aval.shape)


def _make_op_violation(op: Op, inner: Op, kind: str) -> Violation:
    within = "" if inner is op else f" inside `{op.name}`"
    return _make_violation(
        op, f"`{inner.name}`{within} becomes work that no graph on a GPU holds yet: {kind}"
    )


def _make_neighbour_violation(op: Op, work: RefusedWork) -> Violation:
    reason = f" ({work.reason})" if work.reason else ""
    return _make_violation(
        op,
        f"`{op.name}` is in one region with work that no graph on a GPU holds yet: "
        f"{work.kind}{reason}",
    )


def _make_violation(op: Op, what: str) -> Violation:
    return Violation(
        "unsupported",
        what,
        locate_op(op),
        "a CUDA graph is built here from kernels, memcpys, memsets, calls, branches and loops",
        'move it outside `capture`; mode="partial" calls XLA for it between two graphs',
        op,
    )
