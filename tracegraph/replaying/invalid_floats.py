"""`debug_nans=True`: a replay whose results hold a NaN or an infinity, and the op that made it.

Note [Searching an invalid float]. The graph itself computes nothing more: the option checks its
results, which waits for them. Only when they are invalid is an instrumented program compiled. It
runs the ops of the graph on the same inputs and counts, in each floating value, what is not finite.
From the invalid results the search goes back through invalid values to the ops whose operands are
finite; the first of these is named. An infinity that a mask makes and nothing invalid comes of is
not on that way. In loops and branches the op is looked for by running these in Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.mismatch import print_leaf_type
from tracegraph.constraints.violation import locate_op
from tracegraph.ir.graph import STREAM_MARKS, Graph, Literal, Op, Operand, Value
from tracegraph.ir.interpreter import apply_op
from tracegraph.jax_internals import bind_op
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.errors import InvalidFloatError, shorten_list
from tracegraph.runtime.jax_interop import to_plain
from tracegraph.tracing.checked_graph import CheckedGraph

ANCHOR = "invalid-float"
# NaN and infinities.
Count = tuple[int, int]
# How many operands a message describes.
_MOST_OPERANDS = 3


class InvalidResultsSignal(Exception):
    """Results of a replay are not finite; a user never sees it.

    Args:
        checked: the graph that was replayed.
    """

    def __init__(self, checked: CheckedGraph) -> None:
        super().__init__()
        self.checked = checked


@dataclasses.dataclass(frozen=True)
class Made:
    """An op that makes an invalid float.

    Attributes:
        op: in the graph, or in a body.
        operands: their values.
        results: their values.
        places: the runs of the bodies that it is in, the outermost first.
    """

    op: Op
    operands: list[Any]
    results: list[Any]
    places: tuple[str, ...]


class _MadeSignal(Exception):
    def __init__(self, made: Made) -> None:
        super().__init__()
        self.made = made


def watch_results(build: Callable[[], Any], checked: CheckedGraph) -> Callable[[], Any]:
    """Returns a function that builds the results of a replay and raises if one is not finite.

    Args:
        build: returns a tree of arrays.
        checked: the graph that is replayed.
    """

    def build_watched() -> Any:
        results = build()
        check_finite(results, checked)
        return results

    return build_watched


def check_finite(results: Any, checked: CheckedGraph) -> None:
    """Raises the signal if a tree of results holds a NaN or an infinity.

    Args:
        results: of a replay.
        checked: the graph that was replayed.
    """
    with _without_checks():
        counts = _count([_take_plain(each) for each in jax.tree_util.tree_leaves(results)])
    if any(map(any, counts)):
        raise InvalidResultsSignal(checked)


def make_invalid_error(
    signal: InvalidResultsSignal, leaves: Sequence[Any], names: Sequence[str]
) -> InvalidFloatError:
    """Returns the error that names the first op that made an invalid float, or the argument.

    Args:
        signal: raised for the results.
        leaves: the inputs of the graph that was replayed.
        names: of the inputs.
    """
    graph = signal.checked.graph
    leaves = [_take_plain(leaf) for leaf in leaves]
    with _without_checks():
        op, sources = _search(graph, leaves)
        if op is not None:
            return _make_op_error(graph.name, _run_alone(graph, op, leaves))
        return _make_source_error(graph, leaves, names, sources)


def _search(graph: Graph, leaves: Sequence[Any]) -> tuple[Op | None, set[Operand]]:
    """Returns the first op that made what is invalid in the results, and inputs that were so."""
    order: list[Operand] = []

    def count(*arrays: Any) -> Any:
        known = _evaluate(graph, arrays)
        order[:] = [value for value, array in known.items() if _is_float(array)]
        return _count_traced([known[value] for value in order])

    found = np.asarray(jax.jit(count)(*leaves))
    counts: dict[Operand, Count] = {
        value: (int(nans), int(infs)) for value, (nans, infs) in zip(order, found, strict=True)
    }
    makers: list[Op] = []
    sources: set[Operand] = set()
    producers = {result: op for op in graph.ops for result in op.results}
    waiting = [each for each in graph.outputs if any(_look_up(each, counts))]
    seen: set[Operand] = set()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        op = producers.get(value) if isinstance(value, Value) else None
        if op is None:
            sources.add(value)
            continue
        operands = [_look_up(each, counts) for each in op.operands]
        if _is_made(operands, [_look_up(each, counts) for each in op.results]):
            makers.append(op)
        waiting += [each for each, bad in zip(op.operands, operands, strict=True) if any(bad)]
    return next((op for op in graph.ops if op in makers), None), sources


def _run_alone(graph: Graph, op: Op, leaves: Sequence[Any]) -> Made:
    """Runs an op on its operands; where it has a body, the op in the body is looked for."""

    def find_operands(*arrays: Any) -> list[Any]:
        known = _evaluate(graph, arrays, end=op)
        return [_read(operand, known) for operand in op.operands]

    operands = jax.jit(find_operands)(*leaves)
    try:
        return Made(op, operands, _walk(op, operands, ()), ())
    except _MadeSignal as signal:
        return signal.made


def _walk(op: Op, operands: list[Any], places: tuple[str, ...]) -> list[Any]:
    """Runs an op, its bodies op by op; raises for what makes an invalid float in a body."""

    def run(body: Graph, arrays: list[Any], place: str) -> list[Any]:
        inside = (*places, f"{place} of {op.name}".removeprefix(" of "))
        known: dict[Operand, Any] = dict(zip(body.inputs, arrays, strict=True))
        known |= {constant.value: constant.array for constant in body.constants}
        for inner in body.ops:
            if inner.name in STREAM_MARKS:
                continue
            values = [_read(operand, known) for operand in inner.operands]
            results = _walk(inner, values, inside)
            if _is_made(_count(values), _count(results)):
                raise _MadeSignal(Made(inner, values, results, inside))
            known.update(zip(inner.results, results, strict=True))
        return [_read(operand, known) for operand in body.outputs]

    return apply_op(op, operands, run)


def _evaluate(graph: Graph, arrays: Sequence[Any], end: Op | None = None) -> dict[Operand, Any]:
    """Returns the values of a graph, in a trace; up to an op if one is given."""
    known: dict[Operand, Any] = dict(zip(graph.inputs, arrays, strict=True))
    known |= {constant.value: constant.array for constant in graph.constants}
    for op in graph.ops:
        if op is end:
            break
        if op.name not in STREAM_MARKS:
            results = bind_op(op, [_read(operand, known) for operand in op.operands])
            known.update(zip(op.results, results, strict=True))
    return known


def _read(operand: Operand, known: Mapping[Operand, Any]) -> Any:
    return operand.value if isinstance(operand, Literal) else known[operand]


def _look_up(operand: Operand, counts: Mapping[Operand, Count]) -> Count:
    if isinstance(operand, Literal):
        return _count([operand.value])[0]
    return counts.get(operand, (0, 0))


def _is_made(operands: Sequence[Count], results: Sequence[Count]) -> bool:
    """True for an op that makes a NaN of none, or an infinity of finite values."""
    if any(nans for nans, _ in results):
        return not any(nans for nans, _ in operands)
    return any(map(any, results)) and not any(map(any, operands))


def _count(values: Sequence[Any]) -> list[Count]:
    """Returns NaN and infinities of each value; those that are not floating have none."""
    floats = [index for index, value in enumerate(values) if _is_float(value)]
    counts = [(0, 0)] * len(values)
    if floats:
        found = np.asarray(jax.jit(_count_traced)([values[index] for index in floats]))
        for index, (nans, infs) in zip(floats, found, strict=True):
            counts[index] = int(nans), int(infs)
    return counts


def _count_traced(values: Sequence[Any]) -> Any:
    pairs = [(jnp.isnan(each).sum(), jnp.isinf(each).sum()) for each in values]
    return jnp.array(pairs).reshape(len(pairs), 2)


def _is_float(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return isinstance(value, (float, complex))
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _take_plain(leaf: Any) -> Any:
    return to_plain(leaf) if type(leaf) is Array else leaf


@contextlib.contextmanager
def _without_checks() -> Iterator[None]:
    """Keeps JAX's own settings from stopping what looks for the op."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def _make_op_error(name: str, made: Made) -> InvalidFloatError:
    counts = [sum(each) for each in zip(*_count(made.results), strict=True)]
    size = sum(np.size(each) for each in made.results)
    where = ", ".join([locate_op(made.op), *made.places])
    floats = [each for each in made.operands if _is_float(each)]
    described = "; ".join(map(_describe, floats[:_MOST_OPERANDS])) or "no floating operand"
    return InvalidFloatError(
        f"`{name}` makes {_describe_count(*counts)} of {size} elements in {made.op.name}",
        where=where,
        why=f"it is the first op that does, and its operands do not explain it: {described}",
        fix="keep its operands in range, as by jnp.where before it; tg.probe shows other values",
        anchor=ANCHOR,
    )


def _make_source_error(
    graph: Graph, leaves: Sequence[Any], names: Sequence[str], sources: set[Operand]
) -> InvalidFloatError:
    counts = _count(leaves)
    named = [
        f"`{argument}` has {_describe_count(*count)} of {np.size(leaf)} elements"
        for argument, value, leaf, count in zip(names, graph.inputs, leaves, counts, strict=True)
        if value in sources
    ]
    named += [f"constant {c.name} is not finite" for c in graph.constants if c.value in sources]
    if any(isinstance(each, Literal) for each in sources):
        named.append("an infinity or NaN is written in the function")
    if not named:
        return InvalidFloatError(
            f"results of `{graph.name}` are not finite, but they are when it runs once more",
            where=locate_caller(),
            why="the second run fuses other ops, and a callback or a kernel may give other values",
            fix="look at values inside by tg.probe",
            anchor=ANCHOR,
        )
    return InvalidFloatError(
        f"results of `{graph.name}` are not finite, because its inputs are not",
        where=f"{locate_caller()}: {'; '.join(shorten_list(named))}",
        why="no op of it makes a NaN or an infinity of finite values",
        fix="look for what made the argument: capture that with debug_nans=True, too",
        anchor=ANCHOR,
    )


def _describe_count(nans: int, infs: int) -> str:
    words = [f"{nans} NaN" if nans else "", f"{infs} infinite" if infs else ""]
    return " and ".join(filter(None, words))


def _describe(value: Any) -> str:
    array = np.asarray(value)
    printed = print_leaf_type(array.shape, array.dtype, False)
    finite = array[np.isfinite(array)]
    if not finite.size or np.iscomplexobj(finite):
        return printed
    return f"{printed} from {finite.min():.4g} to {finite.max():.4g}"
