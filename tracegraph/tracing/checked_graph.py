"""From a function and a call to a checked graph and a capture request; touches no device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tracegraph.capturing.partition import partition_graph
from tracegraph.constraints.check import check_graph, find_uncapturable
from tracegraph.constraints.constants import find_large_constants
from tracegraph.constraints.leaks import check_leaks
from tracegraph.constraints.printing import watch_print
from tracegraph.constraints.trace_errors import translate_trace_error
from tracegraph.constraints.traces import compare_traces
from tracegraph.constraints.violation import Violation, to_error
from tracegraph.ir.graph import Graph
from tracegraph.ir.printer import print_graph
from tracegraph.lowering.collector import hold_collector
from tracegraph.lowering.request import CaptureRequest
from tracegraph.options import Options
from tracegraph.passes.pipeline import DEFAULT_PASSES, PassReport, Rewritten, rewrite_graph
from tracegraph.passes.resolve_donation import ResolveDonation
from tracegraph.runtime.stream import tracing
from tracegraph.tracing.signature import BoundCall, LeafType, Signature, is_leaf_tree
from tracegraph.tracing.trace import Traced, trace_function


@dataclasses.dataclass(frozen=True)
class CheckedGraph:
    """A traced, checked and optimised function.

    Attributes:
        graph: the dataflow, ready to be partitioned.
        out_tree: the tree that its flat results make.
        uncapturable: why each op that must run eagerly does, by its index (partial mode).
        reports: one per pass.
        notes: what is legal but worth knowing (large constants).
    """

    graph: Graph
    out_tree: Any
    uncapturable: Mapping[int, Violation]
    reports: tuple[PassReport, ...]
    notes: tuple[Violation, ...]

    def __str__(self) -> str:
        return print_graph(self.graph)


@dataclasses.dataclass(frozen=True)
class FirstTrace:
    """A function that was traced once.

    Attributes:
        checked: the graph, as far as one trace shows that it can be captured.
        call: binds the trace as one call; see `Traced`.
        trace_again: does what is left: it traces a second time, compares the two traces and
            verifies the passes. Nothing is captured before. Raises as `trace_once`.
    """

    checked: CheckedGraph
    call: Callable[..., list[Any]]
    trace_again: Callable[[], None]


def trace_and_check(
    function: Callable[..., Any], options: Options, call: BoundCall, signature: Signature
) -> CheckedGraph:
    """Traces a function twice, compares the traces, optimises the graph and checks it.

    Args:
        function: the user's function.
        options: how it is captured.
        call: the call that is captured; only its static values are read.
        signature: trees and types of its dynamic arguments.

    Raises:
        CaptureError: capture constraints are broken; all of them are named.
        Exception: the user's function raised; the exception passes as it is.
    """
    first = trace_once(function, options, call, signature)
    first.trace_again()
    return first.checked


def trace_once(
    function: Callable[..., Any],
    options: Options,
    call: BoundCall,
    signature: Signature,
    on_traced: Callable[[], None] | None = None,
) -> FirstTrace:
    """Traces a function, optimises the graph and checks what one trace shows.

    Args:
        function: the user's function.
        options: how it is captured.
        call: the call that is captured; only its static values are read.
        signature: trees and types of its dynamic arguments.
        on_traced: called when JAX has traced it.

    Raises:
        CaptureError: capture constraints are broken; all of them are named.
        Exception: the user's function raised; the exception passes as it is.
    """
    traced = _trace(function, options, call, signature, on_traced)
    with hold_collector():
        _refuse_all(check_leaks(traced.graph, len(signature.leaves)), traced.graph)
        donated, pairs = find_donated(options, call), match_trees(options, call, traced.out_tree)
        rewritten = rewrite_graph(traced.graph, (*DEFAULT_PASSES, ResolveDonation(donated, pairs)))
        checked = _check(rewritten, traced.out_tree, options)

    def trace_again() -> None:
        second = _trace(function, options, call, signature)
        _refuse_all(compare_traces(traced.graph, second.graph), traced.graph)
        rewritten.verify()

    return FirstTrace(checked, traced.call, trace_again)


def _check(rewritten: Rewritten, out_tree: Any, options: Options) -> CheckedGraph:
    graph = rewritten.graph
    uncapturable = find_uncapturable(graph) if options.mode == "partial" else {}
    eager_ops = {id(graph.ops[index]) for index in uncapturable}
    _refuse_all([v for v in check_graph(graph) if not _is_inside(v, graph, eager_ops)], graph)
    notes = find_large_constants(graph)
    return CheckedGraph(graph, out_tree, uncapturable, rewritten.reports, notes)


@hold_collector()
def make_request(
    checked: CheckedGraph,
    options: Options,
    call: BoundCall,
    names: Sequence[str],
    *,
    is_marked: bool = False,
    traced: Callable[..., list[Any]] | None = None,
) -> CaptureRequest:
    """Returns the regions of a checked graph.

    Args:
        checked: the graph.
        options: how it is captured.
        call: the call that is captured.
        names: one unique name per dynamic leaf.
        is_marked: see `partition_graph`.
        traced: of the first trace, to bind it as one call where one region is all of it.
    """
    return partition_graph(
        checked.graph,
        input_names=names,
        donated=find_donated(options, call),
        uncapturable=checked.uncapturable,
        is_marked=is_marked,
        call=traced,
    )


def find_donated(options: Options, call: BoundCall) -> frozenset[int]:
    """Returns the indices of the flat dynamic leaves that the caller gives up."""
    donated: list[int] = []
    start = 0
    for is_donated, tree in list_arguments(options, call):
        count = jax.tree_util.tree_structure(tree).num_leaves
        donated += range(start, start + count) if is_donated else ()
        start += count
    return frozenset(donated)


def list_arguments(options: Options, call: BoundCall) -> list[tuple[bool, Any]]:
    """Returns each dynamic argument in flat order, and whether it is donated."""
    positional = [
        (position in options.donate_argnums, tree)
        for position, tree in zip(call.positions, call.args, strict=True)
    ]
    keyword = [(key in options.donate_argnames, call.kwargs[key]) for key in sorted(call.kwargs)]
    return positional + keyword


def match_trees(options: Options, call: BoundCall, out_tree: Any) -> tuple[tuple[int, int], ...]:
    """Pairs results with donated inputs where a whole donated argument comes back.

    By shape alone a scalar loss could take the buffer of a scalar in the state; the tree tells that
    the state is what comes back as the state.

    Returns:
        Pairs (output index, input index).
    """
    free = _list_subtrees(out_tree, 0)
    pairs: list[tuple[int, int]] = []
    start = 0
    for is_donated, tree in list_arguments(options, call):
        structure = jax.tree_util.tree_structure(tree)
        if is_donated and not is_leaf_tree(structure):
            place = next((p for p in free if p[0] == structure), None)
            if place is not None:
                free.remove(place)
                pairs += [(place[1] + i, start + i) for i in range(structure.num_leaves)]
        start += structure.num_leaves
    return tuple(pairs)


def _list_subtrees(tree: Any, start: int) -> list[tuple[Any, int]]:
    """Returns the result itself and its direct children, each with its first flat index."""
    found = [(tree, start)]
    for child in tree.children():
        found.append((child, start))
        start += child.num_leaves
    return found


def _trace(
    function: Callable[..., Any],
    options: Options,
    call: BoundCall,
    signature: Signature,
    on_traced: Callable[[], None] | None = None,
) -> Traced:
    """Traces once, on abstract values of the signature."""
    leaves = [_make_abstract(leaf) for leaf in signature.leaves]
    args, kwargs = jax.tree_util.tree_unflatten(signature.tree, leaves)

    def run(*args: Any, **kwargs: Any) -> Any:
        positional, keywords = call.restore(args, kwargs)
        return function(*positional, **keywords)

    run.__name__ = run.__qualname__ = options.name
    vars(run)["__wrapped__"] = function
    with tracing(options.name, options.stream), watch_print(options.name):
        try:
            return trace_function(
                run,
                args,
                kwargs,
                name=options.name,
                capturing_stream=options.stream.number,
                on_traced=on_traced,
            )
        except Exception as error:
            translated = translate_trace_error(error, function=function, name=options.name)
            if translated is None:
                raise
            raise translated from None


def _make_abstract(leaf: LeafType) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)


def _refuse_all(violations: Sequence[Violation], graph: Graph) -> None:
    if violations:
        raise to_error(violations, graph_name=graph.name, graph=graph)


def _is_inside(violation: Violation, graph: Graph, ops: set[int]) -> bool:
    """True when the violation is in one of these ops, which partial mode runs eagerly."""
    if violation.op is None:
        return False
    return any(_contains(op, violation.op) for op in graph.ops if id(op) in ops)


def _contains(op: Any, wanted: Any) -> bool:
    return op is wanted or any(
        _contains(inner, wanted) for _, graph in op.subgraphs for inner in graph.ops
    )
