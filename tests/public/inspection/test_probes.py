"""`tg.probe`: values inside of a captured function, readable after each replay."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg

X = jnp.arange(4.0)


def check(result: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def compute(x: jax.Array) -> jax.Array:
    h = tg.probe("hidden", jnp.sin(x) * 2)
    tg.probe("unused", {"sum": h.sum(), "square": h * h})
    return h + 1


@pytest.fixture(scope="module")
def step() -> Any:
    return tg.capture(compute)


def test_a_probe_is_the_identity_outside_of_a_capture() -> None:
    tree = {"a": X}
    assert tg.probe("a", tree) is tree
    check(jax.jit(compute)(X), jnp.sin(X) * 2 + 1)
    assert "tg_probe" not in str(jax.make_jaxpr(compute)(X))


def test_values_are_those_of_the_last_replay_and_change_no_result(step: Any) -> None:
    for x in (X, X + 1, X * 3):
        check(step(x), jax.jit(compute)(x))
        h = jax.jit(lambda x: jnp.sin(x) * 2)(x)
        probes = step.probes()
        assert list(probes) == ["hidden", "unused"]
        check(probes["hidden"], h)
        np.testing.assert_allclose(probes["unused"]["sum"], h.sum(), rtol=1e-6)
        check(probes["unused"]["square"], h * h)


def test_values_of_a_replay_are_kept_by_the_next_one(step: Any) -> None:
    step(X)
    kept = step.probes()["hidden"]
    before = np.asarray(kept).copy()
    step(X + 5)
    check(kept, before)


def test_a_nested_jit_that_was_traced_outside_before_is_probed() -> None:
    @jax.jit
    def layer(x: jax.Array) -> jax.Array:
        return tg.probe("inner", x * 2) + 1

    check(layer(X), X * 2 + 1)
    step = tg.capture(lambda x: layer(x) * 3)
    check(step(X), (X * 2 + 1) * 3)
    check(step.probes(), {"inner": X * 2})
    check(layer(X), X * 2 + 1)


def test_a_scan_in_a_checkpoint_below_grad_is_probed() -> None:
    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        carry = tg.probe("carry", carry + x)
        return carry, None

    @jax.checkpoint
    def block(x: jax.Array) -> jax.Array:
        return jax.lax.scan(body, jnp.zeros(()), x)[0]

    step = tg.capture(jax.grad(lambda x: block(x) ** 2))
    check(step(X), jnp.full_like(X, 2 * X.sum()))
    check(step.probes(), {"carry": jnp.cumsum(X)})


def test_primals_below_value_and_grad_are_probed_once() -> None:
    @jax.checkpoint
    def block(x: jax.Array) -> jax.Array:
        return jnp.sin(tg.probe("inside", x * 2))

    @jax.custom_jvp
    def relu(x: jax.Array) -> jax.Array:
        return tg.probe("relu", jnp.maximum(x, 0))

    relu.defjvp(lambda p, t: (relu(*p), t[0] * (p[0] > 0)))

    def loss(x: jax.Array) -> jax.Array:
        return tg.probe("loss", (relu(block(x)) ** 2).sum())

    def train(x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(x)
        return value, tg.probe("gradient", gradient)

    step = tg.capture(train)
    value, gradient = step(X)
    check((value, gradient), jax.jit(train)(X))
    probes = step.probes()
    assert set(probes) == {"inside", "relu", "loss", "gradient"}
    check((probes["inside"], probes["loss"], probes["gradient"]), (X * 2, value, gradient))


def test_a_scan_stacks_the_values_of_its_iterations() -> None:
    def body(c: jax.Array, x: jax.Array) -> Any:
        return tg.probe("carry", c + x), c

    def loss(x: jax.Array) -> jax.Array:
        last, before = jax.lax.scan(body, x[0], x)
        return last * before.sum()

    step = tg.capture(lambda x: jax.value_and_grad(loss)(x))
    check(step(X), jax.jit(jax.value_and_grad(loss))(X))
    check(step.probes()["carry"], jnp.cumsum(X) + X[0])


def test_a_fori_loop_of_known_length_stacks_below_a_gradient() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda i, c: tg.probe("c", c * x), x).sum()

    step = tg.capture(jax.grad(loss))
    check(step(X), jax.jit(jax.grad(loss))(X))
    assert step.probes()["c"].shape == (3, 4)


def test_vmap_keeps_the_batch_axis_first() -> None:
    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        return tg.probe("product", x * y) + tg.probe("shared", y.sum())

    step = tg.capture(jax.vmap(one, in_axes=(1, None), out_axes=1))
    x = jnp.arange(8.0).reshape(4, 2)
    check(step(x, X), jax.vmap(one, in_axes=(1, None), out_axes=1)(x, X))
    check(step.probes(), {"product": x.T * X, "shared": X.sum()})


def test_a_donated_state_does_not_take_the_place_of_a_probe() -> None:
    @functools.partial(tg.capture, donate_argnums=0)
    def step(state: Any, x: jax.Array) -> Any:
        tg.probe("before", state["w"] * 2)
        return {"w": state["w"] + x}

    state = step({"w": jnp.copy(X)}, X)
    kept = step.probes()["before"]
    state = step(state, X)
    check((kept, step.probes()["before"], state["w"]), (jnp.arange(4.0) * 2, X * 4, X * 3))


def test_keys_and_drawn_numbers_are_probed() -> None:
    generator = tg.random.Generator(3)

    @tg.capture
    def step(x: jax.Array) -> jax.Array:
        key = tg.probe("key", generator.next_key())
        return x + jax.random.normal(key, x.shape)

    first = step(X)
    key = step.probes()["key"]
    step(X)
    np.testing.assert_array_equal(first, X + jax.random.normal(key, X.shape))
    before, after = map(jax.random.key_data, (key, step.probes()["key"]))
    assert not np.array_equal(before, after)


def test_reset_drops_what_was_probed() -> None:
    step = tg.capture(lambda x: tg.probe("x", x + 1))
    assert step.probes() == {}
    step(X)
    assert list(step.probes()) == ["x"]
    step.reset()
    assert step.probes() == {}


def test_explain_lists_the_probes(step: Any) -> None:
    assert "hidden" in str(step.explain(X))


def in_while(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: tg.probe("c", c + 1), x)


def in_branch(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0] > 0, lambda x: tg.probe("b", x + 1), lambda x: x, x)


def twice(x: jax.Array) -> jax.Array:
    layer = jax.jit(lambda x: tg.probe("h", x + 1))
    return layer(layer(x))


def nameless(x: jax.Array) -> jax.Array:
    return tg.probe("", x)


def no_array(x: jax.Array) -> jax.Array:
    tg.probe("text", {"a": "b"})
    return x


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (in_while, "probe 'c' is inside of `while`"),
        (in_branch, "probe 'b' is inside of `cond`"),
        (twice, "probe 'h' is there twice"),
        (nameless, "is given '' for a name"),
        (no_array, "probe 'text' is given str"),
    ],
)
def test_what_cannot_be_kept_is_refused(function: Any, words: str) -> None:
    captured: Any = tg.capture(function)
    with pytest.raises(tg.CaptureError) as caught:
        captured(X)
    message = str(caught.value)
    assert words in message
    assert "test_probes.py" in message
    assert len(message.splitlines()) == 4


def test_a_probe_of_what_is_only_transposed_is_refused() -> None:
    def transpose(x: jax.Array) -> Any:
        return jax.linear_transpose(lambda y: tg.probe("y", y * 2), x)(x)

    with pytest.raises(tg.CaptureError, match="a tangent that a backward pass never computes"):
        tg.capture(transpose)(X)


def test_functions_with_buckets_and_with_breaks_say_what_they_do() -> None:
    bucketed = tg.capture(lambda x: tg.probe("y", x + 1), buckets={"x": {0: (2, 4)}})
    with pytest.raises(tg.CaptureError, match="probe 'y' is in a function with buckets"):
        bucketed(X[:3])

    @tg.capture(mode="partial")
    def branching(x: jax.Array) -> jax.Array:
        y = tg.probe("y", x * 2)
        return y + 1 if y.sum() > 0 else y - 1

    check(branching(X), X * 2 + 1)
    check(branching.probes(), {"y": X * 2})
