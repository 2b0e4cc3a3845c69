"""Verification at capture: which reference a new graph is compared with."""

from __future__ import annotations

import jax

from tracegraph.jax_internals import has_data_effects
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.device import Device
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.verification.device_verification import verify_on_device
from tracegraph.verification.report import VerificationReport, compare_results, flatten_results


def verify_capture(
    prepared: PreparedCall, captured: CapturedGraph, device: Device
) -> VerificationReport:
    """Compares replays on a call's own arguments with XLA's results.

    Args:
        prepared: the call.
        captured: its new graph.
        device: that the graph is on. The reference of a graph of kernels is the XLA executable that
            they come from, that of compiled calls `jax.jit`.

    Raises:
        VerificationError: a result differs; all are named.
        OutOfMemoryError: there is no memory for the copies that the comparison needs.
    """
    if reason := find_skip_reason(captured.checked):
        return VerificationReport(skipped=reason)
    tree = captured.checked.out_tree
    numbered = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    paths = [
        "result" + jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(numbered)
    ]
    if device.comparison is not None:
        return verify_on_device(device.comparison, captured, prepared.leaves, paths)
    with jax.default_device(device.jax_device):
        expected = jax.jit(prepared.run)(*prepared.leaves)
    replayed = captured.replay_once(prepared.leaves)
    return compare_results(captured.name, paths, replayed, flatten_results(expected))


def find_skip_reason(checked: CheckedGraph) -> str:
    """Returns why a capture cannot be compared with a reference, or an empty text."""
    ops = checked.graph.ops
    if any(has_data_effects(ops[index]) for index in checked.uncapturable):
        return "eager parts have effects, which must happen once"
    return ""
