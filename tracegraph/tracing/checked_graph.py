"""From a prepared call to a checked graph; touches no device.

Tracing twice shows Python work that changes from call to call. The second trace needs nothing of
the first but its graph, so that it can run while XLA compiles: `trace_call`, `check_trace`, and
later `finish_checks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tracegraph.constraints.check import check_graph, find_uncapturable
from tracegraph.constraints.constants import find_large_constants
from tracegraph.constraints.frames import locate_error
from tracegraph.constraints.leaks import check_leaks
from tracegraph.constraints.printing import watch_print
from tracegraph.constraints.source_watch import move_sources
from tracegraph.constraints.sources import SourceWatch
from tracegraph.constraints.trace_errors import translate_trace_error
from tracegraph.constraints.traces import (
    compare_traces,
    describe_causes,
    make_work_violation,
)
from tracegraph.constraints.violation import Violation, make_capture_error
from tracegraph.ir.graph import Graph
from tracegraph.ir.printer import print_graph
from tracegraph.lowering.collector import hold_collector
from tracegraph.passes.pipeline import DEFAULT_PASSES, PassReport, Rewritten, rewrite_graph
from tracegraph.passes.resolve_donation import ResolveDonation
from tracegraph.precision.flags import find_flags
from tracegraph.probing.collect_probes import ProbeSpec
from tracegraph.randomness.draws import UnboundDraws, UnboundDrawsSignal, enter_trace, noting
from tracegraph.runtime.errors import CaptureError
from tracegraph.runtime.streams.stream_capture import tracing
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.static_leaves import find_changed_results
from tracegraph.tracing.trace import JaxTrace, Traced, build_traced, trace_jaxpr


@dataclasses.dataclass(frozen=True)
class CheckedGraph:
    """A traced, checked and optimised function.

    Attributes:
        graph: the dataflow, ready to be partitioned.
        out_tree: the tree that its flat results make.
        uncapturable: why each op that must run eagerly does, by its index (partial mode).
        reports: one per pass.
        notes: what is legal but worth knowing (large constants).
        probes: of the function; their leaves are the last of its flat results, after those of
            ``out_tree``.
    """

    graph: Graph
    out_tree: Any
    uncapturable: Mapping[int, Violation]
    reports: tuple[PassReport, ...]
    notes: tuple[Violation, ...]
    probes: tuple[ProbeSpec, ...] = ()

    def __str__(self) -> str:
        return print_graph(self.graph)


@dataclasses.dataclass(frozen=True)
class FirstTrace:
    """A function that was traced once.

    Attributes:
        traced: what was traced.
        rewritten: its graph after each pass.
        checked: the last graph, as far as one trace shows that it can be captured.
    """

    traced: Traced
    rewritten: Rewritten
    checked: CheckedGraph


def trace_call(prepared: PreparedCall, *, is_repeated: bool = False) -> JaxTrace:
    """Lets JAX trace the user's function once, on abstract values of a call's signature.

    Args:
        prepared: the call.
        is_repeated: the function was traced before: what it prints does not appear again.

    Raises:
        CaptureError: the function needs what a traced value does not have.
        UnboundDrawsSignal: it draws keys of generators whose states are no arguments.
        Exception: the user's function raised; the exception passes as it is.
    """
    options = prepared.options
    args, kwargs = prepared.make_abstract_arguments()

    def run(*args: Any, **kwargs: Any) -> Any:
        enter_trace()
        return prepared.apply(args, kwargs)

    run.__name__ = run.__qualname__ = options.name
    vars(run)["__wrapped__"] = prepared.function
    printing = watch_print(options.name, is_quiet=is_repeated)
    draws = UnboundDraws(options.name)
    with tracing(options.name, options.stream), printing, noting(draws):
        try:
            flags = find_flags(prepared.signature.settings)
            trace = trace_jaxpr(run, args, kwargs, name=options.name, flags=flags)
        except Exception as error:
            translated = translate_trace_error(error, function=prepared.function, name=options.name)
            if translated is None:
                raise
            try:
                raise translated from None
            finally:
                # Its traceback has this frame, which would hold it.
                del translated
    draws.check()
    return trace


@hold_collector
def check_trace(prepared: PreparedCall, trace: JaxTrace) -> FirstTrace:
    """Builds the graph of a trace, optimises it and checks what one trace shows.

    Raises:
        CaptureError: capture constraints are broken; all of them are named.
    """
    traced = _build(prepared, trace)
    _check_no_violations(check_leaks(traced.graph, len(prepared.names)), traced.graph)
    tree = traced.out_tree
    donation = ResolveDonation(prepared.donated, prepared.match_trees(tree), tree.num_leaves)
    rewritten = rewrite_graph(traced.graph, (*DEFAULT_PASSES, donation))
    graph = rewritten.graph
    options = prepared.options
    takes = options.takes_control_flow
    uncapturable = find_uncapturable(graph, takes_control_flow=takes) if options.is_cut else {}
    eager_ops = {id(graph.ops[index]) for index in uncapturable}
    found = check_graph(graph, takes_control_flow=takes)
    _check_no_violations([v for v in found if not _is_inside(v, graph, eager_ops)], graph)
    notes = find_large_constants(graph)
    reports = rewritten.reports
    checked = CheckedGraph(graph, tree, uncapturable, reports, notes, traced.probes)
    return FirstTrace(traced, rewritten, checked)


def finish_checks(prepared: PreparedCall, first: FirstTrace) -> None:
    """Finishes the checks: traces again, compares the traces and verifies the passes.

    Clocks and random sources are moved meanwhile, see Note [Moved sources]; the traces are more
    than two only where the function called one of them.

    Raises:
        CaptureError: another trace differs.
        InternalError: a pass broke the graph.
        Exception: the user's function raised; the exception passes as it is.
    """
    rounds, number = 1, 0
    while number < rounds:
        number += 1
        rounds = max(rounds, _compare_with_moved(prepared, first.traced, number))
    first.rewritten.verify()


def _compare_with_moved(prepared: PreparedCall, first: Traced, number: int) -> int:
    """Traces again with moved clocks and compares; returns how many such traces are needed."""
    watch: SourceWatch | None = None
    try:
        with move_sources(prepared.function, number) as watch:
            trace = trace_call(prepared, is_repeated=True)
    except (CaptureError, UnboundDrawsSignal):
        raise
    except Exception as error:
        if watch is None or not watch.calls:
            raise
        # The first trace did not raise: that this one does follows from the moved clock.
        raised = f"nothing is raised in the first trace, {type(error).__name__} in the second"
        where, causes = locate_error(error, prepared.function), describe_causes(watch.calls)
        violation = make_work_violation(first.graph.name, where, raised, causes)
        raise make_capture_error([violation], graph_name=first.graph.name) from error
    second = _build(prepared, trace)
    _check_no_violations(compare_traces(first.graph, second.graph, watch.calls), first.graph)
    changed = find_changed_results(prepared.function, first.out_tree, second.out_tree)
    _check_no_violations(changed, first.graph)
    return watch.rounds


def trace_and_check(prepared: PreparedCall) -> CheckedGraph:
    """Traces a function twice, compares the traces, optimises the graph and checks it.

    Raises:
        CaptureError: capture constraints are broken; all of them are named.
        Exception: the user's function raised; the exception passes as it is.
    """
    first = check_trace(prepared, trace_call(prepared))
    finish_checks(prepared, first)
    return first.checked


def _build(prepared: PreparedCall, trace: JaxTrace) -> Traced:
    return build_traced(trace, capturing_stream=prepared.options.stream.number)


def _check_no_violations(violations: Sequence[Violation], graph: Graph) -> None:
    if violations:
        raise make_capture_error(violations, graph_name=graph.name, graph=graph)


def _is_inside(violation: Violation, graph: Graph, ops: set[int]) -> bool:
    """True when the violation is in one of these ops, which partial mode runs eagerly."""
    if violation.op is None:
        return False
    return any(_contains(op, violation.op) for op in graph.ops if id(op) in ops)


def _contains(op: Any, wanted: Any) -> bool:
    return op is wanted or any(
        _contains(inner, wanted) for _, graph in op.subgraphs for inner in graph.ops
    )
