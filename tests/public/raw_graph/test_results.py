"""What a block of `tg.graph` gets from calls that leave an array as it is: an array of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.oracles.tree_equality import assert_same
from tests.raw_graphs import N, assert_value, fill, record, use_device

CALLS: dict[str, Callable[[Any], Any]] = {
    "astype": lambda v: v.astype(jnp.float32),
    "reshape": lambda v: v.reshape(N),
    "T": lambda v: v.T,
    "real": lambda v: v.real,
    "getitem": lambda v: v[:],
    "at_get": lambda v: v.at[()].get(),
    "squeeze": lambda v: v.squeeze(),
    "ravel": lambda v: v.ravel(),
    "conj": lambda v: v.conj(),
    "asarray": jnp.asarray,
    "jnp_reshape": lambda v: jnp.reshape(v, (N,)),
    "broadcast_to": lambda v: jnp.broadcast_to(v, (N,)),
    "roll": lambda v: jnp.roll(v, 0),
    "stop_gradient": jax.lax.stop_gradient,
    "jit": jax.jit(lambda v: v),
    "vmap": jax.vmap(lambda v: v),
    "device_put": jax.device_put,
}


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


@pytest.mark.parametrize("source", ["made", "input"])
def test_the_result_can_be_read_after_a_replay(source):
    x = tg.static_input((N,))

    def run() -> dict[str, Any]:
        value = x + 1 if source == "made" else x
        made = {name: call(value) for name, call in CALLS.items()}
        assert {type(array) for array in made.values()} == {tg.Array}
        return made

    g, made = record(run)
    x.copy_(fill(4))
    g.replay()
    for array in made.values():
        assert_value(array, fill(5 if source == "made" else 4))


def test_the_result_is_the_value_of_its_line():
    x = tg.static_input((N,))

    def run() -> Any:
        calls = [CALLS[name] for name in ("astype", "T", "getitem", "reshape", "at_get")]
        before = [call(x) for call in calls]
        x.copy_(x + 1)
        return before, [call(x) for call in calls], x.at[0].add(10)

    g, (before, behind, added) = record(run)
    for step in range(3):
        g.replay()
        for old, new in zip(before, behind, strict=True):
            assert_value(old, fill(step))
            assert_value(new, fill(step + 1))
        assert_value(added, fill(step + 1) + jnp.array([10, 0, 0, 0]))
    x.copy_(fill(9))
    assert_value(before[0], fill(2))


def test_outside_of_a_block_the_result_is_a_plain_array():
    x = tg.static_input((N,))
    g, y = record(lambda: x + 1)
    g.replay()
    kept = [CALLS[name](y) for name in ("astype", "T", "getitem", "reshape", "at_get")]
    x.copy_(fill(7))
    g.replay()
    for array in kept:
        assert_value(array, fill(1))
    assert_value(y, fill(8))


def square(y: Any) -> Any:
    return (y**2).sum(), y


def square_nested(y: Any) -> Any:
    return (y**2).sum(), {"own": [y], "made": y * 3}


TRANSFORMED = {
    "value_and_grad": lambda x: jax.value_and_grad(square, has_aux=True)(x),
    "nested": lambda x: jax.value_and_grad(square_nested, has_aux=True)(x),
    "vjp": lambda x: jax.vjp(square, x, has_aux=True)[::2],
    "pullback": lambda x: jax.vjp(square, x, has_aux=True)[1](jnp.ones(())),
    "jvp": lambda x: jax.jvp(square, (x,), (x,), has_aux=True),
    "linearize": lambda x: jax.linearize(square, x, has_aux=True)[::2],
    "vmap": lambda x: jax.vmap(lambda y: (y * 2, y))(x),
    "jit": lambda x: jax.jit(lambda y: (y * 2, y))(x),
    "checkpoint": lambda x: jax.grad(jax.checkpoint(lambda y: jnp.sin(y).sum()))(x),
    "closure": lambda x: jax.value_and_grad(lambda y: ((y**2).sum(), x), has_aux=True)(x),
}


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_function_may_return_its_own_argument(name: str, *, is_made: bool) -> None:
    x, graph = jnp.arange(3.0), tg.CUDAGraph()
    with tg.graph(graph):
        given = x * 2 if is_made else x
        result = TRANSFORMED[name](given)
    graph.replay()
    assert_same(result, TRANSFORMED[name](x * 2 if is_made else x))


def differentiate_inside(x: Any) -> Any:
    def measure(y: Any) -> Any:
        return (y**2).sum(), jax.value_and_grad(square, has_aux=True)(x)

    return jax.value_and_grad(measure, has_aux=True)(x + 1)


OF_AN_INPUT = TRANSFORMED | {
    "inner": differentiate_inside,
    "checkpointed": lambda x: jax.value_and_grad(jax.checkpoint(square), has_aux=True)(x),
    "jitted": lambda x: jax.value_and_grad(jax.jit(square), has_aux=True)(x),
    "closed over by jit": lambda x: jax.jit(lambda y: (x, y))(x + 1),
    "closed over by checkpoint": lambda x: jax.checkpoint(lambda y: (x, y))(x + 1),
    "closed over by scan": lambda x: jax.lax.scan(lambda c, y: (x, c * y), x, x),
    "closed over by jit in vmap": lambda x: jax.vmap(jax.jit(lambda y: x * y))(x),
}


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("name", OF_AN_INPUT)
def test_what_a_function_returns_of_an_input_follows_it(name: str, *, is_made: bool) -> None:
    x, graph = tg.static_input((3,)), tg.CUDAGraph()
    x.copy_(jnp.ones(3))
    with tg.graph(graph):
        result = OF_AN_INPUT[name](x * 2 if is_made else x)
    value = jnp.arange(3.0)
    x.copy_(value)
    graph.replay()
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(result))
    assert_same(result, OF_AN_INPUT[name](value * 2 if is_made else value))


def test_auxiliary_data_is_the_value_before_the_input_is_written():
    w, graph = tg.static_input((3,)), tg.CUDAGraph()
    with tg.graph(graph):
        (loss, old), slope = jax.value_and_grad(square, has_aux=True)(w)
        w.copy_(w - slope / 4)
        (_, new), _ = jax.value_and_grad(square, has_aux=True)(w)
    w.copy_(jnp.full(3, 8.0))
    graph.replay()
    assert_value(old, jnp.full(3, 8.0))
    assert_value(new, jnp.full(3, 4.0))
    assert_value(w, jnp.full(3, 4.0))
    assert_value(loss, jnp.array(192.0))
