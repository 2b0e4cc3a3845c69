"""Verification on the host: replays must give what the same executables give without a graph.

The reference calls the executables of the regions one after another, on plain arrays: no arena, no
plan, no buffer of the graph, no stream. So nothing is compiled twice, and all that lies between the
executables and the results is checked, bit for bit: which value each region reads, where the plan
put it, what is copied, updated in place or pointed at the caller's arrays. What XLA makes of the
function is not checked here: it is what the calls will run.

All memory of the graph but its constants is filled with NaN bytes before each replay, so that a
read of what this replay has not written shows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.replaying.replayable_graph import ReplayableGraph
from tracegraph.runtime.jax_interop import to_immutable, to_plain, unwrap_key
from tracegraph.verification.reference_run import run_reference
from tracegraph.verification.report import VerificationReport, compare_results


def verify_on_host(
    captured: ReplayableGraph,
    leaves: Sequence[Any],
    paths: Sequence[str],
    report: VerificationReport,
) -> VerificationReport:
    """Replays twice and compares with XLA's own executables.

    Once the arguments are copied in, once the graph reads them where they are, as it does in most
    calls. Both times they are the call's own: a loop need not end on others, and the path that it
    takes is inside one executable, which both sides call.

    Args:
        captured: the graph, with the executables that it calls.
        leaves: one value per dynamic leaf.
        paths: one name per result.
        report: what is expected.

    Raises:
        VerificationError: a result differs; all are named. Or XLA's executables failed.
    """
    arrays = copy_inputs(captured, leaves)[: len(leaves)]
    # The executables use up what is donated.
    expected = run_reference(captured, copy_inputs(captured, leaves))
    close: set[str] = set()
    for is_rebound in (False, True):
        with captured.reserve():
            poison_buffers(captured)
            replayed = captured.replay_once(arrays, is_rebound=is_rebound)
        close |= {*compare_results(captured.name, paths, replayed, expected, report)}
    named = tuple(path for path in paths if path in close)
    return dataclasses.replace(report, exact=len(paths) - len(named), close=named)


def copy_inputs(captured: ReplayableGraph, leaves: Sequence[Any]) -> list[jax.Array]:
    """Returns private arrays for all static inputs, of the very types that the graph's have.

    With another weak type JAX would compile an eager region once more.
    """
    values = [*(to_plain(unwrap_key(leaf)) for leaf in leaves), *captured.constants]
    return [
        to_immutable(np.array(value, buffer.dtype), buffer.aval, buffer.jax_device)
        for value, buffer in zip(values, captured.replay.inputs, strict=True)
    ]


def poison_buffers(captured: ReplayableGraph) -> None:
    """Fills every buffer but the constants with 0xFF bytes: NaN, -1, True."""
    buffers = captured.replay.buffers
    constants = {*captured.lowered.definition.inputs[len(captured.names) :]}
    for name in buffers.keys() - constants:
        aval = buffers[name].aval
        count = math.prod(aval.shape) * aval.dtype.itemsize
        content = np.full(count, 0xFF, np.uint8).view(aval.dtype)
        buffers[name].write(content.reshape(aval.shape))
