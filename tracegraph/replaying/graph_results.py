"""From a captured graph to what builds its results: their tree, their probes, their checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tracegraph.replaying.float_checks import check_results, is_checking_floats
from tracegraph.replaying.probe_values import ProbeValues, join_trees
from tracegraph.replaying.resident_results import ResidentRotation
from tracegraph.replaying.result_builder import ResultBuilder
from tracegraph.runtime.arrays.residence import Donation
from tracegraph.runtime.replay import Replay
from tracegraph.tracing.call_spec import ResultSpec


@dataclasses.dataclass(frozen=True)
class GraphResults:
    """What builds the results of one captured graph.

    Attributes:
        build: returns the function's results of the last replay.
        rotation: of the resident parts of the results; None if there are none.
        is_plain_leaf: True when the result is one plain array, and is not looked at.
        probes: what the probes show; None without any.
    """

    build: Callable[[], Any]
    rotation: ResidentRotation | None
    is_plain_leaf: bool
    probes: ProbeValues | None


def build_results(
    name: str, spec: ResultSpec, replay: Replay, donations: Mapping[str, Donation]
) -> GraphResults:
    """Returns what builds the results of a graph.

    Args:
        name: the captured function's.
        spec: their tree and their types.
        replay: whose buffers hold the flat results.
        donations: what to say of a leaf that a later replay has taken, by the name of its buffer.
    """
    tree, probes = spec.tree, None
    if spec.probes:
        probes = ProbeValues(spec.probes)
        tree = join_trees(tree, spec.probes)
    results = ResultBuilder(replay, tree, spec.avals[: tree.num_leaves], donations)
    build = results.build
    if is_checking_floats() and not spec.is_live:
        build = check_results(build, name)
    if probes is not None:
        build = probes.take(build)
    return GraphResults(build, results.rotation, results.is_plain_leaf, probes)
