"""Tracing: a Python function on abstract values becomes a Graph. Touches no device."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import pathlib
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tracegraph.ir.graph import (
    BACKWARD_SCOPE,
    STREAM_MARKS,
    Constant,
    Graph,
    Literal,
    Op,
    Operand,
    Origin,
    Value,
)
from tracegraph.jax_internals import (
    EquationContext,
    describe_scope,
    describe_source,
    drop_open_trace,
    equation_context,
    is_literal,
    make_function,
    name_jaxprs,
    open_jaxpr,
)
from tracegraph.lowering.collector import hold_collector
from tracegraph.precision.apply_flags import apply_flags
from tracegraph.precision.flags import UNSET, PrecisionFlags
from tracegraph.probing.collect_probes import ProbeSpec, collect_probes, holds_probes
from tracegraph.probing.probe import (
    binding_probes,
    has_probes_anywhere,
    watching_probes,
)
from tracegraph.tracing.static_leaves import wrap_static_leaves

_STREAM_SCOPE = re.compile(r"tg_stream_(\d+)")
_count_lock = threading.Lock()
_count = 0


@dataclasses.dataclass(frozen=True)
class JaxTrace:
    """A function that JAX has traced, before it is a Graph.

    Attributes:
        jaxpr: JAX's form of it.
        out_tree: the tree that its flat results make.
        bind: binds the traced function in another trace, on one value per input, and returns its
            flat results. It never runs the function's Python: where JAX would trace again, it
            raises `LostTraceError`.
        name: the graph's name.
        origin: the function's own line.
        probes: of the function; their leaves are the last of its flat results, after those of
            ``out_tree``.
    """

    jaxpr: Any
    out_tree: Any
    bind: Callable[..., list[Any]]
    name: str
    origin: Origin
    probes: tuple[ProbeSpec, ...] = ()


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function as a Graph.

    Attributes:
        graph: the dataflow.
        out_tree: the tree that its flat results make.
        bind: as of the `JaxTrace` that it was made from.
        probes: as of the `JaxTrace`.
    """

    graph: Graph
    out_tree: Any
    bind: Callable[..., list[Any]]
    probes: tuple[ProbeSpec, ...] = ()


class LostTraceError(Exception):
    """JAX no longer holds a trace, or not for the current types and settings."""


def trace_jaxpr(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    flags: PrecisionFlags = UNSET,
) -> JaxTrace:
    """Lets JAX run a function once on abstract values.

    The function's own Python runs at every call of this one, also on the same arguments; functions
    that it calls and that are wrapped in ``jax.jit`` are cached by JAX as always. JAX's own errors
    pass through.

    Args:
        function: takes and returns trees of arrays.
        args: trees of arrays, ``jax.ShapeDtypeStruct``, NumPy arrays or Python scalars.
        kwargs: the same, by name.
        name: the graph's name.
        flags: the precision of matmuls and convolutions that leave it open.
    """

    def run() -> tuple[Any, Any]:
        jitted = jax.jit(_make_fresh(function))
        return jitted, jitted.trace(*args, **kwargs)

    with watching_probes() as seen:
        is_probed = has_probes_anywhere()
        with binding_probes() if is_probed else contextlib.nullcontext():
            jitted, traced = run()
        if seen.was_missed and not is_probed:
            is_probed = True
            with binding_probes():
                jitted, traced = run()
    in_tree = jax.tree.structure((args, kwargs))

    def bind(*leaves: Any) -> list[Any]:
        args, kwargs = wrap_static_leaves(jax.tree.unflatten(in_tree, leaves))
        with binding_probes() if is_probed else contextlib.nullcontext():
            return jax.tree.leaves(wrap_static_leaves(jitted(*args, **kwargs)))

    origin = Origin(_describe_function(function))
    jaxpr, probes = traced.jaxpr, ()
    if is_probed and holds_probes(jaxpr):
        jaxpr, probes = collect_probes(jaxpr)
    jaxpr = apply_flags(jaxpr, flags)
    if jaxpr is not traced.jaxpr:
        bind = make_function(jaxpr)
    return JaxTrace(jaxpr, traced.out_tree, bind, name, origin, probes)


@hold_collector
def build_traced(trace: JaxTrace, *, capturing_stream: int | None = None) -> Traced:
    """Returns the graph of a trace, its inputs in the order of the leaves that were traced.

    Args:
        trace: what JAX traced.
        capturing_stream: number of the stream that counts as the capturing one (0).
    """
    graph = _GraphBuilder(capturing_stream).build(trace.jaxpr, trace.name, trace.origin)
    return Traced(graph, trace.out_tree, trace.bind, trace.probes)


def trace_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    capturing_stream: int | None = None,
) -> Traced:
    """Traces a function and builds its graph; see `trace_jaxpr` and `build_traced`.

    Returns:
        The graph, its inputs in the order of ``jax.tree.leaves((args, kwargs))``, and the tree of
        its results.

    Example:
        >>> import jax.numpy as jnp
        >>> [op.name for op in trace_function(jnp.sin, (1.0,), {}, name="f").graph.ops]
        ['sin']
    """
    trace = trace_jaxpr(function, args, kwargs, name=name)
    return build_traced(trace, capturing_stream=capturing_stream)


def trace_count() -> int:
    """Returns how many times a function has been traced in this process."""
    return _count


def _make_fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    # JAX keeps jaxprs by the identity of the function: a new one is never found.
    is_traced = False

    def traced(*args: Any, **kwargs: Any) -> Any:
        global _count
        nonlocal is_traced
        if is_traced:
            raise LostTraceError
        is_traced = True
        with _count_lock:
            _count += 1
        try:
            return function(*args, **kwargs)
        except BaseException:
            drop_open_trace()
            raise

    traced.__name__ = getattr(function, "__name__", type(function).__name__)
    traced.__qualname__ = getattr(function, "__qualname__", traced.__name__)
    # JAX's messages name the arguments and the place of the function that is wrapped.
    vars(traced)["__wrapped__"] = function
    return traced


def _describe_function(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return "unknown"
    return f"{pathlib.Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name}"


class _GraphBuilder:
    """Turns a jaxpr into a Graph; a jaxpr that is used twice becomes one sub-graph."""

    def __init__(self, capturing_stream: int | None) -> None:
        self._capturing_stream = capturing_stream
        self._built: dict[tuple[int, str, int, int | None, str], Graph] = {}
        # Of a thousand ops, a hundred come from different lines and scopes.
        self._sources: dict[Any, str | None] = {}
        self._scopes: dict[Any, str] = {}

    def build(self, closed: Any, name: str, enclosing: Origin) -> Graph:
        key = (id(closed), name, enclosing.stream, enclosing.backward_on, enclosing.source)
        if key not in self._built:
            self._built[key] = self._build(closed, name, enclosing)
        return self._built[key]

    def _build(self, closed: Any, name: str, enclosing: Origin) -> Graph:
        jaxpr, arrays = open_jaxpr(closed)
        numbers = itertools.count()
        values: dict[Any, Value] = {}
        origins: dict[EquationContext, Origin] = {}

        def define(variable: Any) -> Value:
            value = Value(next(numbers), variable.aval)
            values[variable] = value
            return value

        def read(atom: Any) -> Operand:
            return Literal(atom.val, atom.aval) if is_literal(atom) else values[atom]

        inputs = [define(variable) for variable in jaxpr.invars]
        # An open jaxpr's constants are parameters: nothing says which arrays they are.
        free = [define(variable) for variable in jaxpr.constvars[len(arrays) :]]
        constants = tuple(
            Constant(define(variable), f"c{index}", array)
            for index, (variable, array) in enumerate(zip(jaxpr.constvars, arrays, strict=False))
        )
        ops = []
        for equation in jaxpr.eqns:
            operands = tuple([read(atom) for atom in equation.invars])
            context = equation_context(equation)
            origin = origins.get(context)
            if origin is None:
                origin = origins[context] = self._make_origin(context, enclosing)
            jaxprs = name_jaxprs(equation.params)
            subgraphs = tuple([(key, self.build(inner, key, origin)) for key, inner in jaxprs])
            results = tuple([define(variable) for variable in equation.outvars])
            ops.append(
                Op(
                    results,
                    equation.primitive,
                    operands,
                    self._read_params(equation),
                    subgraphs,
                    origin,
                )
            )
        outputs = tuple(read(atom) for atom in jaxpr.outvars)
        return Graph(name, (*free, *inputs), constants, tuple(ops), outputs)

    def _make_origin(self, context: EquationContext, enclosing: Origin) -> Origin:
        scope, source = self._find_scope(context), self._find_source(context)
        # JAX forgets the user's line inside its own functions: the line that calls them is used.
        if not source:
            source, outer = enclosing.source, enclosing.equation_context
            if outer is not None:
                context = context._replace(traceback=outer.traceback)
        stream, backward_on = self._find_streams(scope, enclosing)
        return Origin(source, scope, stream, context, backward_on)

    def _find_scope(self, context: EquationContext) -> str:
        found = self._scopes.get(context.name_stack)
        if found is None:
            found = self._scopes[context.name_stack] = describe_scope(context)
        return found

    def _find_source(self, context: EquationContext) -> str | None:
        if context.traceback not in self._sources:
            self._sources[context.traceback] = describe_source(context)
        return self._sources[context.traceback]

    def _read_params(self, equation: Any) -> Mapping[str, Any]:
        if equation.primitive.name not in STREAM_MARKS:
            return equation.params
        return equation.params | {"stream": self._number(equation.params["stream"])}

    def _find_streams(self, scope: str, enclosing: Origin) -> tuple[int, int | None]:
        """Returns an op's own stream, and the one that called its backward pass, if it is of one.

        Inside of the mark of a backward pass, JAX's scope is that of the forward op.
        """
        around, mark, inside = scope.partition(BACKWARD_SCOPE)
        caller = self._find_last(around, enclosing.stream)
        if not mark:
            return caller, enclosing.backward_on
        outermost = caller if enclosing.backward_on is None else enclosing.backward_on
        return self._find_last(inside, caller), outermost

    def _find_last(self, scope: str, default: int) -> int:
        found = _STREAM_SCOPE.findall(scope)
        return self._number(int(found[-1])) if found else default

    def _number(self, stream: int) -> int:
        return 0 if stream == self._capturing_stream else stream
