"""Comparison with `jax.jit` of graphs that are cut where GPUs of several processes exchange bytes.

Every process times the same rounds, since each round is a meeting of all of them. What counts is
the slowest process; all hear of it, and so decide the same.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegraph.replaying.spread_call import SpreadCall
from tracegraph.replaying.spread_graph import SpreadGraph
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.verification.spread_verification import copy_leaves, place_leaves

ROUNDS = 7


def time_spread(
    prepared: PreparedCall, graph: SpreadGraph, call: SpreadCall
) -> tuple[float, float]:
    """Returns the median seconds of a replay and of a call of XLA's program, which take turns.

    Args:
        prepared: the call.
        graph: its graphs.
        call: the same function as one program.
    """
    arrays = place_leaves(prepared, graph)
    context = graph.replay.inputs[0].context

    def replay() -> None:
        graph.launch_loaded()
        context.synchronize()

    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(ROUNDS + 1):
        graph.load_arrays(arrays)
        ours.append(_time_second([replay, replay]))
        # The program takes what is donated.
        given = jax.block_until_ready([copy_leaves(prepared) for _ in range(2)])
        runs = [functools.partial(_run, call, leaves) for leaves in given]
        theirs.append(_time_second(runs))
    # The first round is a warm-up.
    return statistics.median(ours[1:]), statistics.median(theirs[1:])


def _run(call: SpreadCall, leaves: list[Any]) -> None:
    jax.block_until_ready(call.run(leaves))


def _time_second(runs: Sequence[Callable[[], None]]) -> float:
    """Returns the seconds of the second run; after the first, all processes are at one point."""
    first, second = runs
    first()
    start = time.perf_counter()
    second()
    return time.perf_counter() - start
