"""Graphed callables under JAX's transformations, with mutable arguments, and their errors."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.public.graphed_callables.test_graphed_callables import (
    BATCH,
    HIDDEN,
    IN,
    assert_close,
    assert_same,
    layer,
    make_input,
    make_layer,
    make_weights,
    measure_grads,
    square_loss,
)
from tests.raw_graphs import use_device
from tracegraph.graphed_callables.primitives import graphed_call
from tracegraph.jax_internals import _private


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


def count_calls(graphed: Any) -> int:
    """Returns how often the graphs of a callable were called, backward graphs included."""
    graphs = graphed._graphs
    pairs = [each for pair in graphs._pairs.values() for each in (pair.forward, pair.backward)]
    return sum(each.find().calls for each in (*graphs._plain.values(), *pairs) if each is not None)


TRANSFORMS = {
    "jit": lambda f, w, x: jax.jit(f)(w, x),
    "jit of grad": lambda f, w, x: jax.jit(jax.grad(functools.partial(square_loss, f)))(w, x),
    "vmap": lambda f, w, x: jax.vmap(f, (None, 0))(w, x[None]),
    "grad of vmap": lambda f, w, x: jax.grad(
        lambda w: square_loss(jax.vmap(f, (None, 0)), w, x[None])
    )(w),
    "vmap of grad": lambda f, w, x: jax.vmap(
        jax.grad(functools.partial(square_loss, f), 1), (None, 0)
    )(w, x[None]),
    "jvp": lambda f, w, x: jax.jvp(functools.partial(f, w), (x,), (x,)),
    "linearize": lambda f, w, x: jax.linearize(functools.partial(f, w), x)[1](x),
    "jacfwd": lambda f, w, x: jax.jacfwd(f, 1)(w, x),
    "hessian": lambda f, w, x: jax.hessian(lambda w: square_loss(f, w, x))(w),
    "jacrev of jacrev": lambda f, w, x: jax.jacrev(jax.jacrev(lambda w: square_loss(f, w, x)))(w),
    "grad of jvp": lambda f, w, x: jax.grad(
        lambda x: jax.jvp(lambda x: square_loss(f, w, x), (x,), (x,))[1]
    )(x),
    "grad of grad": lambda f, w, x: jax.grad(
        lambda x: jnp.sum(jax.grad(lambda x: square_loss(f, w, x))(x) ** 2)
    )(x),
    "checkpoint": lambda f, w, x: jax.grad(lambda w: square_loss(jax.checkpoint(f), w, x))(w),
    "scan": lambda f, w, x: jax.lax.scan(lambda c, _: (c + f(w, x).sum(), None), 0.0, None, 3)[0],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_elsewhere_the_original_function_is_traced(name):
    graphed, weights, x = make_layer()
    before = count_calls(graphed)
    found = TRANSFORMS[name](graphed, weights, x)
    assert count_calls(graphed) == before
    assert_close(found, TRANSFORMS[name](layer, weights, x))


def test_eager_gradients_are_replays():
    graphed, weights, x = make_layer()
    before, count = count_calls(graphed), graphed._graphs.count_graphs()
    measure_grads(graphed, weights, x, argnums=(0, 1))
    assert count_calls(graphed) == before + 2
    assert graphed._graphs.count_graphs() == count, "nothing is captured after the samples"
    graphed(weights, x)
    assert count_calls(graphed) == before + 3
    check_grads(graphed, (weights, x), order=1, modes=["rev"], rtol=1e-2, atol=1e-2)


def test_gradients_of_some_arguments_only():
    graphed, weights, x = make_layer()
    eager = jax.jit(layer)
    for argnums in (0, 1, (1, 0)):
        found = measure_grads(graphed, weights, x, argnums=argnums)
        assert_same(found, measure_grads(eager, weights, x, argnums=argnums))
    found = jax.grad(lambda w: square_loss(graphed, {**weights, "w": w}, x))(weights["w"])
    assert_same(found, measure_grads(eager, weights, x)[1]["w"])


def test_jacrev_maps_over_the_backward_function():
    graphed, weights, x = make_layer()
    assert_close(jax.jacrev(graphed, (0, 1))(weights, x), jax.jacrev(layer, (0, 1))(weights, x))


def test_a_pullback_under_jit_and_vmap():
    graphed, weights, x = make_layer()
    y, pull = jax.vjp(graphed, weights, x)
    _, expected = jax.vjp(layer, weights, x)
    assert_close(jax.jit(pull)(y), expected(y))
    assert_close(jax.vmap(pull)(y[None]), jax.vmap(expected)(y[None]))


def test_gradients_are_fresh():
    graphed, weights, x = make_layer()
    other = make_input(1, BATCH, IN)
    first = measure_grads(graphed, weights, x)[1]
    kept = jax.tree.map(np.array, first)
    second = measure_grads(graphed, weights, other)[1]
    assert_same(first, kept)
    accumulated = jax.tree.map(jnp.add, first, second)
    eager = jax.jit(layer)
    parts = [measure_grads(eager, weights, each)[1] for each in (x, other)]
    assert_same(accumulated, jax.tree.map(jnp.add, *parts))


def test_a_second_forward_before_the_first_backward():
    graphed, weights, x = make_layer()
    eager, other = jax.jit(layer), make_input(1, BATCH, IN)
    pulls = [jax.vjp(graphed, weights, each) for each in (x, other)]
    expected = [jax.vjp(eager, weights, each) for each in (x, other)]
    for (y, pull), (z, twin) in zip(pulls, expected, strict=True):
        assert_same(y, z)
        assert_same(pull(y), twin(z))


def test_a_callable_that_is_used_twice_in_one_loss():
    weights, x = make_weights(0, IN, IN), make_input(0, BATCH, IN)
    graphed = tg.make_graphed_callables(layer, (weights, x))

    def twice(function: Any, weights: Any) -> Any:
        return jnp.sum(function(weights, function(weights, x)))

    found = jax.grad(twice, argnums=1)(graphed, weights)
    assert_same(found, jax.grad(twice, argnums=1)(jax.jit(layer), weights))


def test_a_branch_on_a_value_between_two_graphs():
    weights, x = make_weights(0, IN, IN) | {"b": jnp.zeros(IN)}, make_input(0, BATCH, IN)
    graphed = tg.make_graphed_callables((layer, jnp.sin, jnp.cos), ((weights, x), (x,), (x,)))

    def loss(functions: Any, weights: Any, x: Any) -> Any:
        first, second, third = functions
        h = first(weights, x)
        return jnp.sum((second if h.sum() > 0 else third)(h))

    eager = (jax.jit(layer), jax.jit(jnp.sin), jax.jit(jnp.cos))
    signs = set()
    for value in (x, -x, x * 2):
        signs.add(float(layer(weights, value).sum()) > 0)
        found = jax.value_and_grad(loss, argnums=1)(graphed, weights, value)
        assert_same(found, jax.value_and_grad(loss, argnums=1)(eager, weights, value))
    assert signs == {True, False}


def test_a_numpy_argument_that_changes_before_the_backward():
    graphed, weights, x = make_layer()
    expected = jax.vjp(jax.jit(layer), weights, x)[1](jnp.ones((BATCH, HIDDEN)))[0]
    mutable = np.array(x)
    _, pull = jax.vjp(lambda w: graphed(w, mutable), weights)
    mutable[:] = 0
    assert_same(pull(jnp.ones((BATCH, HIDDEN)))[0], expected)


def test_integer_inputs_and_results_need_no_gradient():
    def pick(table: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = table[indices]
        return rows * 2, jnp.argmax(rows, axis=1)

    table, indices = make_input(0, 6, 3), jnp.array([1, 4])
    graphed = tg.make_graphed_callables(pick, (table, indices))

    def loss(function: Any, table: Any, indices: Any) -> Any:
        rows, best = function(table, indices)
        return jnp.sum(rows * best[:, None])

    for function in (graphed, jax.jit(pick)):
        found = jax.grad(functools.partial(loss, function), (0, 1), allow_int=True)(table, indices)
        assert found[1].dtype == jax.dtypes.float0
        assert_same(found[0], jax.grad(functools.partial(loss, jax.jit(pick)))(table, indices))
        with pytest.raises(TypeError, match="real- or complex-valued inputs"):
            jax.grad(functools.partial(loss, function), 1)(table, indices)


def test_keywords_positions_and_trees():
    def mix(x: jax.Array, *, pair: tuple[jax.Array, Any], mode: str) -> dict[str, Any]:
        return {"y": [x * pair[0]], "mode": getattr(jnp, mode)(x)}

    x, pair = jnp.arange(3.0), (jnp.ones(3), {"n": None})
    graphed = tg.make_graphed_callables(mix, (x,), {"pair": pair, "mode": "sin"})
    expected = mix(x, pair=pair, mode="sin")
    assert_close(graphed(x, pair=pair, mode="sin"), expected)
    assert_close(graphed(mode="sin", x=x, pair=pair), expected)
    with pytest.raises(tg.ReplayError, match="wanted 'sin', got 'cos'"):
        graphed(x, pair=pair, mode="cos")


def test_other_settings_of_jax_have_graphs_of_their_own():
    graphed, weights, x = make_layer()
    count = graphed._graphs.count_graphs()
    with jax.default_matmul_precision("highest"):
        found = measure_grads(graphed, weights, x, argnums=(0, 1))
    assert graphed._graphs.count_graphs() == count + 2
    assert_close(found, measure_grads(layer, weights, x, argnums=(0, 1)))


def test_without_jit_the_function_runs_op_by_op():
    graphed, weights, x = make_layer()
    before = count_calls(graphed)
    with jax.disable_jit():
        found = measure_grads(graphed, weights, x)
    assert count_calls(graphed) == before
    assert_close(found, measure_grads(layer, weights, x))


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_other_shapes_are_an_error_that_shows_both(is_differentiated):
    graphed, weights, x = make_layer()
    call = functools.partial(measure_grads, graphed) if is_differentiated else graphed
    with pytest.raises(tg.ReplayError) as caught:
        call(weights, x[:2])
    assert "x: wanted f32[4,5], got f32[2,5]" in caught.value.where
    assert "make another graphed callable" in caught.value.fix
    with pytest.raises(tg.ReplayError, match=r"weights\['c'\]: wanted nothing, got f32\[\]"):
        call({**weights, "c": jnp.float32(0)}, x)
    assert_same(measure_grads(graphed, weights, x), measure_grads(jax.jit(layer), weights, x))


def test_reset_drops_the_graphs_and_the_next_call_captures_again():
    graphed, weights, x = make_layer()
    _, pull = jax.vjp(graphed, weights, x)
    graphed.reset()
    assert graphed._graphs.count_graphs() == 0
    expected = measure_grads(jax.jit(layer), weights, x)
    assert_same(measure_grads(graphed, weights, x), expected)
    pull(jnp.ones((BATCH, HIDDEN)))
    with pytest.raises(tg.ReplayError, match="another signature"):
        graphed(weights, x[:2])


X = jnp.zeros(2)
WRONG = {
    "no callable": ((3, (X,)), {}, "callable 0 is int"),
    "no tuple": ((jnp.sin, X), {}, "sample_args of callable 0 is"),
    "a type": ((jnp.sin, (jax.eval_shape(jnp.sin, X),)), {}, "has a jax.ShapeDtypeStruct"),
    "too few samples": (
        ((jnp.sin, jnp.cos), ((X,),)),
        {},
        "2 callables are given, and sample_args",
    ),
    "keywords": ((jnp.sin, (X,), [1]), {}, "sample_kwargs of callable 0 is list"),
    "warm-ups": ((jnp.sin, (X,)), {"num_warmup_iters": -1}, "num_warmup_iters=-1 is not a count"),
    "pool": ((jnp.sin, (X,)), {"pool": "mine"}, "pool= is str, not a pool"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_at_the_door(name):
    args, options, message = WRONG[name]
    with pytest.raises(tg.ConfigError) as caught:
        tg.make_graphed_callables(*args, **options)
    assert message in caught.value.what
    assert "graphed_callables/test_transforms.py" in caught.value.where


def test_with_and_without_a_rule_of_its_own_jax_linearizes_alike(monkeypatch):
    x, count = jnp.arange(3.0), jnp.arange(3)
    graphed = tg.make_graphed_callables(lambda x, n: (x * x, n + 1), (x, count))

    def pull() -> Any:
        _, pull = jax.vjp(graphed, x, count)
        return pull((x, np.zeros(3, jax.dtypes.float0)))

    found = pull()
    assert_same(found, (2 * x * x, np.zeros(3, jax.dtypes.float0)))
    # It is registered with every JAX that is tested.
    monkeypatch.delitem(_private["primitive_linearizations"], graphed_call)
    assert_same(pull(), found)


@pytest.mark.parametrize("place", ["grad", "jit"])
def test_graphed_callables_may_be_made_where_jax_traces_but_not_of_what_it_traces(place):
    def run(make: Any) -> Any:
        def loss(x: jax.Array) -> jax.Array:
            return make(x)(x).sum()

        return jax.grad(loss)(X) if place == "grad" else jax.jit(jax.grad(loss))(X)

    samples = (jnp.ones_like(X),)
    assert_close(run(lambda _: tg.make_graphed_callables(jnp.sin, samples)), jnp.cos(X))
    with pytest.raises(tg.ConfigError, match="callable 0 or its sample is being traced"):
        run(lambda x: tg.make_graphed_callables(jnp.sin, (x,)))


def test_a_wrong_backward_graph_is_found(monkeypatch):
    """A planted fault: the backward graph reads residuals with another sign."""
    from tracegraph.graphed_callables import residuals

    weights, x = make_weights(0, IN, IN), make_input(0, IN, IN)
    join = residuals.Pullback.join_residuals
    monkeypatch.setattr(
        residuals.Pullback, "join_residuals", lambda *args: [-each for each in join(*args)]
    )
    graphed = tg.make_graphed_callables(layer, (weights, x))
    with pytest.raises(AssertionError):
        assert_close(measure_grads(graphed, weights, x), measure_grads(layer, weights, x))
    with pytest.raises(AssertionError):
        check_grads(graphed, (weights, x), order=1, modes=["rev"], rtol=1e-2, atol=1e-2)
