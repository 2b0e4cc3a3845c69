"""What `get_graph_data` says is what the driver has: nodes, edges, launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.gpu.reference import find_captured
from tracegraph.runtime.cuda.driver.driver import load_driver

pytestmark = pytest.mark.usefixtures("gpu")
X = np.linspace(-1, 1, 4096, dtype=np.float32)


def fork(x: Any) -> Any:
    side, main = tg.Stream(), tg.current_stream()
    side.wait_stream(main)
    with tg.stream(side):
        left = jnp.cumsum(jnp.tanh(x))
    right = jnp.sort(jnp.sin(x))
    main.wait_stream(side)
    return left + right, (left * right).sum()


def loop(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 1e4, lambda c: jnp.abs(c) * 2 + c @ c, x) + 1


@pytest.mark.parametrize("function", [fork, loop])
def test_the_driver_has_the_same_graph(function: Any) -> None:
    captured: Any = tg.capture(function)
    captured(X)
    data = captured.get_graph_data(X)
    (stage,) = find_captured(captured).replay.stages
    driver, (graph, _) = load_driver(), stage.graph.handles
    outer = [edge for edge in data.edges if data.nodes[edge.first].part == 0]
    assert driver.count_nodes(graph) == len(data.list_nodes(0))
    edges = driver.list_edges(graph, len(outer) + 1)
    assert len(edges) == len(outer)
    assert Counter(edge.is_programmatic for edge in edges) == Counter(
        edge.port == "programmatic" for edge in outer
    )
    assert any("test_graph_data.py:" in node.where for node in data.nodes)
    assert data.critical_path()


@pytest.mark.parametrize("name", ["graph.svg", "graph.dot"])
def test_files(tmp_path: Any, name: str) -> None:
    captured: Any = tg.capture(fork)
    captured.debug_dump(tmp_path / name, X)
    assert captured.cache_info().captures == 0
    assert (tmp_path / name).stat().st_size > 500
