"""Graphs as the driver likes them: edges with the ports that were asked for, no slow nodes."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.gpu.driver_calls import CHANGES, RecordedBindings, find_slow_nodes
from tests.gpu.reference import find_captured
from tracegraph.runtime.cuda.device import find_cuda_device
from tracegraph.runtime.cuda.graphs.graph import CudaGraph
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader
from tracegraph.runtime.definition.graph import Stage
from tracegraph.runtime.definition.nodes import KernelNode

pytestmark = pytest.mark.usefixtures("gpu", "untried")
MANY = 1 << 20


def chain(x):
    for _ in range(20):
        x = jnp.cumsum(jnp.sort(x)) / 100
    return x


def find_waiting_kernel() -> KernelNode:
    """Returns a kernel of XLA that waits by itself, with the memory that it works on."""
    captured = tg.capture(chain)
    captured(jnp.arange(1000.0))
    (stage,) = find_captured(captured).lowered.definition.stages
    waiting = [n for n in stage.nodes if isinstance(n, KernelNode) and n.begins_with_wait]
    assert waiting, "XLA wrote no kernel that waits by itself"
    return waiting[0]


def test_each_port_is_what_was_asked_for(gpu):
    """One kernel waits for small and large ones: both early ports, and a full edge."""
    node = find_waiting_kernel()
    small, large = (
        dataclasses.replace(node, shape=dataclasses.replace(node.shape, grid=(count, 1, 1)))
        for count in (1, MANY)
    )
    nodes = (small, large, small, large, small, small)
    edges = tuple((index, 5) for index in range(5))
    stage = Stage(nodes, edges, programmatic=frozenset(edges[:4]))
    cuda = find_cuda_device(gpu)
    driver, primary = cuda.context.driver, cuda.context.order.primary
    # Built and read back, never launched: the addresses are made up.
    graph = CudaGraph(driver, stage, lambda _: 1 << 20, KernelLoader(driver, primary), {}, "fork")
    found = driver.list_edges(graph.handles[0], 99)
    index = {handle: number for number, handle in enumerate(graph.node_handles)}
    ports = {index[e.first]: (e.port, e.is_programmatic) for e in found}
    assert len(found) == 5
    assert ports == {0: (2, True), 1: (1, True), 2: (2, True), 3: (1, True), 4: (0, False)}


def test_the_edges_of_a_capture_are_those_of_its_definition(gpu):
    captured = tg.capture(chain)
    captured(jnp.arange(1000.0))
    (stage,) = find_captured(captured).lowered.definition.stages
    (built,) = find_captured(captured).replay.stages
    driver = find_cuda_device(gpu).context.driver
    found = driver.list_edges(built.graph.handles[0], 10_000)
    assert stage.programmatic
    assert collections.Counter(e.is_programmatic for e in found)[True] == len(stage.programmatic)
    assert len(found) == len(stage.edges)


@pytest.fixture
def recorded(gpu, monkeypatch):
    """The calls on graphs that reach the driver from now on."""
    driver: Any = find_cuda_device(gpu).context.driver
    bindings = RecordedBindings(driver._api)
    monkeypatch.setattr(driver, "_api", bindings)
    return bindings.calls


def train(state, x):
    state = {name: value * 0.9 + x.sum() for name, value in state.items()}
    return state, lax.fori_loop(0, x[0].astype(int), lambda i, c: jnp.sin(c) + i, x)


@pytest.mark.parametrize("mode", ["arguments", "state"])
def test_no_node_is_slow(recorded, mode):
    """Replays that rebind arguments and results; the nodes of graphs above 128 can be slow."""
    function: Any = train if mode == "state" else lambda x, y: (chain(x) + y, chain(y) * 2)
    captured: Any = tg.capture(function, donate_argnums=0 if mode == "state" else ())
    state = {str(i): jnp.full(64, float(i)) for i in range(80)}
    for index in range(6):
        x = jnp.full(1000, float(index))
        if mode == "state":
            state, _ = captured(state, x)
        else:
            captured(x, jnp.asarray(np.arange(1000.0, dtype=np.float32)))
    names = collections.Counter(call.name for call in recorded)
    assert names["cuGraphUpload"] >= 1
    assert names["cuGraphAddKernelNode"] >= 1
    assert mode == "state" or sum(names[name] for name in CHANGES)
    assert find_slow_nodes(recorded) == []
