"""The fastest variant of a program: replacements are tried one rule after another, in their place.

Note [Trials]
A rule is tried on the whole function, since what its ops fuse with decides what they cost. Its
matches are measured on the values of the call, see Note [Errors in place]; those that are less
exact than XLA are left out. A thread compiles what measures while the function is lowered with all
of them, and it is lowered once more where some are left out. Then both graphs are made in a pool
that is dropped afterwards, and their replays are timed in turns. What is not faster is dropped,
with its times. The next rule is tried on the winner. A kernel of ours starts early behind another
one, and asks for its operands meanwhile: so one that lost beside XLA's kernels is tried again where
a later one is used, ahead of the rules behind that.

Then XLA may leave matmuls to cublasLt: Note [Matmuls of the library]. And it may leave their sums
in one piece: Note [Sums in one piece]. That changes how sums are made, so the matmuls that it
changes are measured in their places as well.

Last, small kernels are merged: Note [Merged loops]; and steps are dealt out to two lanes:
Note [Lanes]. XLA's programs stay as they are for that, so nothing is compiled again, and the graph
has to give the same bits.

The winner is instantiated and verified against XLA's executable of it, as any graph.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.measured_matches import (
    NO_MEMORY,
    locate_matches,
    measure_beside,
    measure_matches,
)
from tracegraph.capturing.variant import (
    FROM_LIBRARY,
    KEPT_SUMS,
    MERGED,
    TWO_LANES,
    Chosen,
    Lower,
    Variant,
    find_tuning,
)
from tracegraph.kernel_caching.cached_choice import add_choice, find_choice
from tracegraph.kernel_caching.cached_lowering import CacheSlot
from tracegraph.lowering.collector import hold_collector
from tracegraph.lowering.tuning import KEEP_SUMS, join_options
from tracegraph.passes.pipeline import PassReport, Rewritten
from tracegraph.replacements.library_matmuls import count_own_matmuls
from tracegraph.replacements.match import OLDEST, Machine, Match, Rule, find_machine
from tracegraph.replacements.place_errors import measure_options, measure_places
from tracegraph.replacements.report import Replacement
from tracegraph.replacements.rules import CHAINED_RULES, RULES, find_matches, open_graph
from tracegraph.replacements.splice import splice_matches
from tracegraph.replacements.split_sums import find_split_sums
from tracegraph.runtime.errors import (
    CudaError,
    OutOfMemoryError,
    UnsupportedError,
    VerificationError,
)
from tracegraph.tracing.checked_graph import CheckedGraph, FirstTrace
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.trace import LostTraceError
from tracegraph.verification.capture_verification import verify_capture
from tracegraph.verification.whole_times import time_in_turns

# Two measurements of one thing in turns differ by less.
MARGIN = 0.99
NOT_FASTER = "it is not faster here"


def takes_replacements(checked: CheckedGraph) -> bool:
    """True for a function that is one graph on one stream: rules see all that it does."""
    return not checked.uncapturable and not checked.graph.has_streams


@hold_collector
def find_chosen(
    first: FirstTrace, slot: CacheSlot | None, machine: Machine | None
) -> Chosen | None:
    """Returns the variant that an earlier process has chosen, or None.

    Args:
        first: the function.
        slot: of the function without replacements.
        machine: see `find_machine`.
    """
    choice = find_choice(slot) if slot is not None else None
    if choice is None:
        return None
    rules = {rule.name: rule for rule in RULES}
    for used in [each for each in choice.replacements if each.is_used and each.rule in rules]:
        first = _open(first)
        found = find_matches(rules[used.rule], first.checked.graph, machine)
        matches = [found[number] for number in used.matches]
        first = _replace(first, rules[used.rule], matches)
    return Chosen(first, find_tuning(choice.replacements), choice.replacements)


def choose_variant(
    prepared: PreparedCall, current: Variant, lower: Lower
) -> tuple[Variant, tuple[Replacement, ...]]:
    """Tries all rules on a call; returns the fastest variant and what became of each rule.

    Args:
        prepared: the call, with values.
        current: the function without replacements.
        lower: lowers a variant.
    """
    slot, machine = current.slot, find_machine(current.lowered.device)
    replacements: list[Replacement] = []
    opened = _open(current.first)
    for rule in RULES:
        current, opened, found = _try_rule(prepared, current, opened, rule, lower)
        replacements += found or _find_missed(rule, opened, machine)
        for lost in _list_lost(rule, replacements):
            current, opened, found = _try_rule(prepared, current, opened, lost, lower)
            replacements = [each for each in replacements if each.rule != lost.name] + found
    current, taken = _try_library(prepared, current, lower)
    replacements += taken
    current, kept = _try_keeping_sums(prepared, opened, current, lower)
    replacements += kept
    current, merged = _try_merging(prepared, current, lower)
    replacements += merged
    current, dealt = _try_lanes(prepared, current, lower)
    replacements += dealt
    if slot is not None and replacements:
        add_choice(slot, replacements)
    return current, tuple(replacements)


def _try_rule(
    prepared: PreparedCall, current: Variant, opened: FirstTrace, rule: Rule, lower: Lower
) -> tuple[Variant, FirstTrace, list[Replacement]]:
    """Returns the faster one of a variant and the same with what a rule finds.

    Args:
        prepared: as for `choose_variant`.
        current: the fastest so far.
        opened: the function that it was lowered from, as rules see it.
        rule: that is tried.
        lower: as for `choose_variant`.

    Returns:
        The variant, its function, and a report of each place; none if nothing was found.
    """
    device = current.lowered.device
    found = find_matches(rule, opened.checked.graph, find_machine(device))
    if not found:
        return current, opened, []
    options = _list_options(current)
    errors = functools.partial(measure_places, opened.checked.graph, options=options)
    measure = functools.partial(measure_matches, prepared, device, errors, rule.name, found)
    replaced = _replace(opened, rule, found)
    measured, candidate = measure_beside(measure, functools.partial(lower, replaced))
    exact, dropped = measured.exact, measured.dropped
    if not exact:
        return current, opened, dropped
    matches = list(exact.values())
    what = Replacement(rule.name, tuple(exact), locate_matches(matches))
    if dropped:
        replaced = _replace(opened, rule, matches)
        candidate = functools.partial(lower, replaced)
    current, what = _choose_faster(prepared, current, candidate, what, is_exact=False)
    return current, replaced if what.is_used else opened, [*dropped, what]


def _list_lost(rule: Rule, replacements: Sequence[Replacement]) -> list[Rule]:
    """Returns the rules that are tried again behind one that is used, see Note [Trials]."""
    if rule.name not in CHAINED_RULES & {each.rule for each in replacements if each.is_used}:
        return []
    lost = {each.rule for each in replacements if each.dropped == NOT_FASTER}
    return [each for each in RULES if each.name in CHAINED_RULES & lost]


def _find_missed(rule: Rule, first: FirstTrace, machine: Machine | None) -> list[Replacement]:
    """Returns a report of what a newer GPU would have replaced."""
    if machine is None or machine.has_clusters:
        return []
    newer = dataclasses.replace(machine, architecture=OLDEST)
    missed = find_matches(rule, first.checked.graph, newer)
    why = f"it needs compute capability {OLDEST}, and this GPU has {machine.architecture}"
    return [Replacement(rule.name, (), locate_matches(missed), why)] if missed else []


def _try_library(
    prepared: PreparedCall, current: Variant, lower: Lower
) -> tuple[Variant, list[Replacement]]:
    """Returns the faster one of a variant and the same with matmuls of cublasLt alone."""
    count = count_own_matmuls(current.lowered.lowered.definition)
    if not count:
        return current, []
    what = Replacement(FROM_LIBRARY, (), (f"{count} kernels of XLA's",))
    tuning = dataclasses.replace(current.tuning, uses_library=True)
    candidate = functools.partial(lower, current.first, tuning=tuning)
    chosen, what = _choose_faster(prepared, current, candidate, what, is_exact=False)
    return chosen, [what]


def _try_keeping_sums(
    prepared: PreparedCall, opened: FirstTrace, current: Variant, lower: Lower
) -> tuple[Variant, list[Replacement]]:
    """Returns the faster one of a variant and the same without sums that XLA splits."""
    graph, definition = opened.checked.graph, current.lowered.lowered.definition
    found = find_split_sums(graph, definition)
    if not found:
        return current, []
    options = _list_options(current)
    both = options, join_options(options, [KEEP_SUMS])
    errors, device = functools.partial(measure_options, graph, options=both), current.lowered.device
    measure = functools.partial(measure_matches, prepared, device, errors, KEPT_SUMS, found)
    tuning = dataclasses.replace(current.tuning, keeps_sums=True)
    lower_candidate = functools.partial(lower, current.first, tuning=tuning)
    measured, candidate = measure_beside(measure, lower_candidate)
    if measured.dropped:
        # The option is for all of them.
        return current, measured.dropped
    what = Replacement(KEPT_SUMS, (), locate_matches(found))
    chosen, what = _choose_faster(prepared, current, candidate, what, is_exact=False)
    return chosen, [what]


def _try_merging(
    prepared: PreparedCall, current: Variant, lower: Lower
) -> tuple[Variant, list[Replacement]]:
    """Returns the faster one of a variant and the same with small kernels merged."""
    if not current.lowered.device.takes_kernels:
        return current, []
    # What came from a file has no executables.
    compiled = () if current.cached is not None else current.lowered.lowered.regions
    try:
        tuning = dataclasses.replace(current.tuning, merges=True)
        candidate = lower(current.first, tuning=tuning, compiled=compiled)
    except (UnsupportedError, CudaError) as error:
        return current, [Replacement(MERGED, (), ("any",), f"{error.what}; {error.fix}")]
    before, after = (_count_nodes(each) for each in (current, candidate))
    if before == after:
        return current, []
    what = Replacement(MERGED, (), (f"{before} nodes become {after}",))
    chosen, what = _choose_faster(prepared, current, lambda: candidate, what, is_exact=True)
    return chosen, [what]


def _try_lanes(
    prepared: PreparedCall, current: Variant, lower: Lower
) -> tuple[Variant, list[Replacement]]:
    """Returns the faster one of a variant and the same with two lanes."""
    if not current.lowered.device.takes_kernels:
        return current, []
    compiled = () if current.cached is not None else current.lowered.lowered.regions
    tuning = dataclasses.replace(current.tuning, has_two_lanes=True)
    candidate = lower(current.first, tuning=tuning, compiled=compiled)
    before, after = (_list_edges(each) for each in (current, candidate))
    if before == after:
        return current, []
    what = Replacement(TWO_LANES, (), (f"{len(before)} edges become {len(after)}",))
    chosen, what = _choose_faster(prepared, current, lambda: candidate, what, is_exact=True)
    return chosen, [what]


def _list_options(variant: Variant) -> tuple[tuple[str, bool | str], ...]:
    """Returns the options that XLA compiled a variant with."""
    return tuple(each for region in variant.lowered.lowered.regions for each in region.options)


def _count_nodes(variant: Variant) -> int:
    return sum(len(stage.nodes) for stage in variant.lowered.lowered.definition.stages)


def _list_edges(variant: Variant) -> list[tuple[int, int]]:
    stages = variant.lowered.lowered.definition.stages
    return [edge for stage in stages for edge in stage.edges]


def _choose_faster(
    prepared: PreparedCall,
    current: Variant,
    make_candidate: Callable[[], Variant],
    what: Replacement,
    *,
    is_exact: bool,
) -> tuple[Variant, Replacement]:
    """Returns the faster one of two variants, and what is to be said of the second.

    One that is to give the bits of XLA's own kernels is compared with them first.
    """
    try:
        candidate = make_candidate()
        before, after = _time(prepared, current, candidate, is_exact=is_exact)
    except (UnsupportedError, VerificationError) as error:
        return current, dataclasses.replace(what, dropped=error.what)
    except OutOfMemoryError:
        return current, dataclasses.replace(what, dropped=NO_MEMORY)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return current, dataclasses.replace(what, dropped=NO_MEMORY)
    what = dataclasses.replace(what, before_us=1e6 * before, after_us=1e6 * after)
    if after > MARGIN * before:
        return current, dataclasses.replace(what, dropped=NOT_FASTER)
    return candidate, what


def _time(
    prepared: PreparedCall, one: Variant, other: Variant, *, is_exact: bool
) -> tuple[float, float]:
    """Returns the seconds of a replay of two variants, in a pool that is dropped afterwards."""
    pool, device = FunctionPool(None), one.lowered.device
    graphs = [dataclasses.replace(each.lowered, pool=pool).instantiate() for each in (one, other)]
    if is_exact:
        verify_capture(prepared, graphs[1], device)
    before, after = time_in_turns(graphs, prepared.leaves, device)
    return before, after


def _open(first: FirstTrace) -> FirstTrace:
    """Returns a function in whose graph rules see all ops."""
    checked = first.checked
    opened = dataclasses.replace(checked, graph=open_graph(checked.graph))
    return dataclasses.replace(first, checked=opened)


def _replace(first: FirstTrace, rule: Rule, matches: Sequence[Match]) -> FirstTrace:
    """Returns a function with matches replaced; it is bound op by op from then on."""
    checked = first.checked
    graph = splice_matches(checked.graph, matches)
    report = PassReport(rule.name, len(checked.graph.ops), len(graph.ops))
    return FirstTrace(
        dataclasses.replace(first.traced, bind=_raise_lost_trace),
        Rewritten((graph,), (report,)),
        dataclasses.replace(checked, graph=graph, reports=(*checked.reports, report)),
    )


def _raise_lost_trace(*_: Any) -> NoReturn:
    # What JAX holds is the function without replacements.
    raise LostTraceError
