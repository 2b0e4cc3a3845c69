"""Graphs that go to `cuda.core` and come from it; package and driver are played by fakes."""

from __future__ import annotations

import ctypes
import gc
import sys
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.raw_graphs import N, assert_value, fill, find_captured, record, use_device
from tracegraph.recording import cuda_core
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, Construct


def make_module(device: CudaOnHost) -> Any:
    """Returns the part of `cuda.core.graph` that is used, over the driver of a device."""

    class ChildGraphNode:
        def __repr__(self) -> str:
            return "<ChildGraphNode>"

    class EmptyNode(ChildGraphNode):
        pass

    class GraphDefinition:
        def __init__(self) -> None:
            with device.driver.use_context(device.context.order.primary):
                self.handle = device.driver.create_graph()
            self.added: list[Any] = []

        def nodes(self) -> set[Any]:
            return set(self.added)

        def edges(self) -> set[tuple[Any, Any]]:
            return set(zip(self.added[:-1], self.added[1:], strict=True))

    module: Any = types.ModuleType("cuda.core.graph")
    module.GraphDefinition, module.ChildGraphNode = GraphDefinition, ChildGraphNode
    module.EmptyNode = EmptyNode
    return module


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    device = use_device("cuda", monkeypatch)
    assert device is not None
    return device


@pytest.fixture
def core(device: CudaOnHost, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = make_module(device)
    for name in ("cuda", "cuda.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.core.graph", module)
    return module


def view(address: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_float * N).from_address(address))


def test_an_exported_graph_computes_on_the_values_of_the_export(device, core):
    x, w = tg.static_input((N,)), jnp.full(N, 10.0)
    g, y = record(lambda: x * 2 + w)
    x.copy_(fill(1))
    g.replay()
    assert_value(y, fill(12))
    x.copy_(fill(2))
    exported = tg.export_to_cuda_core(g)
    assert isinstance(exported.definition, core.GraphDefinition)
    assert device.driver.count_nodes(exported.definition.handle) == 1
    # What others write into the inputs is read.
    again = tg.import_from_cuda_core(exported.definition)
    again.replay()
    device.driver.synchronize_context()
    target = exported.find_address(y)
    np.testing.assert_array_equal(view(target), fill(14))
    view(exported.find_address(x))[:] = 5
    view(exported.find_address(w))[:] = 100
    again.replay()
    device.driver.synchronize_context()
    np.testing.assert_array_equal(view(target), fill(110))
    # The graph itself still reads its arrays.
    g.replay()
    assert_value(y, fill(14))
    x.copy_(fill(3))
    g.replay()
    assert_value(y, fill(16))
    with pytest.raises(tg.ConfigError, match="an array that the graph does not have"):
        exported.find_address(jnp.ones(N))


def test_state_is_exported_where_it_lives(device, core):
    x = tg.static_input((N,))
    g, _ = record(lambda: (x.copy_(x + 1), x * 3)[1])
    g.replay()
    g.replay()
    exported = tg.export_to_cuda_core(g)
    again = tg.import_from_cuda_core(exported.definition)
    again.replay()
    again.replay()
    device.driver.synchronize_context()
    np.testing.assert_array_equal(view(exported.find_address(x)), fill(4))


def test_the_export_holds_the_memory_of_the_graph(device, core):
    x = tg.static_input((N,))
    g, y = record(lambda: x + 1)
    exported = tg.export_to_cuda_core(g)
    arena = weakref.ref(find_captured(g).replay.arena)
    address = exported.find_address(y)
    again = tg.import_from_cuda_core(exported.definition)
    del g, y
    gc.collect()
    again.replay()
    device.driver.synchronize_context()
    np.testing.assert_array_equal(view(address), fill(1))
    del exported, again
    gc.collect()
    assert arena() is None


def test_an_imported_graph_is_an_object_like_any_other(device, core):
    definition = core.GraphDefinition()
    definition.added = [core.EmptyNode(), core.ChildGraphNode(), core.EmptyNode()]
    g = tg.import_from_cuda_core(definition)
    seen: list[Any] = []
    g.register_replay_end_hook(seen.append)
    g.replay()
    assert seen == [g]
    assert g.raw_cuda_graph() == definition.handle
    first = g.raw_cuda_graph_exec()
    g.instantiate()
    assert g.raw_cuda_graph_exec() != first
    g.replay()
    data = g.get_graph_data()
    assert [node.kind for node in data.nodes] == ["empty", "childgraph", "empty"]
    assert [(edge.first, edge.second) for edge in data.edges] == [(0, 1), (1, 2)]
    assert g.pools() == []
    with pytest.raises(tg.ReplayError, match="has no pool"):
        g.pool()
    with pytest.raises(tg.CaptureError, match="holds a graph already"), tg.graph(g):
        pass
    reference = weakref.ref(definition)
    g.reset()
    del definition
    gc.collect()
    assert reference() is None
    with pytest.raises(tg.ReplayError, match="holds no graph"):
        g.replay()
    with tg.graph(g):
        y = jnp.ones(N) + 1
    g.replay()
    assert_value(y, fill(2))
    assert len(g.pools()) == 1


def test_what_cannot_be_exported_is_refused(device, core, monkeypatch):
    g = tg.CUDAGraph()
    with pytest.raises(tg.ReplayError, match="holds no graph"):
        tg.export_to_cuda_core(g)
    with pytest.warns(UserWarning, match="is empty"), tg.graph(g):
        pass
    with pytest.raises(tg.ConfigError, match="the CUDA driver does not have"):
        tg.export_to_cuda_core(g)
    h, _ = record(lambda: jnp.ones(N) + 1)
    monkeypatch.delattr(core, "GraphDefinition")
    with pytest.raises(tg.ConfigError, match="older than its explicit graphs") as caught:
        tg.export_to_cuda_core(h)
    assert 'pip install "cuda-core>=1.0"' in caught.value.fix
    monkeypatch.setitem(sys.modules, "cuda.core.graph", None)
    with pytest.raises(tg.ConfigError, match="is not installed"):
        tg.export_to_cuda_core(h)
    with pytest.raises(tg.ConfigError, match="given object, not a graph definition"):
        tg.import_from_cuda_core(object())
    h.replay()


def test_a_graph_with_a_loop_is_refused(device, core, monkeypatch):
    g, y = record(lambda: jnp.ones(N) + 1)
    setter: Any = None
    loop = ConditionalNode("loop", Construct.WHILE, (), setter)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_core, "list_nodes", lambda _: [loop])
        with pytest.raises(tg.UnsupportedError, match="cannot be exported: while") as caught:
            tg.export_to_cuda_core(g)
    assert "raw_graph/test_cuda_core.py:" in caught.value.where
    g.replay()
    assert_value(y, fill(2))


def test_the_host_device_has_nothing_to_exchange(core, monkeypatch):
    definition = core.GraphDefinition()
    monkeypatch.undo()
    fake: Any = types.ModuleType("cuda.core.graph")
    fake.GraphDefinition = type(definition)
    monkeypatch.setitem(sys.modules, "cuda.core.graph", fake)
    g, y = record(lambda: jax.nn.relu(jnp.ones(N)))
    for call in (lambda: tg.export_to_cuda_core(g), lambda: tg.import_from_cuda_core(definition)):
        with pytest.raises(tg.ConfigError, match="the CUDA driver does not have") as caught:
            call()
        assert "raw_graph/test_cuda_core.py:" in caught.value.where
    g.replay()
    assert_value(y, fill(1))
