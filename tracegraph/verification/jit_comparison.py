"""Comparison with `jax.jit` in time: a graph with eager parts is used only where it does not lose.

Both get the call's own arguments, donated ones as copies that are made beforehand, and take turns,
so that what slows the machine down for a while slows down both. What is timed of the graph is its
launch, of `jax.jit` its call, each until the device is done.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegraph.jax_internals import has_data_effects
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.replaying.float_checks import is_checking_floats
from tracegraph.replaying.jit_call import JitCall
from tracegraph.runtime.jax_interop import to_plain
from tracegraph.runtime.streams.stream import synchronize
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.verification.device_verification import place_values

# Rounds of one call each; the later ones only while there is time.
MIN_ROUNDS, MAX_ROUNDS, MAX_SECONDS = 3, 15, 0.3
# A graph that loses by less is within what two measurements of one thing differ.
MARGIN = 1.05


@dataclasses.dataclass(frozen=True)
class JitComparison:
    """What the comparison found.

    Attributes:
        graph_seconds: median time of a replay; 0.0 if nothing was timed.
        jit_seconds: of a call of `jax.jit`.
        skipped: why nothing was timed, or an empty text.
    """

    graph_seconds: float = 0.0
    jit_seconds: float = 0.0
    skipped: str = ""

    @property
    def is_jit_faster(self) -> bool:
        """True where calls are to run as `jax.jit` would."""
        return self.graph_seconds > MARGIN * self.jit_seconds

    def __str__(self) -> str:
        if self.skipped:
            return f"with the graph, not compared with jax.jit: {self.skipped}"
        times = f"{self.graph_seconds * 1e6:.0f} µs with the graph, {self.jit_seconds * 1e6:.0f} µs"
        if self.is_jit_faster:
            return f'as jax.jit, without the graph: {times} as jax.jit; prefer="graph" keeps it'
        return f"with the graph: {times} as jax.jit"


def is_graph_needed(prepared: PreparedCall, graph: CapturedGraph) -> bool:
    """True for a graph without eager parts, and where only a graph will do.

    A graph keeps what its probes show, and looks at its results.

    Args:
        prepared: the call.
        graph: its new graph.
    """
    is_seen = bool(graph.checked.probes) or prepared.options.debug_nans
    return graph.replay.is_whole or is_seen


def find_skip_reason(prepared: PreparedCall, graph: CapturedGraph) -> str:
    """Returns why a graph with eager parts is used as it is, or an empty text.

    Args:
        prepared: the call.
        graph: its new graph.
    """
    if prepared.options.prefer == "graph":
        return 'prefer="graph"'
    if prepared.options.outputs == "static":
        return 'outputs="static" are the graph\'s own buffers'
    if is_checking_floats():
        return "jax_debug_nans or jax_debug_infs is on"
    ops = graph.checked.graph.ops
    if any(has_data_effects(ops[index]) for index in graph.checked.uncapturable):
        return "eager parts have effects, which must happen once"
    return ""


def compare_with_jit(
    prepared: PreparedCall, graph: CapturedGraph, make_call: Callable[[], JitCall]
) -> tuple[JitComparison, JitCall | None]:
    """Times a new graph with eager parts and the same function under `jax.jit`.

    Args:
        prepared: the call.
        graph: its new graph, which the caller has reserved.
        make_call: makes the other one; JAX compiles it at its first call.

    Returns:
        The comparison, and what is to be called in place of the graph, if that lost.
    """
    skipped = find_skip_reason(prepared, graph)
    if skipped:
        return JitComparison(skipped=skipped), None
    call = make_call()
    try:
        comparison = JitComparison(*time_both(prepared, graph, call))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return JitComparison(skipped="no memory is left for jax.jit beside it"), None
    return comparison, call if comparison.is_jit_faster else None


def time_both(prepared: PreparedCall, graph: CapturedGraph, call: JitCall) -> tuple[float, float]:
    """Returns the median seconds of a replay and of a call of `jax.jit`, which take turns."""
    arrays = place_values(graph, prepared.leaves)[: len(prepared.leaves)]
    with warnings.catch_warnings():
        # Of donated arguments that no result can use.
        warnings.simplefilter("ignore")
        _time_jit(prepared, call)
    _time_graph(graph, arrays)
    ours: list[float] = []
    theirs: list[float] = []
    while len(ours) < MIN_ROUNDS or (len(ours) < MAX_ROUNDS and sum(ours + theirs) < MAX_SECONDS):
        ours.append(_time_graph(graph, arrays))
        theirs.append(_time_jit(prepared, call))
    return statistics.median(ours), statistics.median(theirs)


def _time_graph(graph: CapturedGraph, arrays: Sequence[jax.Array]) -> float:
    graph.load_arrays(arrays)
    synchronize()
    start = time.perf_counter()
    graph.launch_loaded()
    graph.replay.clock.wait()
    synchronize()
    return time.perf_counter() - start


def _time_jit(prepared: PreparedCall, call: JitCall) -> float:
    leaves = [
        _copy(leaf) if index in prepared.donated else to_plain(leaf)
        for index, leaf in enumerate(prepared.leaves)
    ]
    args, kwargs = jax.tree_util.tree_unflatten(prepared.signature.tree, leaves)
    values = [*args, *(kwargs[key] for key in sorted(kwargs))]
    jax.block_until_ready([leaf for leaf in leaves if isinstance(leaf, jax.Array)])
    start = time.perf_counter()
    jax.block_until_ready(call.run(values))
    return time.perf_counter() - start


def _copy(leaf: Any) -> Any:
    plain = to_plain(leaf)
    return plain.copy() if isinstance(plain, jax.Array) else plain
