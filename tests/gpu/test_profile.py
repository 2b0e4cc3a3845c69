"""`profile` on a GPU: every node has a time, and nothing that users hold is changed."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tracegraph.profiling.profile import Profile

pytestmark = pytest.mark.usefixtures("gpu")
X = np.linspace(-1, 1, 512 * 512, dtype=np.float32).reshape(512, 512)


def train(state: Any, x: Any) -> Any:
    weights, count = state

    def loss(weights: Any) -> Any:
        hidden = jnp.tanh(x @ weights["a"])
        return ((hidden @ weights["b"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
    return (weights, count + 1), value


def make_state() -> Any:
    return {"a": jnp.asarray(X), "b": jnp.asarray(X.T)}, jnp.int32(0)


def loop(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 1e6, lambda c: jnp.sort(c) * 2 + 1, jnp.abs(x)) + 1


def sort_beside_sums(x: Any) -> Any:
    side, main = tg.Stream(), tg.current_stream()
    side.wait_stream(main)
    with tg.stream(side):
        left = jnp.cumsum(jnp.tanh(x), axis=0)
    right = jnp.sort(jnp.sin(x))
    main.wait_stream(side)
    return left @ right


def check(profile: Profile) -> None:
    """Checks what holds on any GPU; the text is for the log of the run."""
    print(profile, *profile.by_node()[:12], sep="\n")
    assert profile.floor_us is not None
    assert 0.05 < profile.floor_us < 50
    for node in profile.nodes:
        if node.warm_us is None:
            assert "condition" in node.note or "inside of" in node.note, node
        elif "timed with" not in node.note:
            assert node.warm_us > 0, node
            assert node.cold_us is None or node.cold_us >= node.warm_us, node
    graph = profile.parts[0]
    assert graph.whole_us is not None
    assert 0 < graph.path_us <= graph.node_us * 1.0001
    # Nodes alone may take longer than in the graph, where they start early; not many times as long.
    assert graph.path_us < 4 * graph.whole_us + 50
    assert graph.whole_us < 4 * graph.node_us + 200


def test_a_train_step_is_as_it_was() -> None:
    captured: Any = tg.capture(train, donate_argnums=0)
    found = []
    for is_profiled in (False, True):
        state, values = make_state(), []
        for turn in range(4):
            state, value = captured(state, X)
            values.append(np.asarray(value))
            if is_profiled and turn == 1:
                before = jax.tree.map(np.asarray, state)
                check(captured.profile(state, X))
                jax.tree.map(np.testing.assert_array_equal, state, before)
        found.append((values, jax.tree.map(np.asarray, state)))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("function", [loop, sort_beside_sums])
def test_other_graphs(function: Any) -> None:
    captured: Any = tg.capture(function)
    before = np.asarray(captured(X))
    profile = captured.profile(X)
    check(profile)
    np.testing.assert_array_equal(captured(X), before)
    if function is loop:
        (node,) = [node for node in profile.nodes if node.kind == "while"]
        body = [each for each in profile.nodes if each.part != node.part]
        assert any(each.warm_us for each in body)


def test_a_long_stream_is_near_the_rate_of_the_memory() -> None:
    x = jnp.ones((64 << 20,), jnp.float32)
    captured: Any = tg.capture(lambda x: x * 2 + 1)
    captured(x)
    (node,) = captured.profile(x).nodes
    assert node.nbytes == 2 * x.nbytes
    assert node.memory_share is not None
    assert 0.2 < node.memory_share < 1.1


def test_a_handler_and_an_eager_part() -> None:
    def call_back(x: Any) -> Any:
        y = jax.pure_callback(
            lambda y: np.asarray(y) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ x
        )
        return jnp.linalg.qr(y)[1] * 2

    captured: Any = tg.capture(call_back, mode="partial", prefer="graph")
    before = np.asarray(captured(X))
    profile = captured.profile(X)
    print(profile)
    assert [part.kind for part in profile.parts if part.kind != "body"][:2] == ["graph", "eager"]
    assert all(part.whole_us for part in profile.parts if part.kind != "body")
    np.testing.assert_array_equal(captured(X), before)


def test_memory_goes_back() -> None:
    captured: Any = tg.capture(loop)
    captured(X)
    gc.collect()
    before = tg.memory.memory_reserved()
    profile = captured.profile(X)
    assert tg.memory.memory_reserved() == before
    assert profile.nodes
