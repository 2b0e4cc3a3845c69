"""The rule `host-memory`: the results of a graph are in the memory of its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.violation import Violation, locate_op
from tracegraph.ir.graph import Graph, Op, Operand
from tracegraph.jax_internals import is_host_aval


def check_host_memory(graph: Graph, name_results: Callable[[], Sequence[str]]) -> list[Violation]:
    """Finds the results that a function leaves in host memory.

    Args:
        graph: of the function.
        name_results: returns the names of its results, as ``result['state']``.
    """
    if not any(is_host_aval(operand.aval) for operand in graph.outputs):
        return []
    makers: dict[Operand, Op] = {result: op for op in graph.ops for result in op.results}
    return [
        _make_violation(graph, name, makers.get(operand))
        for operand, name in zip(graph.outputs, name_results(), strict=True)
        if is_host_aval(operand.aval)
    ]


def _make_violation(graph: Graph, name: str, op: Op | None) -> Violation:
    return Violation(
        "host-memory",
        f"{name} of `{graph.name}` is in host memory",
        f"{locate_caller()}, {name}" if op is None else locate_op(op),
        "a graph's results are in the memory of its device",
        "return it from there, and move it behind the call: "
        "jax.device_put(x, jax.memory.Space.Host)",
        op,
    )
