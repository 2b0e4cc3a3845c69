"""`mode="partial"`: what a graph cannot hold runs eagerly between two graphs.

Loops and branches run eagerly with ``control_flow="refuse"``, which makes many small programs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tracegraph.capturing import drafter

X = jnp.linspace(0.5, 2.0, 4)


def branch(x):
    y = jnp.sin(x) * 2
    z = lax.cond(y.sum() > 3, lambda v: v * 2, lambda v: v - 1, y)
    return z + y, y.max()


def loop(x):
    y = lax.while_loop(lambda v: v.sum() < 50, lambda v: v * 1.5, x + 1)
    return y / x


def two_branches_and_a_loop(x):
    first, _ = branch(x)
    second, top = branch(loop(first + 5))
    return {"first": first, "second": second + first, "top": top, "x": x}


def callback(x):
    y = x * 2
    z = jax.pure_callback(np.sort, jax.typeof(y), y[::-1])
    return z + y


def branch_at_the_end(x):
    return lax.cond(x.sum() > 3, lambda v: v * 2, lambda v: v - 1, x)


def branch_on_a_key(x):
    key = jax.random.key(x.sum().astype(int))
    key = lax.cond(x[0] > 1, lambda k: jax.random.split(k)[0], lambda k: k, key)
    return jax.random.normal(key, x.shape) + x, key


def gamma(x):
    return jax.scipy.special.gammainc(x, x + 1) * 2


PROGRAMS: list[Callable[..., Any]] = [
    branch,
    loop,
    two_branches_and_a_loop,
    callback,
    branch_at_the_end,
    branch_on_a_key,
    gamma,
    jax.grad(lambda x: branch(x)[0].sum()),
    jax.vmap(lambda row: row * 2 + branch_at_the_end(row[None])[0]),
]


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_partial_captures_equal_jit(function: Callable[..., Any]):
    captured = tg.capture(function, mode="partial", control_flow="refuse")
    for x in (X, X * 0.1, X * 3, X):
        got, wanted = captured(x), jax.jit(function)(x)
        assert jax.tree.structure(got) == jax.tree.structure(wanted)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert jax.typeof(one) == jax.typeof(other)
            if one.dtype == jnp.float32:
                # Two compilations may fuse, and so round, differently.
                np.testing.assert_allclose(one, other, rtol=2e-6)
            else:
                assert_same(one, other)
    assert captured.cache_info() == (3, 1, 64, 1)


@pytest.mark.parametrize("function", PROGRAMS[:5], ids=lambda f: f.__name__)
def test_in_checking_mode(function: Callable[..., Any], monkeypatch):
    monkeypatch.setenv("TRACEGRAPH_CHECK_REPLAY", "1")
    captured = tg.capture(function, mode="partial", control_flow="refuse", verify=False)
    for x in (X, X * 3):
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-6),
            captured(x),
            jax.jit(function)(x),
        )


def test_a_function_without_such_ops_is_one_graph():
    captured = tg.capture(lambda x: x * 2, mode="partial")
    assert_same(captured(X), X * 2)
    assert "eager" not in captured.explain(X)


def test_callbacks_with_effects_run_once_per_call():
    seen = []

    def function(x):
        io_callback(lambda v: seen.append(float(v)), None, x, ordered=True)
        return x + 1

    captured = tg.capture(function, mode="partial")
    for x in (1.0, 2.0, 2.0):
        assert float(captured(x)) == x + 1
    assert seen == [1.0, 2.0, 2.0]


def test_debug_prints_run_at_each_call(capfd):
    def function(x):
        jax.debug.print("x is {}", x)
        return x * 2

    captured = tg.capture(function, mode="partial")
    for x in (1.0, 3.0):
        captured(x)
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[-3:] == ["x is 1.0", "x is 3.0", ""]


class Fragile:
    """A callback that raises when a flag is set."""

    def __init__(self):
        self.error: Exception | None = None

    def __call__(self, value):
        if self.error is not None:
            raise self.error
        return np.asarray(value)


def make_fragile_step():
    fragile = Fragile()

    def step(state, x):
        w = state["w"] + x
        checked = jax.pure_callback(fragile, jax.typeof(w), w)
        return {"w": checked * 2, "n": state["n"] + 1}, w.sum()

    return step, fragile


def test_an_exception_in_an_eager_part_leaves_the_state_as_it_was():
    step, fragile = make_fragile_step()
    captured = tg.capture(step, donate_argnums=0, mode="partial")
    state, _ = captured({"w": jnp.ones(2), "n": jnp.int32(0)}, 1.0)
    state, kept = captured(state, 1.0)
    before = jax.tree.map(np.asarray, state)
    fragile.error = ValueError("broken on purpose")
    for _ in range(2):
        with pytest.raises(Exception, match="broken on purpose"):
            captured(state, 100.0)
        assert_same(jax.tree.map(np.asarray, state), before)
        assert float(kept) == 10.0
    fragile.error = None
    new, total = captured(state, 1.0)
    assert state["w"].is_deleted()
    assert (int(new["n"]), float(total)) == (3, 22.0)


def test_an_exception_in_the_first_call_consumes_nothing():
    step, fragile = make_fragile_step()
    captured = tg.capture(step, donate_argnums=0, mode="partial", verify=False)
    fragile.error = ValueError("broken on purpose")
    state = {"w": jnp.ones(2), "n": jnp.int32(0)}
    with pytest.raises(Exception, match="broken on purpose"):
        captured(state, 1.0)
    assert captured.cache_info() == (0, 1, 64, 1)
    fragile.error = None
    state, total = captured(state, 1.0)
    assert (float(total), int(state["n"])) == (4.0, 1)
    assert captured.cache_info() == (1, 1, 64, 1)


def test_an_exception_with_a_new_state_consumes_neither():
    step, fragile = make_fragile_step()
    captured = tg.capture(step, donate_argnums=0, mode="partial")
    old, _ = captured({"w": jnp.ones(2), "n": jnp.int32(0)}, 1.0)
    new = {"w": jnp.zeros(2), "n": jnp.int32(7)}
    fragile.error = KeyError("broken on purpose")
    with pytest.raises(Exception, match="broken on purpose"):
        captured(new, 1.0)
    fragile.error = None
    assert_same(jax.tree.map(np.asarray, old), {"w": np.full(2, 4.0, "f4"), "n": np.int32(1)})
    assert_same(new["w"], jnp.zeros(2))
    assert float(captured(new, 1.0)[1]) == 2.0
    assert float(captured(old, 1.0)[1]) == 10.0


def test_a_captured_function_inside_an_eager_callback():
    inner = tg.capture(lambda v: v * 10)

    def function(x):
        return jax.pure_callback(lambda v: np.asarray(inner(v)), jax.typeof(x), x + 1) * 2

    captured = tg.capture(function, mode="partial")
    for x in numbers_as_arrays(3):
        assert float(captured(x)) == (float(x) + 1) * 20


def numbers_as_arrays(count):
    return [jnp.float32(i) for i in range(count)]


def test_donated_state_across_eager_parts():
    def step(state, x):
        w = lax.cond(x > 0, lambda v: v + x, lambda v: v, state["w"])
        return {"w": w, "old": state["w"]}, state["old"]

    captured = tg.capture(step, donate_argnums=0, mode="partial", control_flow="refuse")
    state = {"w": jnp.zeros(2), "old": jnp.ones(2)}
    wanted = jax.tree.map(jnp.copy, state)
    for x in (1.0, -1.0, 2.0, 3.0):
        state, old = captured(state, x)
        wanted, expected = jax.jit(step)(wanted, x)
        assert_same((state, old), (wanted, expected))


RANDOM: dict[str, Callable[[Any], Any]] = {
    "beta": lambda k: jax.random.beta(k, 2.0, 3.0, (64,)),
    "gamma": lambda k: jax.random.gamma(k, 2.5, (64,)),
    "poisson": lambda k: jax.random.poisson(k, 4.0, (64,)),
    "betainc": lambda k: jax.scipy.special.betainc(2.0, 3.0, jax.random.uniform(k, (64,))),
}


@pytest.mark.parametrize("name", RANDOM)
def test_regions_see_the_constants_that_jit_sees(name):
    """Passed through memory, a constant would be a number that XLA does not know."""
    key = jax.random.key(0)
    captured = tg.capture(RANDOM[name], mode="partial", control_flow="refuse")
    got, wanted = captured(key), jax.jit(RANDOM[name])(key)
    if name == "beta" and jax.__version__.startswith(("0.10", "0.11")):
        # There XLA folds constants before it inlines the calls of the whole function.
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
        assert "may differ from one jax.jit in the last bits" in captured.explain(key)
    else:
        assert_same(got, wanted)


def test_without_the_constants_bits_differ(monkeypatch):
    monkeypatch.setattr(drafter, "CHEAP_PRIMITIVES", frozenset())
    key = jax.random.key(0)
    got = tg.capture(RANDOM["beta"], mode="partial", control_flow="refuse")(key)
    assert not np.array_equal(got, jax.jit(RANDOM["beta"])(key))
