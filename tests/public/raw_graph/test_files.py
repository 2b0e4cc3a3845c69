"""What a `tg.CUDAGraph` consists of, as records and as files; needs no GPU.

The names of cases (G9) are those of PyTorch's own tests of graphs.
"""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.raw_graphs import N


def test_g09_a_graph_of_two_streams_is_drawn(tmp_path):
    x, side, g = tg.static_input((N,)), tg.Stream(), tg.CUDAGraph()
    g.enable_debug_mode()
    with tg.graph(g):
        main = tg.current_stream()
        side.wait_stream(main)
        with tg.stream(side):
            a = jnp.cumsum(x)
        b = jnp.sort(x)
        main.wait_stream(side)
        y = a + b
    assert y.shape == (N,)
    data = g.get_graph_data()
    assert any("raw_graph/test_files.py:" in node.where for node in data.nodes)
    for name, start in (("graph.dot", "digraph {"), ("graph.svg", "<svg")):
        g.debug_dump(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(start)
    with pytest.raises(tg.ConfigError, match=r"graph\.png"):
        g.debug_dump(tmp_path / "graph.png")
    assert not (tmp_path / "graph.png").exists()


def test_files_are_written_by_hooks(tmp_path):
    x, g = tg.static_input((N,)), tg.CUDAGraph()
    g.register_capture_end_hook(tg.export_graph_data(tmp_path / "early.json"))
    g.register_post_instantiate_hook(tg.export_graph_data(tmp_path / "graph.json"))
    g.register_post_instantiate_hook(tg.export_dot(tmp_path / "graph.dot"))
    with tg.graph(g):
        y = jnp.sin(x)
    assert y.shape == (N,)
    data = json.loads((tmp_path / "graph.json").read_text())
    assert len(data["nodes"]) == len(g.get_graph_data().nodes)
    assert data == json.loads((tmp_path / "early.json").read_text())
    assert (tmp_path / "graph.dot").read_text().startswith("digraph {")
    with pytest.raises(tg.ConfigError, match=r"graph\.txt"):
        tg.export_dot("graph.txt")
