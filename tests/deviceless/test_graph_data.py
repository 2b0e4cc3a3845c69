"""Graphs of a described H200 as records: kernels, ports, bodies, and the user's lines."""

from __future__ import annotations

import inspect
import xml.etree.ElementTree as ElementTree
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tracegraph as tg
from tests.deviceless.test_partial import lower
from tracegraph.graph_pictures.dot import draw_dot
from tracegraph.graph_pictures.dump import describe_graph
from tracegraph.graph_pictures.svg import draw_svg
from tracegraph.runtime.definition.graph_nodes import list_nested

WEIGHTS = {"a": np.ones((64, 128), np.float32), "b": np.ones((128, 32), np.float32)}
BATCH = np.ones((16, 64), np.float32)
VECTOR = np.linspace(0, 1, 64, dtype=np.float32)


def train(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        hidden = jnp.tanh(x @ weights["a"])
        return ((hidden @ weights["b"]) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def repeat(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 1e3, lambda c: jnp.sort(c * 2 + c @ c), x)


def list_lines(function: Any) -> set[str]:
    """Returns how the lines of a function may be named."""
    source, first = inspect.getsourcelines(function)
    return {f"test_graph_data.py:{first + index} in " for index in range(len(source))}


def test_a_train_step(h200: Any) -> None:
    checked, lowered = lower(train, (WEIGHTS, BATCH), h200, mode="whole")
    data = describe_graph(checked, lowered)
    assert len(data.nodes) == lowered.definition.node_count > 3
    assert {edge.port for edge in data.edges} == {"complete", "programmatic"} or all(
        edge.port == "programmatic" for edge in data.edges
    )
    kernels = [node for node in data.nodes if node.kernel is not None]
    assert kernels
    assert all(node.kernel.symbol and node.kernel.grid[0] for node in kernels if node.kernel)
    lines = list_lines(train)
    for node in data.nodes:
        assert any(each in node.where for each in lines), node
    assert any("in loss" in node.where for node in data.nodes)
    ElementTree.fromstring(draw_svg(data))


def test_a_loop(h200: Any) -> None:
    checked, lowered = lower(repeat, (VECTOR,), h200, mode="whole")
    data = describe_graph(checked, lowered)
    nested = [node for stage in lowered.definition.stages for node in list_nested(stage.nodes)]
    assert sorted((n.kind, n.name) for n in data.nodes) == sorted((n.kind, n.name) for n in nested)
    (loop,) = [node for node in data.nodes if node.kind == "while"]
    (body,) = [part for part in data.parts if part.owner == loop.index]
    inside = data.list_nodes(body.number)
    assert inside
    assert data.nodes[loop.index - 1].kernel is not None, "the setter is right before"
    assert any("repeat" in node.where for node in inside)
    assert draw_dot(data).count("subgraph") == len(data.parts) == 2


def test_scopes(h200: Any) -> None:
    def train(x: Any, w: Any) -> Any:
        with jax.named_scope("layer"):
            y = jnp.tanh(x @ w)
        with jax.named_scope("order"):
            return jnp.sort(y)

    data = describe_graph(*lower(train, (BATCH, np.ones((64, 64), np.float32)), h200, mode="whole"))
    scopes = {node.scope.rpartition("/")[0] for node in data.nodes}
    assert scopes == {"jit(region0)/layer", "jit(region0)/order"}


def test_two_regions_with_instructions_of_one_name(h200: Any) -> None:
    def cut(x: Any) -> Any:
        y = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), jnp.sin(x))
        return jnp.cos(y)

    first = inspect.getsourcelines(cut)[1]
    data = describe_graph(*lower(cut, (VECTOR,), h200))
    graphs = [part.number for part in data.parts if part.kind == "graph"]
    before, after = ([n for n in data.nodes if n.part == number] for number in graphs)
    assert all(f":{first + 1} in cut" in node.where for node in before if node.kernel)
    assert all(f":{first + 2} in cut" in node.where for node in after if node.kernel)


def run_chains(x: Any, y: Any, w: Any, v: Any) -> Any:
    side, main = tg.Stream(), tg.current_stream()
    side.wait_stream(main)
    with tg.stream(side):
        for _ in range(4):
            x = jnp.tanh(x @ w)
    for _ in range(4):
        y = jnp.tanh(y @ v)
    main.wait_stream(side)
    return jnp.vdot(x, y)


def find_before(data: Any, index: int) -> set[int]:
    """Returns the nodes that a node comes after, itself included."""
    firsts = [edge.first for edge in data.edges if edge.second == index]
    return {index}.union(*(find_before(data, first) for first in firsts))


def test_chains_on_two_streams_share_no_node_before_the_join(h200: Any) -> None:
    square = np.ones((64, 64), np.float32)
    data = describe_graph(*lower(run_chains, [square] * 4, h200, mode="whole"))
    first = inspect.getsourcelines(run_chains)[1]
    # The ends of the chains: what no later node on the same line comes after.
    ends = [
        [node.index for node in data.nodes if f":{line} in" in node.where][-1]
        for line in (first + 5, first + 7)
    ]
    left, right = (find_before(data, end) for end in ends)
    assert min(len(left), len(right)) >= 4
    assert not left & right
    last = find_before(data, data.nodes[-1].index)
    assert left | right < last


def test_external_events_stand_between_the_kernels_of_their_stream(h200: Any) -> None:
    half, go = tg.Event(external=True), tg.Event(external=True)

    def run_with_events(x: Any, y: Any, w: Any, v: Any) -> Any:
        half.record()
        go.wait()
        return run_chains(x, y, w, v), x

    square = np.ones((64, 64), np.float32)
    checked, lowered = lower(run_with_events, [square] * 4, h200, mode="whole")
    data = describe_graph(checked, lowered)
    (record,) = [node for node in data.nodes if node.kind == "event record"]
    (wait,) = [node for node in data.nodes if node.kind == "event wait"]
    first = inspect.getsourcelines(run_with_events)[1]
    assert f":{first + 1} in run_with_events" in record.where
    assert f":{first + 2} in run_with_events" in wait.where
    assert find_before(data, wait.index) == {record.index, wait.index}
    others = [node for node in data.nodes if node not in (record, wait)]
    assert len(others) > 8
    assert all(wait.index in find_before(data, node.index) for node in others)
    edges = [edge for edge in data.edges if edge.first == wait.index]
    assert {edge.port for edge in edges} == {"complete"}
