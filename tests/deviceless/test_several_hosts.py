"""Programs for described GPUs of two hosts: graphs that are cut where these exchange anything."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.deviceless import topology
from tests.deviceless.building import check_built
from tests.deviceless.spreading import Network, lower_over, make_mesh, make_type, place_all
from tracegraph.runtime.definition.collective_nodes import (
    CollectiveKind,
    CollectiveNode,
    JointCollectiveNode,
)
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.placement import list_exchanged
from tracegraph.runtime.errors import CaptureError, UnsupportedError

KIND = CollectiveKind


def list_joint(definition: GraphDefinition) -> list[list[CollectiveKind]]:
    """Returns the kinds of each joint collective; graphs stand between these."""
    found = []
    for stage in definition.stages:
        nodes = [node for node in stage.nodes if isinstance(node, JointCollectiveNode)]
        assert len(nodes) == (0 if stage.is_captured else len(stage.nodes))
        found += [[member.exchange.kind for member in node.members] for node in nodes]
    return found


def lower_body(function: Any, mesh: Mesh) -> GraphDefinition:
    over = {"mesh": mesh, "in_specs": P("i"), "out_specs": P("i")}
    run = jax.shard_map(function, check_vma=False, **over)
    given = [make_type((1 << 12,), mesh, "i")]
    return lower_over(run, given, mode="partial").lowered.definition


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_train_step_is_cut_where_gradients_are_joined(h200: Any, is_cut: bool) -> None:
    assert h200 is not None
    network = Network(make_mesh(1, 2), is_cut)
    given = network.list_arguments()
    found = lower_over(network.train, given, donate_argnums=(0,), mode="partial")
    definition = found.lowered.definition
    assert [stage.is_captured for stage in definition.stages] == [True, False, True]
    assert list_joint(definition) == [[KIND.ALL_REDUCE]]
    (node,) = definition.stages[1].nodes
    assert {*node.arguments, *node.results} <= list_exchanged(definition)
    assert {each.alias for each in found.lowered.program.outputs} == {
        "params['w']",
        "params['v']",
        None,
    }
    for placed in place_all(definition, 2):
        check_built(placed)


def test_each_collective_is_a_cut_of_its_own(h200: Any) -> None:
    assert h200 is not None

    def run(x: Any) -> Any:
        rows = lax.all_to_all(x, "i", 0, 0, tiled=True)
        moved = lax.ppermute(rows * 2, "i", [(0, 1), (1, 0)])
        whole = lax.all_gather(moved + 1, "i", tiled=True)
        part = lax.psum_scatter(whole * 2, "i", tiled=True)
        return lax.psum(part + lax.axis_index("i"), "i")

    definition = lower_body(run, make_mesh(1, 2))
    kinds = [KIND.ALL_TO_ALL, KIND.PERMUTE, KIND.ALL_GATHER, KIND.REDUCE_SCATTER, KIND.ALL_REDUCE]
    assert list_joint(definition) == [[kind] for kind in kinds]


def test_what_gpus_of_one_host_exchange_stays_in_their_graphs(h200: Any) -> None:
    assert h200 is not None
    grid = np.array(topology.find_h200s(2, 2)).reshape(2, 2)
    mesh = Mesh(grid, ("host", "i"))
    over = {"mesh": mesh, "in_specs": P(("host", "i")), "out_specs": P(("host", "i"))}

    def run(x: Any) -> Any:
        return lax.psum(lax.psum(x, "i") * 2, "host")

    given = [make_type((1 << 12,), mesh, ("host", "i"))]
    mapped = jax.shard_map(run, check_vma=False, **over)
    definition = lower_over(mapped, given, mode="partial").lowered.definition
    assert list_joint(definition) == [[KIND.ALL_REDUCE]]
    (joint,) = definition.stages[-1 if not definition.stages[-1].is_captured else 1].nodes
    assert isinstance(joint, JointCollectiveNode)
    assert joint.members[0].exchange.groups == ((0, 2), (1, 3))
    inside = [node for node in definition.stages[0].nodes if isinstance(node, CollectiveNode)]
    assert [node.exchange.groups for node in inside] == [((0, 1), (2, 3))]


def test_short_loops_are_cut_and_long_ones_refused(h200: Any) -> None:
    assert h200 is not None

    def loop(count: int) -> Any:
        return lambda x: lax.fori_loop(0, count, lambda _, c: lax.pmean(c, "i") * 0.99, x)

    assert list_joint(lower_body(loop(3), make_mesh(1, 2))) == [[KIND.ALL_REDUCE]] * 3
    with pytest.raises(UnsupportedError, match="over several processes inside of a loop") as caught:
        lower_body(loop(3000), make_mesh(1, 2))
    assert caught.value.where.startswith("all-reduce at ")
    assert "test_several_hosts.py" in caught.value.where


def test_whole_mode_refuses_them(h200: Any) -> None:
    assert h200 is not None
    network = Network(make_mesh(1, 2), is_cut=False)
    with pytest.raises(CaptureError, match="is on the devices of 2 processes") as caught:
        lower_over(network.train, network.list_arguments())
    assert 'mode="partial"' in caught.value.fix
