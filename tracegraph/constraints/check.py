"""Checks a Graph against the capture constraints, before anything touches a device."""

from __future__ import annotations

from tracegraph.constraints.callbacks import find_callback_violation
from tracegraph.constraints.control_flow import find_control_flow_violation
from tracegraph.constraints.dependence import Dependence, iterate_ops, list_subgraphs
from tracegraph.constraints.leaks import check_leaks
from tracegraph.constraints.streams import check_streams, find_body_violation
from tracegraph.constraints.violation import Violation
from tracegraph.ir.graph import Graph, Op


def check_graph(
    graph: Graph,
    *,
    argument_count: int | None = None,
    takes_control_flow: bool = True,
) -> tuple[Violation, ...]:
    """Checks every constraint that can be seen in a Graph.

    Args:
        graph: with calls inlined.
        argument_count: how many leaves the arguments have; with it, inputs that belong to another
            trace are found.
        takes_control_flow: False refuses loops and branches whose path depends on data.

    Returns:
        All violations in program order; none if the graph can be captured whole.
    """
    dependence = None if takes_control_flow else Dependence(graph)
    ops = list(iterate_ops(graph))
    found = [
        violation
        for op in ops
        if (violation := _find_op_violation(op, dependence, graph.name)) is not None
    ]
    found += check_streams(graph)
    bodies = (find_body_violation(op, graph.name) for op in ops)
    found += [violation for violation in bodies if violation is not None]
    if argument_count is not None:
        found += check_leaks(graph, argument_count)
    if not found:
        return ()
    order = {id(op): index for index, op in enumerate(ops)}
    found.sort(key=lambda violation: order.get(id(violation.op), len(order)))
    return _drop_repeated(found)


def find_uncapturable(graph: Graph, *, takes_control_flow: bool = True) -> dict[int, Violation]:
    """Finds the ops that can't be inside a CUDA graph, where partial mode splits.

    Args:
        graph: with calls inlined.
        takes_control_flow: False for loops and branches whose path depends on data, too.

    Returns:
        The index of each such op of ``graph.ops``, with the first reason, also when the reason lies
        in one of its subgraphs.
    """
    dependence = None if takes_control_flow else Dependence(graph)
    found = {}
    for index, op in enumerate(graph.ops):
        violation = _find_first_violation(op, dependence, graph.name)
        if violation is not None:
            found[index] = violation
    return found


def _find_op_violation(op: Op, dependence: Dependence | None, graph_name: str) -> Violation | None:
    violation = find_callback_violation(op, graph_name)
    if violation is not None or dependence is None:
        return violation
    return find_control_flow_violation(op, dependence, graph_name)


def _find_first_violation(
    op: Op, dependence: Dependence | None, graph_name: str
) -> Violation | None:
    inner = (o for subgraph in list_subgraphs(op) for o in iterate_ops(subgraph))
    for candidate in (op, *inner):
        violation = _find_op_violation(candidate, dependence, graph_name)
        if violation is not None:
            return violation
    return None


def _drop_repeated(violations: list[Violation]) -> tuple[Violation, ...]:
    # One line of user code can become several copies of an op, as in a linear solve.
    kept: dict[tuple[str, ...], Violation] = {}
    for violation in violations:
        place = violation.where.split(",")[0]
        name = "" if violation.op is None else violation.op.name
        kept.setdefault((violation.rule, violation.what, place, name), violation)
    return tuple(kept.values())
