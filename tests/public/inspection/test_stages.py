"""`lower` and `compile` in the way of `jax.stages`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tracegraph.capturing import compiled_capture
from tracegraph.replaying.captured_graph import CapturedGraph

X = jnp.arange(4.0)


def make_step(**options):
    @tg.capture(static_argnums=2, donate_argnums=0, **options)
    def step(state, x, n, *, bias):
        return {"w": state["w"] * n + x}, x.sum() + bias

    return step


def make_state():
    return {"w": jnp.ones(4)}


def test_the_stages_say_what_those_of_jit_say():
    step = make_step()
    reference = jax.jit(step.__wrapped__, static_argnums=2, donate_argnums=0)
    lowered = step.lower(make_state(), X, 2, bias=1.0)
    wanted: Any = reference.lower(make_state(), X, 2, bias=1.0)
    stages: Any = ((lowered, wanted), (lowered.compile(), wanted.compile()))
    types = jax.ShapeDtypeStruct((4,), jnp.float32)
    for stage, model in stages:
        assert stage.in_tree == model.in_tree
        assert stage.out_tree == model.out_tree
        assert stage.in_avals[0] == ({"w": types}, types)
        assert jax.tree.map(to_type, stage.in_avals) == jax.tree.map(to_type, model.in_avals)
        assert jax.tree.map(to_type, stage.out_info) == jax.tree.map(to_type, model.out_info)
        assert stage.donate_argnums == (0,)
        assert stage.cost_analysis()["flops"] == wanted.compile().cost_analysis()["flops"]
    assert "mul %" in lowered.as_text()
    assert str(lowered.plan) in lowered.as_text()
    assert "HloModule" in lowered.compile().as_text()
    assert repr(lowered.compile()) == "<CompiledCapture step>"


def to_type(leaf):
    return tuple(leaf.shape), np.dtype(leaf.dtype)


def test_the_memory_analysis_counts_the_buffers():
    lowered = make_step().lower(make_state(), X, 2, bias=1.0)
    memory = lowered.compile().memory_analysis()
    model = jax.jit(make_step().__wrapped__, static_argnums=2, donate_argnums=0)
    wanted: Any = model.lower(make_state(), X, 2, bias=1.0).compile().memory_analysis()
    for name in ("argument_size_in_bytes", "alias_size_in_bytes"):
        assert getattr(memory, name) == getattr(wanted, name), name
    # XLA's figure has the table of the tuple, two pointers, too.
    assert memory.output_size_in_bytes == wanted.output_size_in_bytes - 16 == 20
    assert memory.pool_bytes == lowered.pool_bytes


def test_a_compiled_capture_is_called_without_the_static_arguments():
    step = make_step()
    compiled = step.lower(make_state(), X, 2, bias=1.0).compile()
    state, wanted = make_state(), jnp.ones(4)
    for _ in range(3):
        state, total = compiled(state, X, bias=1.0)
        wanted = wanted * 2 + X
        assert_same(state, {"w": wanted})
        assert_same(total, X.sum() + 1)
    # It is a graph of its own.
    assert step.cache_info() == (0, 0, 64, 0)


def test_arguments_may_be_named_as_in_the_function():
    step = make_step()
    for compiled in (
        step.lower(make_state(), X, 2, bias=1.0).compile(),
        step.lower(make_state(), x=X, n=2, bias=1.0).compile(),
    ):
        for result in (
            compiled(make_state(), X, bias=1.0),
            compiled(make_state(), x=X, bias=1.0),
            compiled(state=make_state(), x=X, bias=1.0),
        ):
            assert_same(result, ({"w": 2 + X}, X.sum() + 1))


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (lambda: (make_state(), X, 2), {"bias": 1.0}, "is called with other arguments"),
        (lambda: (make_state(), X), {}, "is called with other arguments"),
        (lambda: (make_state(), jnp.ones(5)), {"bias": 1.0}, r"x: wanted f32\[4\], got f32\[5\]"),
        (lambda: ({"v": X + 0}, X), {"bias": 1.0}, "wanted nothing, got"),
    ],
)
def test_another_signature_is_refused(args, kwargs, words):
    compiled = make_step().lower(make_state(), X, 2, bias=1.0).compile()
    for _ in range(2):
        with pytest.raises(tg.ReplayError, match=words) as caught:
            compiled(*args(), **kwargs)
        assert caught.value.anchor == "signature"
        assert "test_stages.py" in caught.value.where
    assert_same(compiled(make_state(), X, bias=1.0)[0], {"w": 2 + X})


def test_the_first_call_verifies(monkeypatch):
    calls = []
    verify = compiled_capture.verify_capture
    monkeypatch.setattr(
        compiled_capture, "verify_capture", lambda *args: calls.append(1) or verify(*args)
    )
    for is_verified in (True, False):
        compiled = make_step(verify=is_verified).lower(make_state(), X, 2, bias=1.0).compile()
        for _ in range(2):
            assert_same(compiled(make_state(), X, bias=1.0)[0], {"w": 2 + X})
        assert len(calls) == 1


def test_a_compiled_capture_that_differs_is_not_used(monkeypatch):
    compiled = make_step().lower(make_state(), X, 2, bias=1.0).compile()
    replay = CapturedGraph.replay_once

    def replay_wrongly(*args, **kwargs):
        return [result + 1 for result in replay(*args, **kwargs)]

    with monkeypatch.context() as patch:
        patch.setattr(CapturedGraph, "replay_once", replay_wrongly)
        for _ in range(2):
            with pytest.raises(tg.VerificationError):
                compiled(make_state(), X, bias=1.0)
    assert_same(compiled(make_state(), X, bias=1.0)[0], {"w": 2 + X})


def test_eval_shape_and_clear_cache():
    traced = []
    captured = tg.capture(lambda x: traced.append(1) or x * 2)
    for _ in range(2):
        assert captured.eval_shape(X) == jax.ShapeDtypeStruct((4,), jnp.float32)
    assert len(traced) == 1
    first = captured(X)
    traced.clear()
    captured.clear_cache()
    assert captured.cache_info().currsize == 0
    assert captured.timings() == {}
    assert captured.eval_shape(X).shape == (4,)
    assert_same(captured(X), X * 2)
    assert_same(first, X * 2)
    assert len(traced) > 1
