"""The Graph as text: one line per op, stable between runs and machines.

::

    graph step(%0: f32[8,128], %1: f32[128]):
      constant c0 = %2: f32[128]
      %3: f32[8] = dot_general[dimension_numbers=(([1], [0]), ([], []))] %0, %1  # a.py:3 in step
      %4: f32[8] = mul %3, 2.0:f32[]  stream=2  # a.py:4 in step
      return %4 in place of %0
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracegraph.ir.graph import Graph, Literal, Op, Operand, Value
from tracegraph.jax_internals import is_host_aval, is_jaxpr, measure_scan

_SHORT_KINDS = (
    ("bfloat", "bf"),
    ("float", "f"),
    ("uint", "u"),
    ("int", "i"),
    ("complex", "c"),
)
# Placement and bookkeeping of JAX: long, different between versions, and never a graph's own.
_HIDDEN_PARAMS = frozenset(
    [
        "accuracy",
        "bwd",
        "call",
        "compiler_options_kvs",
        "ctx_mesh",
        "donated_invars",
        "effects",
        "ft_in",
        "ft_out",
        "fwd_jaxpr_thunk",
        "in_layouts",
        "in_shardings",
        "inline",
        "jvp_jaxpr_fun",
        "keep_unused",
        "linear",
        "num_carry",
        "num_consts",
        "out_layouts",
        "out_sharding",
        "out_shardings",
        "out_trees",
        "policy",
        "sharding",
        "_split_transpose",
    ]
)
# Of the results and the operands of one op in a message.
_SHOWN_VALUES = 6
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def print_graph(graph: Graph, *, source: bool = True) -> str:
    """Returns the graph as text, sub-graphs indented under their op.

    Args:
        graph: what to print.
        source: whether each line ends in the user's source line.

    Returns:
        One line per op, between a header and a ``return`` line.
    """
    head = f"graph {graph.name}({_print_inputs(graph)}):"
    return "\n".join([head, *_print_body(graph, "  ", source)]) + "\n"


def print_op(op: Op) -> str:
    """Returns an op as error messages show it, as ``%12 = pure_callback %7``.

    Of many results or operands the first are shown, and how many there are.
    """
    results, operands = _print_first(op.results), _print_first(op.operands)
    if len(op.results) > _SHOWN_VALUES:
        results = f"{len(op.results)} results, first: {print_operand(op.results[0])}"
    return f"{results} = {op.name} {operands}".removeprefix(" = ").rstrip()


def print_operand(operand: Operand) -> str:
    """Returns a value as ``%3``, a literal as ``2.0:f32[]``."""
    if isinstance(operand, Value):
        return f"%{operand.number}"
    return f"{_print_literal(operand)}:{print_type(operand.aval)}"


def print_type(aval: Any) -> str:
    """Returns an abstract value as ``f32[8,128]``, in host memory as ``f32<host>[8,128]``.

    Example:
        >>> import jax
        >>> print_type(jax.ShapeDtypeStruct((8, 128), "bfloat16"))
        'bf16[8,128]'
    """
    inner = getattr(aval, "inner_aval", None)
    if inner is not None:
        return f"ref<{print_type(inner)}>"
    if not hasattr(aval, "dtype"):
        return _clean(repr(aval))
    shape = ",".join(str(size) for size in aval.shape)
    place = "<host>" if is_host_aval(aval) else ""
    return f"{print_dtype(aval.dtype)}{place}[{shape}]"


def print_dtype(dtype: Any) -> str:
    """Returns a dtype as ``f32``; what has no short name keeps its long one."""
    name = getattr(dtype, "name", str(dtype))
    for long, short in _SHORT_KINDS:
        if name.startswith(long):
            return short + name[len(long) :]
    return name


def _print_first(operands: Sequence[Operand]) -> str:
    shown = [print_operand(operand) for operand in operands[:_SHOWN_VALUES]]
    rest = len(operands) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _print_body(graph: Graph, indent: str, source: bool) -> list[str]:
    lines = [
        f"{indent}constant {constant.name} = {_print_definition(constant.value)}"
        for constant in graph.constants
    ]
    for op in graph.ops:
        lines.append(indent + _print_line(op, source))
        for name, subgraph in op.subgraphs:
            lines.append(f"{indent}  {name}({_print_inputs(subgraph)}):")
            lines += _print_body(subgraph, indent + "    ", source)
    lines.append(indent + _print_return(graph))
    return lines


def _print_line(op: Op, source: bool) -> str:
    results = ", ".join(_print_definition(value) for value in op.results)
    params = _print_params(op)
    operands = ", ".join(print_operand(operand) for operand in op.operands)
    line = f"{results} = {op.name}{params} {operands}".removeprefix(" = ").rstrip()
    if op.origin.stream:
        line += f"  stream={op.origin.stream}"
    return f"{line}  # {op.origin.source}" if source else line


def _print_return(graph: Graph) -> str:
    targets = {
        output: print_operand(graph.inputs[index])
        for output, index in graph.aliases
        if 0 <= index < len(graph.inputs)
    }
    outputs = [
        print_operand(operand) + (f" in place of {targets[index]}" if index in targets else "")
        for index, operand in enumerate(graph.outputs)
    ]
    return ("return " + ", ".join(outputs)).rstrip()


def _print_inputs(graph: Graph) -> str:
    return ", ".join(_print_definition(value) for value in graph.inputs)


def _print_definition(value: Value) -> str:
    return f"%{value.number}: {print_type(value.aval)}"


def _print_literal(literal: Literal) -> str:
    array = np.asarray(literal.value)
    return str(array.item()) if array.ndim == 0 else "[...]"


def _print_params(op: Op) -> str:
    shown = _measure(op) | {
        name: value
        for name, value in op.params.items()
        if name not in _HIDDEN_PARAMS and not _is_dull(value)
    }
    if not shown:
        return ""
    return "[" + ", ".join(f"{name}={_print_param(value)}" for name, value in shown.items()) + "]"


def _measure(op: Op) -> dict[str, Any]:
    if op.name != "scan":
        return {}
    constants, carry = measure_scan(op.params)
    return {"constants": constants, "carry": carry}


def _is_dull(value: Any) -> bool:
    if value is None or value is False or is_jaxpr(value):
        return True
    return isinstance(value, tuple | list) and all(is_jaxpr(item) for item in value)


def _print_param(value: Any) -> str:
    if isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype")):
        return print_dtype(np.dtype(value))
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, frozenset | set):
        return "{" + ", ".join(sorted(_print_param(item) for item in value)) + "}"
    if type(value) is tuple or type(value) is list:
        inner = ", ".join(_print_param(item) for item in value)
        return f"[{inner}]" if type(value) is list else f"({inner}{',' * (len(value) == 1)})"
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    if isinstance(value, np.ndarray):
        return print_type(value)
    return _clean(str(value) if isinstance(value, str | np.generic) else repr(value))


def _clean(text: str) -> str:
    return " ".join(_ADDRESS.sub("", text).split())
