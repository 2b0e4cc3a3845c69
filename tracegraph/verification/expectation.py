"""What a verification can promise: bits or a tolerance, and what it says nothing of."""

from __future__ import annotations

import dataclasses

from tracegraph.constraints.callbacks import has_callback
from tracegraph.jax_internals import has_data_effects
from tracegraph.lowering.lower import Lowered
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.verification.other_inputs import OtherInputs, choose_other_inputs
from tracegraph.verification.report import TOLERANCE, VerificationReport


@dataclasses.dataclass(frozen=True)
class Expectation:
    """A comparison that is still to be made.

    Attributes:
        report: what it is to find.
        others: which arguments may have other values in its second replay.
    """

    report: VerificationReport
    others: OtherInputs


def expect_comparison(checked: CheckedGraph, lowered: Lowered) -> Expectation:
    """Returns what a comparison on a device is to find, and on which arguments.

    Args:
        checked: the traced graph.
        lowered: its lowering.
    """
    return Expectation(expect(checked, lowered), choose_other_inputs(checked.graph))


def expect(checked: CheckedGraph, lowered: Lowered) -> VerificationReport:
    """Returns the report of a comparison that is still to be made.

    Its tolerance is zero unless something is left to chance: two runs of one executable on the same
    inputs give the same bits.

    Args:
        checked: the traced graph.
        lowered: its lowering.
    """
    causes = [*lowered.inexact_causes, *_list_callbacks(checked)]
    count = len(lowered.regions)
    note = ""
    if count > 1:
        note = f"XLA compiles each of the {count} regions by itself: "
        note += "their results may differ from one jax.jit in the last bits"
    return VerificationReport(
        skipped=find_skip_reason(checked),
        reference="XLA's executable" if count <= 1 else "XLA's executables",
        tolerance=TOLERANCE if causes else 0.0,
        reason=", ".join(causes),
        note=note,
    )


def find_skip_reason(checked: CheckedGraph) -> str:
    """Returns why a capture cannot be compared with a reference, or an empty text."""
    ops = checked.graph.ops
    if any(has_data_effects(ops[index]) for index in checked.uncapturable):
        return "eager parts have effects, which must happen once"
    return ""


def _list_callbacks(checked: CheckedGraph) -> list[str]:
    ops = [checked.graph.ops[index] for index in checked.uncapturable]
    return [
        f"Python code in `{name}`" for name in dict.fromkeys(o.name for o in ops if has_callback(o))
    ]
