"""`get_graph_data` and `debug_dump` of captured functions."""

from __future__ import annotations

import pathlib
import xml.etree.ElementTree as ElementTree
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.oracles.error_lines import line
from tracegraph.graph_pictures import lines
from tracegraph.lowering.xla.origins import Origins

X = jnp.ones(4)


def fork(x: Any) -> Any:
    side, main = tg.Stream(), tg.current_stream()
    side.wait_stream(main)
    with tg.stream(side):
        left = jnp.tanh(x)
    right = jnp.sin(x)
    main.wait_stream(side)
    return left + right


LINES = [line() - 6, line() - 5, line() - 3]


def call_back(x: Any) -> Any:
    y = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x * 2)
    return y + 1


def test_two_streams_are_two_branches_with_their_lines() -> None:
    data = tg.capture(fork).get_graph_data(X)
    assert [(node.kind, node.nbytes) for node in data.nodes] == [("call", 32)] * 2 + [("call", 48)]
    assert {(edge.first, edge.second) for edge in data.edges} == {(0, 2), (1, 2)}
    for node, number in zip(data.nodes, LINES, strict=True):
        assert f"test_graph_data.py:{number} in fork" in node.where
    (result,) = [buffer for buffer in data.buffers if buffer.name in data.nodes[2].writes[0]]
    assert (result.shape, result.dtype, result.nbytes) == ((4,), "float32", 16)
    assert f":{LINES[2]} in fork" in result.where


def test_scopes_without_those_of_streams() -> None:
    with jax.named_scope("outer"):
        data = tg.capture(fork).get_graph_data(X)
    assert [node.scope for node in data.nodes] == ["", "", ""]

    def inside(x: Any) -> Any:
        with jax.named_scope("layer"):
            return fork(x)

    nodes = tg.capture(inside).get_graph_data(X).nodes
    assert [node.scope for node in nodes] == ["layer"] * 3


def test_a_graph_that_is_there_is_read_as_it_is() -> None:
    count = []
    captured = tg.capture(lambda x: (count.append(1), fork(x))[1])
    captured(X)
    traces = len(count)
    assert len(captured.get_graph_data(X).nodes) == 3
    assert len(count) == traces
    assert captured.cache_info().captures == 1


def test_nothing_is_captured_for_it() -> None:
    captured = tg.capture(fork)
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert captured.get_graph_data(shape) == captured.get_graph_data(X)
    assert (captured.cache_info().captures, captured.pool_bytes) == (0, 0)


def test_eager_parts() -> None:
    data = tg.capture(call_back, mode="partial").get_graph_data(X)
    assert [part.kind for part in data.parts] == ["graph", "eager", "graph"]
    assert [node.part for node in data.nodes] == [0, 1, 2]


def test_what_cannot_be_captured_says_why(tmp_path: pathlib.Path) -> None:
    captured = tg.capture(call_back)
    for ask in (captured.get_graph_data, lambda x: captured.debug_dump(tmp_path / "a.svg", x)):
        with pytest.raises(tg.CaptureError) as raised:
            ask(X)
        assert raised.value.anchor == "callback"
    assert list(tmp_path.iterdir()) == []


def test_both_files(tmp_path: pathlib.Path) -> None:
    captured = tg.capture(fork, name="f & g")
    for name in ("a.svg", "a.dot"):
        captured.debug_dump(str(tmp_path / name), X)
    texts = list(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    assert "f & g: 3 nodes, 2 edges" in texts
    assert (tmp_path / "a.dot").read_text().startswith("digraph {")


def test_a_name_without_a_kind_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    captured = tg.capture(lambda x: pytest.fail("it is traced"))
    with pytest.raises(tg.ConfigError, match="`path` is ") as raised:
        captured.debug_dump(tmp_path / "graph.png", X)
    assert raised.value.anchor == "config"


def test_a_gpu_graph_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake GPU has one kernel per region, and no instructions of XLA to look a line up in."""
    capture_for_gpu(monkeypatch)
    monkeypatch.setattr(lines, "read_origins", lambda _: Origins(None, {}))
    captured: Any = tg.capture(fork)
    captured(X)
    data = captured.get_graph_data(X)
    assert [node.kind for node in data.nodes] == ["kernel"] * 3
    assert all(node.kernel is not None for node in data.nodes)
    for node, number in zip(data.nodes, LINES, strict=True):
        assert f":{number} in fork" in node.where
    np.testing.assert_array_equal(captured(X), jnp.tanh(X) + jnp.sin(X))


def test_objects_of_libraries_are_split_first() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    captured = tg.capture(lambda model, x: model(x))
    assert len(captured.get_graph_data(model, X).nodes) == 1
