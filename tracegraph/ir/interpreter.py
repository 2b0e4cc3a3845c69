"""The slow, obvious interpreter of the IR: the oracle for every pass.

``interpret`` runs each op alone and walks calls and control flow through their sub-graphs in plain
Python. ``evaluate_graph`` binds every op whole, as JAX evaluates a jaxpr, so it can be traced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tracegraph.ir.graph import Graph, Literal, Op, Operand, Value
from tracegraph.jax_internals import bind_op, describe_physical, measure_scan, to_logical

OpRule = Callable[[Op, list[Any]], list[Any]]
# Runs a sub-graph; the text says which run it is, as ``iteration 2``.
RunSubgraph = Callable[[Graph, list[Any], str], Any]


def interpret(graph: Graph, *arrays: Any) -> tuple[Any, ...]:
    """Evaluates a graph op by op; calls, ``cond``, ``while`` and ``scan`` in plain Python.

    Args:
        graph: what to evaluate.
        *arrays: one array per input, of its shape and dtype.

    Returns:
        One array per output.

    Example:
        >>> from tracegraph.tracing.trace import trace_function
        >>> graph = trace_function(lambda x: x * 2 + 1, (1.0,), {}, name="f").graph
        >>> [float(result) for result in interpret(graph, 3.0)]
        [7.0]
    """
    results = _run(graph, [_to_array(array) for array in arrays], _interpret_op)
    pairs = zip(graph.outputs, results, strict=True)
    return tuple(_to_output(operand, result) for operand, result in pairs)


def evaluate_graph(graph: Graph, *arrays: Any) -> tuple[Any, ...]:
    """Binds every op of the graph in turn; under ``jax.jit`` this is the function again.

    Args:
        graph: what to evaluate.
        *arrays: one array or tracer per input.

    Returns:
        One array or tracer per output; a literal as it stands in the graph.
    """
    return tuple(_run(graph, list(arrays), bind_op))


def _run(graph: Graph, arrays: list[Any], apply: OpRule) -> list[Any]:
    environment: dict[Value, Any] = dict(zip(graph.inputs, arrays, strict=True))
    environment |= {constant.value: constant.array for constant in graph.constants}

    def read(operand: Operand) -> Any:
        return operand.value if isinstance(operand, Literal) else environment[operand]

    for op in graph.ops:
        results = apply(op, [read(operand) for operand in op.operands])
        environment.update(zip(op.results, results, strict=True))
    return [read(operand) for operand in graph.outputs]


def apply_op(op: Op, operands: list[Any], run: RunSubgraph) -> list[Any]:
    """Evaluates one op alone; calls and control flow go through ``run``, in plain Python."""
    rule = _RULES.get(op.name)
    return bind_op(op, operands) if rule is None else rule(op, operands, run)


def _interpret_op(op: Op, operands: list[Any]) -> list[Any]:
    return apply_op(op, operands, lambda graph, arrays, _: interpret(graph, *arrays))


def _interpret_call(op: Op, operands: list[Any], run: RunSubgraph) -> list[Any]:
    ((_, subgraph),) = op.subgraphs
    return list(run(subgraph, operands, ""))


def _interpret_cond(op: Op, operands: list[Any], run: RunSubgraph) -> list[Any]:
    index, *rest = operands
    branch = min(max(int(index), 0), len(op.subgraphs) - 1)
    return list(run(op.subgraphs[branch][1], rest, f"branch {branch}"))


def _interpret_while(op: Op, operands: list[Any], run: RunSubgraph) -> list[Any]:
    subgraphs = dict(op.subgraphs)
    first, second = op.params["cond_nconsts"], op.params["body_nconsts"]
    cond_constants, body_constants = operands[:first], operands[first : first + second]
    carry = [_to_array(operand) for operand in operands[first + second :]]
    for number in itertools.count():
        place = f"iteration {number}"
        (goes_on,) = run(subgraphs["cond_jaxpr"], [*cond_constants, *carry], place)
        if not jnp.any(goes_on):
            break
        new = run(subgraphs["body_jaxpr"], [*body_constants, *carry], place)
        carry = [_select(goes_on, after, before) for after, before in zip(new, carry, strict=True)]
    return carry


def _interpret_scan(op: Op, operands: list[Any], run: RunSubgraph) -> list[Any]:
    ((_, body),) = op.subgraphs
    length = op.params["length"]
    constant_count, carry_count = measure_scan(op.params)
    constants = operands[:constant_count]
    carry = operands[constant_count : constant_count + carry_count]
    sequences = [_to_array(each) for each in operands[constant_count + carry_count :]]
    steps: list[list[Any]] = []
    for index in reversed(range(length)) if op.params["reverse"] else range(length):
        arrays = [*constants, *carry, *(each[index] for each in sequences)]
        results = run(body, arrays, f"iteration {index}")
        carry = list(results[:carry_count])
        steps.append(list(results[carry_count:]))
    if op.params["reverse"]:
        steps.reverse()
    if not steps:
        empty = [_make_empty(value.aval) for value in op.results[carry_count:]]
        return [*map(_to_array, carry), *empty]
    return [*carry, *(jnp.stack(column) for column in zip(*steps, strict=True))]


_RULES: dict[str, Callable[[Op, list[Any], RunSubgraph], list[Any]]] = {
    "jit": _interpret_call,
    "pjit": _interpret_call,
    "closed_call": _interpret_call,
    "core_closed_call": _interpret_call,
    "core_call": _interpret_call,
    "call": _interpret_call,
    "custom_jvp_call": _interpret_call,
    "custom_vjp_call": _interpret_call,
    "remat2": _interpret_call,
    "checkpoint": _interpret_call,
    "cond": _interpret_cond,
    "while": _interpret_while,
    "scan": _interpret_scan,
}


def _select(condition: Any, after: Any, before: Any) -> Any:
    # A vectorised `while` has one condition per element; those that are done keep their value.
    if jnp.ndim(condition) == 0:
        return after
    missing = after.ndim - condition.ndim
    return jnp.where(condition.reshape(condition.shape + (1,) * missing), after, before)


def _make_empty(aval: Any) -> Any:
    return to_logical(jnp.zeros(*describe_physical(aval)), aval)


def _to_array(array: Any) -> Any:
    return array if isinstance(array, jax.Array) or _is_reference(array) else jnp.asarray(array)


def _is_reference(array: Any) -> bool:
    return isinstance(array, jax.Ref)


def _to_output(operand: Operand, result: Any) -> Any:
    array = _to_array(result)
    if _is_reference(array) or array.dtype == operand.aval.dtype:
        return array
    return array.astype(operand.aval.dtype)
