"""Calls that bind the same arguments share one graph, however they are written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg

X = jnp.arange(3.0)


def scale(x, y=2.0, *, flag=True):
    return x * y if flag else x


SPELLINGS = [
    lambda f: f(X),
    lambda f: f(x=X),
    lambda f: f(X, 2.0),
    lambda f: f(X, y=2.0),
    lambda f: f(y=2.0, x=X),
    lambda f: f(X, flag=True),
    lambda f: f(X, 2.0, flag=True),
]


@pytest.mark.parametrize("first", range(len(SPELLINGS) - 2))
def test_one_graph_for_all_spellings(first):
    captured = tg.capture(scale, verify=False)
    for call in (SPELLINGS[first], *SPELLINGS, *reversed(SPELLINGS)):
        np.testing.assert_array_equal(np.asarray(call(captured)), [0.0, 2.0, 4.0])
    assert captured.cache_info().captures == 1
    # As under jit a flag that is given is data, and cannot be branched on.
    with pytest.raises(tg.CaptureError, match="decides in Python"):
        captured(X, flag=False)


def test_another_value_than_the_default_is_data():
    captured = tg.capture(scale, verify=False)
    for y in (2.0, 3.0, 4.0, 2.0):
        assert captured(X, y).tolist() == (X * y).tolist()
    # The first call gave y, so that all of them, and one without, are one graph.
    assert captured(X).tolist() == (X * 2).tolist()
    assert captured.cache_info().captures == 1
    captured = tg.capture(scale, verify=False)
    for y in (2.0, 3.0, 4.0, 2.0):
        assert captured(X).tolist() == (X * 2).tolist()
        assert captured(X, y).tolist() == (X * y).tolist()
    assert captured.cache_info().captures == 2


def test_static_arguments_by_all_spellings():
    captured = tg.capture(
        lambda x, n=2, kind="sum": getattr(jnp, kind)(x) * n, static_argnames=("n", "kind")
    )
    for call in (
        captured(X),
        captured(X, 2),
        captured(X, n=2),
        captured(x=X, kind="sum"),
        captured(X, 2, "sum"),
    ):
        assert float(call) == 6.0
    assert captured.cache_info().captures == 1
    assert float(captured(X, kind="max", n=3)) == float(captured(X, 3, "max")) == 6.0
    assert captured.cache_info().captures == 2


def test_donated_arguments_by_all_spellings():
    @tg.capture(donate_argnums=0)
    def step(state, x, rate=0.5):
        return {"w": state["w"] + rate * x}

    calls = (
        lambda state: step(state, X),
        lambda state: step(state=state, x=X),
        lambda state: step(state, X, 0.5),
        lambda state: step(x=X, rate=0.5, state=state),
    )
    state = {"w": jnp.zeros(3)}
    for call in calls:
        state = call(state)
    # Values that are not the graph's own take the slow way to the same graph.
    for call in calls:
        state = call({"w": np.asarray(state["w"])})
    assert state["w"].tolist() == [0.0, 4.0, 8.0]
    assert step.cache_info().captures == 1


def test_a_donated_default_is_not_used_up():
    start = jnp.zeros(3)
    captured = tg.capture(lambda x, state=start: state + x, donate_argnames="state")
    captured(X, jnp.ones(3))
    assert captured(X).tolist() == captured(X).tolist() == [0.0, 1.0, 2.0]
    assert not start.is_deleted()


def test_positional_only_and_variadic_parameters():
    def gather(a, /, b, *rest, c=1.0, **others):
        return a + b + sum(rest) + c + sum(others.values())

    captured = tg.capture(gather, verify=False)
    assert float(captured(1.0, 2.0)) == float(captured(1.0, b=2.0)) == 4.0
    assert float(captured(1.0, b=2.0, c=1.0)) == 4.0
    assert captured.cache_info().captures == 1
    assert float(captured(1.0, 2.0, d=5.0)) == float(captured(1.0, d=5.0, b=2.0)) == 9.0
    assert float(captured(1.0, 2.0, 3.0, d=4.0)) == 11.0
    assert float(captured(1.0, 2.0, 3.0, 4.0)) == 11.0
    assert captured.cache_info().captures == 4


def test_defaults_between_given_arguments():
    captured = tg.capture(lambda x, y=2.0, z=3.0: x * y + z, verify=False)
    assert captured(X, z=3.0).tolist() == captured(X).tolist() == captured(X, 2.0, 3.0).tolist()
    assert captured(z=3.0, x=X).tolist() == [3.0, 5.0, 7.0]
    assert captured.cache_info().captures == 1


@pytest.mark.parametrize("default", [(1.0, 2.0), None, "sum", -0.0])
def test_defaults_of_any_kind(default):
    captured = tg.capture(lambda x, y=default: x + 1, verify=False)
    captured(X)
    captured(X, default)
    captured(X, y=default)
    assert captured.cache_info().captures == 1
    captured(X, y=0.0)
    assert captured.cache_info().captures == 2


def test_a_default_array_is_the_default_by_identity_only():
    captured = tg.capture(lambda x, y=X: x + y, verify=False)
    captured(X)
    captured(X, X)
    assert captured.cache_info().captures == 1
    captured(X, X + 0)
    assert captured.cache_info().captures == 2


def test_a_default_that_is_no_argument_of_a_graph():
    captured = tg.capture(lambda x, y={1}: x + (y if isinstance(y, jax.Array) else 1), verify=False)
    captured(X, 2.0)
    assert captured(X).tolist() == [1.0, 2.0, 3.0]


def test_wrapped_functions_keep_the_spelling():
    """A wrapper may treat keywords in its own way, as `jax.vmap` does."""

    def add(x, y):
        return x + y

    @functools.wraps(add)
    def wrapper(*args, **kwargs):
        return add(*args, **{name: 10 * value for name, value in kwargs.items()})

    captured = tg.capture(wrapper)
    for _ in range(2):
        assert captured(X, X).tolist() == [0.0, 2.0, 4.0]
        assert captured(X, y=X).tolist() == [0.0, 11.0, 22.0]
    assert captured.cache_info().captures == 2


def test_functions_without_a_signature():
    assert tg.capture(jnp.add)(X, X).tolist() == (X + X).tolist()
    bound = tg.capture(functools.partial(scale, y=3.0), verify=False)
    for _ in range(2):
        assert bound(X).tolist() == bound(x=X).tolist() == bound(X, y=3.0).tolist()
    assert bound.cache_info().captures == 1
    largest = tg.capture(max, static_argnames="key", verify=False)
    with pytest.raises(tg.CaptureError, match="decides in Python"):
        largest(1.0, 2.0)


def test_methods():
    class Model:
        @functools.partial(tg.capture, static_argnums=0)
        def apply(self, x, scale=1.0):
            return x * scale

    model = Model()
    assert model.apply(X).tolist() == model.apply(x=X, scale=1.0).tolist() == X.tolist()
    assert Model.apply.cache_info().captures == 1
    # A call that is missing or doubling an argument is refused as ever.
    with pytest.raises(tg.CaptureError, match="wrong arguments"):
        model.apply(X, x=X)  # pyright: ignore[reportCallIssue]
    with pytest.raises(tg.CaptureError, match="wrong arguments"):
        model.apply(scale=1.0)  # pyright: ignore[reportCallIssue]


def test_explain_finds_the_graph_of_another_spelling():
    captured = tg.capture(scale)
    captured(X)
    assert captured.explain(X, y=2.0).startswith("`scale` is captured")
    assert captured.cache_info() == (0, 1, 64, 1)


def test_a_graph_takes_all_spellings():
    graph = tg.capture(scale).lower(X).instantiate()
    for call in SPELLINGS:
        assert call(graph).tolist() == [0.0, 2.0, 4.0]
    with pytest.raises(tg.ReplayError, match="y: wanted nothing, got f32"):
        graph(X, 3.0)
