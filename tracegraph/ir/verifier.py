"""The verifier: the invariants of every Graph, checked after tracing and after every pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn, TypeAlias

from tracegraph.ir.graph import Graph, Literal, Op, Operand, Value
from tracegraph.ir.kernel_calls import KERNEL_CALLS
from tracegraph.ir.origins import locate_origin
from tracegraph.ir.printer import print_op, print_operand, print_type
from tracegraph.jax_internals import bind_axes, infer_results, measure_scan
from tracegraph.runtime.errors import InternalError

KnownTypes: TypeAlias = set[Hashable]
Arity: TypeAlias = tuple[Sequence[Operand], Sequence[Operand]]
# Where a fault is; an op becomes text only then.
Location: TypeAlias = Op | str


def verify_graph(graph: Graph, known: KnownTypes | None = None) -> None:
    """Checks a graph and its sub-graphs.

    Args:
        graph: what to check.
        known: ops whose types an earlier call has checked, and what those types follow from; this
            one adds its own. Passes keep most ops, many ops repeat, and asking JAX for their types
            is nine tenths of the work.

    Raises:
        InternalError: a value that is used without or before its definition,
            defined twice or numbered as another; a result whose type is not what JAX gives the
            primitive; a sub-graph that does not fit its op; an alias that cannot be granted.

    Example:
        >>> from tracegraph.tracing.trace import trace_function
        >>> verify_graph(trace_function(lambda x: x + 1, (1.0,), {}, name="f").graph)
    """
    _verify(graph, set() if known is None else known, set())


def _verify(graph: Graph, known: KnownTypes, verified: set[Graph]) -> None:
    if graph in verified:
        return
    verified.add(graph)
    scope = _Scope(graph)
    for value in graph.inputs:
        scope.define(value, "an input")
    for constant in graph.constants:
        scope.define(constant.value, f"constant {constant.name}")
    for op in graph.ops:
        for operand in op.operands:
            scope.use(operand, op)
        for value in op.results:
            scope.define(value, op)
        if op not in known:
            _verify_op(graph, op, known)
        # A kernel's body has axes and rules of its own.
        inner = () if op.name in KERNEL_CALLS else op.subgraphs
        for _, subgraph in inner:
            with bind_axes(op):
                _verify(subgraph, known, verified)
    for index, operand in enumerate(graph.outputs):
        scope.use(operand, f"output {index}")
    _verify_aliases(graph)


def _verify_op(graph: Graph, op: Op, known: KnownTypes) -> None:
    key = _identify_types(op)
    if key not in known:
        _verify_types(graph, op)
        _verify_subgraphs(graph, op)
    known.update((op, key))


class _Scope:
    """The values of one graph that are defined so far."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._defined: set[Operand] = set()
        self._numbers: set[int] = set()

    def define(self, value: Value, place: Location) -> None:
        if value in self._defined:
            _raise_graph_error(self._graph, f"{print_operand(value)} is defined twice", place)
        if value.number in self._numbers:
            _raise_graph_error(self._graph, f"two values have the number {value.number}", place)
        self._defined.add(value)
        self._numbers.add(value.number)

    def use(self, operand: Operand, place: Location) -> None:
        if operand in self._defined or isinstance(operand, Literal):
            return
        _raise_graph_error(
            self._graph, f"{print_operand(operand)} is used before it is defined", place
        )


def _identify_types(op: Op) -> Hashable:
    """Returns what the types follow from; the op itself where a parameter cannot be compared."""
    context = op.origin.equation_context
    values = tuple(op.params.values())
    key = (
        op.primitive,
        tuple([operand.aval for operand in op.operands]),
        tuple([value.aval for value in op.results]),
        # In Python 1 == 1.0 == True.
        (*op.params, *values, *map(type, values)),
        op.subgraphs,
        None if context is None else context.settings,
    )
    try:
        hash(key)
    except TypeError:
        return op
    return key


def _verify_types(graph: Graph, op: Op) -> None:
    wanted = infer_results(op)
    # The body of a `shard_map` has the types of one device's part.
    if wanted is None and len(op.subgraphs) == 1 and op.name != "shard_map":
        wanted = _list_avals(op.subgraphs[0][1].outputs)
    if wanted is None:
        return
    if len(wanted) != len(op.results):
        _raise_graph_error(graph, f"{op.name} has {len(op.results)} results, not {len(wanted)}", op)
    for value, aval in zip(op.results, wanted, strict=True):
        if not _is_same_type(value.aval, aval):
            got, want = print_type(value.aval), print_type(aval)
            _raise_graph_error(
                graph, f"{print_operand(value)} is {got}, but {op.name} gives {want}", op
            )


def _verify_subgraphs(graph: Graph, op: Op) -> None:
    rule = _ARITIES.get(op.name)
    if rule is None:
        return
    for (name, subgraph), (operands, results) in zip(op.subgraphs, rule(op), strict=True):
        _compare(graph, f"{name} of {op.name} takes", subgraph.inputs, operands, op)
        _compare(graph, f"{name} of {op.name} gives", subgraph.outputs, results, op)


def _compare(
    graph: Graph, what: str, inner: Sequence[Operand], outer: Sequence[Operand], op: Op
) -> None:
    if len(inner) != len(outer):
        _raise_graph_error(graph, f"{what} {len(inner)} values, not {len(outer)}", op)
    for index, (left, right) in enumerate(zip(inner, outer, strict=True)):
        if not _is_same_type(left.aval, right.aval):
            got, want = print_type(left.aval), print_type(right.aval)
            _raise_graph_error(graph, f"{what} {got} as value {index}, not {want}", op)


def _verify_aliases(graph: Graph) -> None:
    outputs: set[int] = set()
    inputs: set[int] = set()
    for output, index in graph.aliases:
        place = f"alias of output {output} and input {index}"
        if not 0 <= output < len(graph.outputs) or not 0 <= index < len(graph.inputs):
            _raise_graph_error(
                graph, "an alias names an output or input that does not exist", place
            )
        if output in outputs or index in inputs:
            _raise_graph_error(graph, "an output or input has two aliases", place)
        outputs.add(output)
        inputs.add(index)
        got, want = graph.outputs[output].aval, graph.inputs[index].aval
        if not _is_same_type(got, want):
            types = f"{print_type(got)} and {print_type(want)}"
            _raise_graph_error(graph, f"an alias joins {types}", place)


def _call_arity(op: Op) -> tuple[Arity, ...]:
    return ((op.operands, op.results),)


def _cond_arity(op: Op) -> tuple[Arity, ...]:
    return ((op.operands[1:], op.results),) * len(op.subgraphs)


def _while_arity(op: Op) -> tuple[Arity, ...]:
    first, second = op.params["cond_nconsts"], op.params["body_nconsts"]
    carry = op.operands[first + second :]
    # JAX also accepts one condition per element (a vectorised loop): its own output says which.
    goes_on = dict(op.subgraphs)["cond_jaxpr"].outputs[:1]
    return (
        ((*op.operands[:first], *carry), goes_on),
        ((*op.operands[first : first + second], *carry), op.results),
    )


def _scan_arity(op: Op) -> tuple[Arity, ...]:
    constants, carry = measure_scan(op.params)
    whole = op.operands[: constants + carry]
    rows = [_drop_axis(operand) for operand in op.operands[constants + carry :]]
    stacked = [_drop_axis(value) for value in op.results[carry:]]
    return (((*whole, *rows), (*op.results[:carry], *stacked)),)


# What the sub-graphs of an op take and give, in their order.
_ARITIES: dict[str, Callable[[Op], tuple[Arity, ...]]] = {
    "jit": _call_arity,
    "pjit": _call_arity,
    "closed_call": _call_arity,
    "custom_jvp_call": _call_arity,
    "custom_vjp_call": _call_arity,
    "remat2": _call_arity,
    "checkpoint": _call_arity,
    "cond": _cond_arity,
    "while": _while_arity,
    "scan": _scan_arity,
}


def _drop_axis(operand: Operand) -> Value:
    aval: Any = operand.aval
    return Value(-1, aval.update(shape=aval.shape[1:]))


def _list_avals(operands: Sequence[Operand]) -> tuple[Any, ...]:
    return tuple(operand.aval for operand in operands)


def _is_same_type(left: Any, right: Any) -> bool:
    # As in JAX's own check, a weak type fits a strong one.
    return print_type(left) == print_type(right)


def _raise_graph_error(graph: Graph, what: str, place: Location) -> NoReturn:
    if isinstance(place, Op):
        place = f"{locate_origin(place.origin)}, {print_op(place)}"
    raise InternalError(
        f"internal error in tracegraph: {what}",
        where=f"graph `{graph.name}`, {place}",
        why="a pass or the tracer built an invalid graph",
    )
