"""What a function keeps in host memory, compiled for a described H200."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.deviceless.building import check_built
from tests.deviceless.pipeline import lower_for_gpu, make_capture_request
from tests.offloading import add_there, make_arguments, train_layers, train_scan
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.saved_lowering import decode_lowered, encode_lowered
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, list_nested
from tracegraph.runtime.definition.nodes import CopyNode, KernelNode

WIDTH = 64
LAYER_BYTES = 4 * WIDTH * WIDTH


def lower(function: Any, arguments: Any, device: Any) -> Lowered:
    return lower_for_gpu(make_capture_request(function, arguments), device)


def list_users(lowered: Lowered) -> list[Any]:
    """Returns the nodes, nested ones included, that name host memory."""
    there = {slot.name for slot in lowered.definition.slots if slot.is_host}
    (stage,) = lowered.definition.stages
    nodes = [n for n in list_nested(stage.nodes) if not isinstance(n, ConditionalNode)]
    return [node for node in nodes if any(use.buffer in there for use in node.ranges)]


def count_host_bytes(lowered: Lowered) -> int:
    return sum(slot.nbytes for slot in lowered.definition.slots if slot.is_host)


# XLA packs what lives at different steps into the same bytes, unless it is one stack.
@pytest.mark.parametrize(("train", "held"), [(train_layers, 1), (train_scan, 3)])
def test_offloaded_activations_are_copied_there_and_back(h200: Any, train: Any, held: int) -> None:
    lowered = lower(train, make_arguments(3, WIDTH), h200)
    users = list_users(lowered)
    assert {type(node) for node in users} == {CopyNode}
    assert [node.source.nbytes for node in users] == [LAYER_BYTES] * 2 * 3
    assert count_host_bytes(lowered) == lowered.plan.host_bytes == held * LAYER_BYTES
    check_built(lowered.definition)


def test_a_loop_on_the_device_offloads_in_each_turn(h200: Any) -> None:
    lowered = lower(train_scan, make_arguments(400, WIDTH), h200)
    kinds = [node.kind for node in lowered.definition.stages[0].nodes]
    assert kinds.count("while") == 2
    assert list_users(lowered)
    assert count_host_bytes(lowered) == 400 * LAYER_BYTES
    check_built(lowered.definition)


def test_kernels_reach_host_memory_where_the_function_computes_there(h200: Any) -> None:
    _, x = make_arguments(1, WIDTH)
    lowered = lower(add_there, (x, x), h200)
    users = list_users(lowered)
    assert {type(node) for node in users} == {CopyNode, KernelNode}
    check_built(lowered.definition)


def test_it_takes_no_memory_of_the_device(h200: Any) -> None:
    lowered = lower(train_scan, make_arguments(8, WIDTH), h200)
    arena_bytes = lowered.definition.arena_bytes
    for slot in lowered.definition.slots:
        assert (slot.offset >= arena_bytes) == (slot.is_host or slot.is_lent)


def test_a_file_keeps_what_is_in_host_memory(h200: Any) -> None:
    lowered = lower(train_scan, make_arguments(3, WIDTH), h200)
    encoded = encode_lowered(lowered)
    tree = json.loads(json.dumps(encoded.tree))
    stand_ins = [region.executable for region in lowered.regions]
    assert decode_lowered(tree, encoded.blobs, h200, stand_ins) == lowered
