"""The rule `python-work`: two traces of one signature must give the same graph.

What differs was computed by Python: a clock, NumPy's random numbers, a counter. A CUDA graph would
replay the value of one trace forever. See Note [Moved sources].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.constraints.sources import SourceCall
from tracegraph.constraints.violation import Violation, locate_op
from tracegraph.ir.graph import STREAM_MARKS, Graph, Literal, Op, Operand, Value
from tracegraph.ir.printer import print_op, print_type
from tracegraph.jax_internals import is_jaxpr, is_key_dtype
from tracegraph.runtime.errors import shorten_list

_NAMED_CALLS = 3
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def compare_traces(
    first: Graph, second: Graph, calls: Sequence[SourceCall] = ()
) -> tuple[Violation, ...]:
    """Finds Python work that differs between two traces of the same signature.

    Args:
        first: one trace.
        second: another, of the same function and signature, after the same passes.
        calls: of clocks and random sources in the second, which moved them.

    Returns:
        One violation per op that reads another literal, constant or parameter, in order, up to the
        first op that is a different one.
    """
    comparison = _Comparison(first.name, describe_causes(calls))
    comparison.compare(first, second)
    return tuple(comparison.violations)


def is_same_array(first: Any, second: Any) -> bool:
    """True for one array object, or for two of the same dtype, shape and bytes.

    Example:
        >>> is_same_array(np.array(np.nan), np.array(np.nan)), is_same_array(0.0, -0.0)
        (True, False)
    """
    if first is second:
        return True
    one, other = read_array(first), read_array(second)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return np.array_equal(_view_bytes(one), _view_bytes(other))


def read_array(array: Any) -> np.ndarray[Any, Any]:
    """Returns an array's values on the host, a typed PRNG key's as its words."""
    dtype = getattr(array, "dtype", None)
    return np.asarray(
        jax.random.key_data(array) if dtype is not None and is_key_dtype(dtype) else array
    )


class _Comparison:
    """One walk over two graphs: which value of the second stands for which of the first."""

    def __init__(self, name: str, causes: str) -> None:
        self.violations: list[Violation] = []
        self._name, self._causes = name, causes
        self._partners: dict[int, Value] = {}
        self._arrays: dict[int, Any] = {}
        self._renamed: dict[tuple[str, int], int] = {}

    def compare(self, first: Graph, second: Graph) -> bool:
        """Compares op by op; False at the first pair of different ops, which ends it."""
        self._pair(first.inputs, second.inputs)
        for graph in (first, second):
            self._arrays.update((id(held.value), held.array) for held in graph.constants)
        for one, other in zip(first.ops, second.ops, strict=False):
            if not self._compare_op(one, other):
                return False
        if len(first.ops) != len(second.ops):
            self._add_end_violation(first, second)
            return False
        self._compare_outputs(first, second)
        return True

    def _compare_op(self, first: Op, second: Op) -> bool:
        if not (_has_same_form(first, second) and self._has_same_order(first, second)):
            self._add_violation(locate_op(first), print_op(first), print_op(second), first)
            return False
        difference = self._find_difference(first.operands, second.operands)
        if first.name not in STREAM_MARKS:
            difference = difference or _find_param_difference(first.params, second.params)
        if difference is not None:
            self._add_violation(locate_op(first), *difference, first)
        self._pair(first.results, second.results)
        pairs = zip(first.subgraphs, second.subgraphs, strict=True)
        return all(self.compare(one, other) for (_, one), (_, other) in pairs)

    def _has_same_order(self, first: Op, second: Op) -> bool:
        """True when streams and events correspond; each trace numbers its own."""
        pairs = [("stream", first.origin.stream, second.origin.stream)]
        if first.name in STREAM_MARKS:
            pairs += [(key, first.params[key], second.params[key]) for key in ("stream", "event")]
        return all(
            self._renamed.setdefault((kind, one), other) == other
            and self._renamed.setdefault((f"{kind} of the second", other), one) == one
            for kind, one, other in pairs
        )

    def _compare_outputs(self, first: Graph, second: Graph) -> None:
        difference = self._find_difference(first.outputs, second.outputs)
        if difference is not None:
            self._add_violation(f"the results of `{first.name}`", *difference, None)

    def _find_difference(
        self, first: Sequence[Operand], second: Sequence[Operand]
    ) -> tuple[str, str] | None:
        if len(first) != len(second):
            return f"{len(first)} values", f"{len(second)} values"
        for one, other in zip(first, second, strict=True):
            if not self._is_same(one, other):
                return self._show(one, other)
        return None

    def _is_same(self, one: Operand, other: Operand) -> bool:
        known, known_other = self._read(one), self._read(other)
        if known is None and known_other is None:
            return self._partners.get(id(one)) is other
        if known is None or known_other is None:
            return False
        return is_same_array(known, known_other)

    def _show(self, one: Operand, other: Operand) -> tuple[str, str]:
        known, known_other = self._read(one), self._read(other)
        if known is None or known_other is None:
            return _name_operand(one), _name_operand(other)
        return show_arrays(read_array(known), read_array(known_other))

    def _read(self, operand: Operand) -> Any:
        return operand.value if isinstance(operand, Literal) else self._arrays.get(id(operand))

    def _pair(self, first: Sequence[Value], second: Sequence[Value]) -> None:
        pairs = zip(first, second, strict=False)
        self._partners.update((id(one), other) for one, other in pairs)

    def _add_end_violation(self, first: Graph, second: Graph) -> None:
        longer = max(first, second, key=lambda graph: len(graph.ops))
        op = longer.ops[min(len(first.ops), len(second.ops))]
        counts = (f"{len(first.ops)} ops", f"{len(second.ops)} ops")
        self._add_violation(locate_op(op), *counts, op)

    def _add_violation(self, where: str, first: str, second: str, op: Op | None) -> None:
        difference = f"{first} in the first trace, {second} in the second"
        self.violations.append(make_work_violation(self._name, where, difference, self._causes, op))


def make_work_violation(
    graph_name: str, where: str, difference: str, causes: str, op: Op | None = None
) -> Violation:
    """Returns the violation that a trace differs from the one before."""
    return Violation(
        "python-work",
        f"`{graph_name}` does Python work that changes from one trace to the next",
        where,
        f"{difference}; a CUDA graph would freeze one of them ({causes})",
        "pass the value as an argument, and draw random numbers with jax.random from a key "
        "argument",
        op,
    )


def describe_causes(calls: Sequence[SourceCall]) -> str:
    """Returns which clocks and random sources were called, or what else may be the cause.

    Example:
        >>> describe_causes([SourceCall("time.time", "17.5", "train.py:12 in step")])
        '`time.time` gave 17.5 at train.py:12 in step; the second trace gets other values'
    """
    if not calls:
        return "a counter, or other state of Python that a call changes"
    unique = {(call.name, call.where): str(call) for call in reversed(calls)}
    named = shorten_list(list(reversed(unique.values())), _NAMED_CALLS)
    return f"{', '.join(named)}; the second trace gets other values"


def _has_same_form(first: Op, second: Op) -> bool:
    if _describe_form(first) != _describe_form(second):
        return False
    results = zip(first.results, second.results, strict=True)
    return all(_is_same_type(one.aval, other.aval) for one, other in results)


def _describe_form(op: Op) -> tuple[Any, ...]:
    subgraphs = [(name, len(graph.inputs)) for name, graph in op.subgraphs]
    return op.name, len(op.operands), len(op.results), subgraphs


def _is_same_type(first: Any, second: Any) -> bool:
    return first == second or print_type(first) == print_type(second)


def _find_param_difference(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> tuple[str, str] | None:
    for name in first:
        if not is_same_param(first[name], second.get(name)):
            return f"{name}={first[name]}", f"{name}={second.get(name)}"
    return None


def is_same_param(first: Any, second: Any) -> bool:
    """True for parameters that mean the same; functions and jaxprs count as the same.

    A jaxpr is compared as the sub-graph it became, and a function is new at every trace.
    """
    if first is second:
        return True
    if is_jaxpr(first) or (callable(first) and not isinstance(first, type)):
        return type(first) is type(second)
    if isinstance(first, np.ndarray | jax.Array):
        return isinstance(second, np.ndarray | jax.Array) and is_same_array(first, second)
    if isinstance(first, tuple | list):
        return type(first) is type(second) and _are_same_params(first, second)
    if isinstance(first, frozenset | set):
        # Equal sets need not print in one order.
        return type(first) is type(second) and first == second
    return _ADDRESS.sub("", repr(first)) == _ADDRESS.sub("", repr(second))


def _are_same_params(first: Sequence[Any], second: Sequence[Any]) -> bool:
    if len(first) != len(second):
        return False
    return all(is_same_param(one, other) for one, other in zip(first, second, strict=True))


def show_arrays(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> tuple[str, str]:
    """Returns both as text, of large ones only the first element that differs.

    Example:
        >>> show_arrays(np.array([1, 2, 3]), np.array([1, 5, 3]))
        ('[1] = 2', '[1] = 5')
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return print_type(first), print_type(second)
    if first.ndim == 0:
        return str(first[()]), str(second[()])
    size = first.dtype.itemsize
    differs = (_view_bytes(first) != _view_bytes(second)).reshape(-1, size).any(axis=1)
    place = np.unravel_index(int(np.argmax(differs)), first.shape)
    index = "[" + ",".join(str(int(number)) for number in place) + "]"
    return f"{index} = {first[place]}", f"{index} = {second[place]}"


def _name_operand(operand: Operand) -> str:
    return f"%{operand.number}" if isinstance(operand, Value) else str(operand.value)


def _view_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
