"""Verification at capture: which reference a new graph is compared with."""

from __future__ import annotations

from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.device import Device
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.result_names import name_results
from tracegraph.verification.device_verification import verify_on_device
from tracegraph.verification.expectation import Expectation, expect
from tracegraph.verification.host_verification import verify_on_host
from tracegraph.verification.other_inputs import choose_other_inputs
from tracegraph.verification.report import VerificationReport


def verify_capture(
    prepared: PreparedCall, captured: CapturedGraph, device: Device
) -> VerificationReport:
    """Compares replays with the executables that the graph calls, or was made from.

    Args:
        prepared: the call.
        captured: its new graph.
        device: that the graph is on.

    Raises:
        VerificationError: a result differs; all are named.
        OutOfMemoryError: there is no memory for the copies that the comparison needs.
    """
    report = expect(captured.checked, captured.lowered)
    if report.skipped:
        return report
    paths = name_results(captured.checked.out_tree, captured.checked.probes)
    if device.comparison is None:
        return verify_on_host(captured, prepared.leaves, paths, report)
    expectation = Expectation(report, choose_other_inputs(captured.checked.graph))
    return verify_on_device(device.comparison, captured, prepared.leaves, paths, expectation)
