"""A trace of `jax.profiler` with the user's lines and scopes at what a graph did on the GPU."""

from __future__ import annotations

import gzip
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tracegraph.graph_pictures.graph_data import GraphData

pytestmark = pytest.mark.usefixtures("gpu")
X = np.linspace(-1, 1, 512 * 512, dtype=np.float32).reshape(512, 512)
CALLS = 3


def layers(x: Any, w: Any) -> Any:
    with jax.named_scope("layer"):
        with jax.named_scope("head"):
            y = x @ w
        y = jnp.tanh(y)
    with jax.named_scope("order"):
        return jnp.sort(y)


def loop(x: Any, w: Any) -> Any:
    with jax.named_scope("loop"):
        y = lax.while_loop(lambda c: c.sum() < 1e7, lambda c: jnp.abs(c) * 2 + 1, x)
    with jax.named_scope("after"):
        return jnp.sort(y * w)


def trace(folder: pathlib.Path, call: Any) -> None:
    """Records some calls; one before them has captured what is called."""
    call()
    tg.synchronize()
    with jax.profiler.trace(str(folder)):
        for _ in range(CALLS):
            call()
        tg.synchronize()


def label(data: GraphData, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the events of the labelled trace; what was found is for the log of the run."""
    done = data.label_trace(folder)
    print(done, data, sep="\n")
    assert done.replays == CALLS
    assert (done.events > 0, done.unlabelled) == (True, 0)
    return json.loads(gzip.decompress(pathlib.Path(done.path).read_bytes()))["traceEvents"]


def check_scopes(data: GraphData, events: list[dict[str, Any]]) -> None:
    """Checks that each node of `layers` has its line, its scope and a slice over it."""
    own = [event for event in events if "node" in event.get("args", {})]
    assert {event["args"]["node"] for event in own} == {node.index for node in data.nodes}
    for event in own:
        assert "test_trace_labels.py:" in event["args"]["where"], event
        assert {"layer", "order"} & {*event["args"]["scope"].split("/")}, event
    slices = [e for e in events if e.get("ph") == "X" and e.get("args", {}).keys() == {"scope"}]
    paths = [event["args"]["scope"] for event in sorted(slices, key=lambda event: event["ts"])]
    assert {path: paths.count(path) for path in paths} == {
        "layer": CALLS,
        "layer/head": CALLS,
        "order": CALLS,
        "order/jit(sort)": CALLS,
    }
    for event in own:
        end = event["ts"] + event["dur"]
        assert any(s["ts"] < end and event["ts"] < s["ts"] + s["dur"] for s in slices), event


def test_each_node_has_its_line_and_scope(tmp_path: pathlib.Path) -> None:
    captured: Any = tg.capture(layers)
    w = jnp.asarray(X.T)
    trace(tmp_path, lambda: captured(X, w))
    data = captured.get_graph_data(X, w)
    check_scopes(data, label(data, tmp_path))


def test_a_raw_graph(tmp_path: pathlib.Path) -> None:
    x, w, g = tg.static_input(X), tg.static_input(X.T), tg.CUDAGraph()
    with tg.graph(g):
        y = layers(x, w)
    trace(tmp_path, g.replay)
    assert y.shape == X.shape
    data = g.get_graph_data()
    check_scopes(data, label(data, tmp_path))


def test_a_loop_has_its_turns(tmp_path: pathlib.Path) -> None:
    captured: Any = tg.capture(loop)
    w = jnp.asarray(X.T)
    trace(tmp_path, lambda: captured(X, w))
    data = captured.get_graph_data(X, w)
    events = [e["args"] for e in label(data, tmp_path) if "node" in e.get("args", {})]
    turns = [each for each in events if data.nodes[each["node"]].part == 1]
    assert turns
    assert all("/loop/while" in each["scope"] for each in turns)
    assert any(each["where"].endswith("in <lambda>") for each in turns)


def test_another_function_is_not_labelled(tmp_path: pathlib.Path) -> None:
    captured: Any = tg.capture(layers)
    other: Any = tg.capture(loop)
    w = jnp.asarray(X.T)
    trace(tmp_path, lambda: captured(X, w))
    other(X, w)
    with pytest.raises(tg.ConfigError, match="no replay of `loop` is in") as raised:
        other.get_graph_data(X, w).label_trace(tmp_path)
    assert raised.value.anchor == "trace-labels"
