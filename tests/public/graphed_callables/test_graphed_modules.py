"""Graphed modules of equinox, flax.linen and flax.nnx: their parameters are differentiated, too."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.processes import run_program

X = jax.random.normal(jax.random.key(0), (3, 4))


def assert_close(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def sum_squares(module: Any, x: Any) -> Any:
    return jnp.sum(module(x) ** 2)


def count_calls(graphed: Any) -> int:
    pairs = graphed._graphs._pairs.values()
    return sum(each.find().calls for pair in pairs for each in pair.list_graphs())


def test_a_module_of_equinox_is_trained():
    eqx = pytest.importorskip("equinox")
    module = eqx.nn.Sequential(
        [
            eqx.nn.Linear(4, 5, key=jax.random.key(1)),
            eqx.nn.Lambda(jnp.tanh),
            eqx.nn.Linear(5, 2, key=jax.random.key(2)),
        ]
    )
    graphed = tg.make_graphed_callables(module, (X[0],))
    assert isinstance(graphed, tg.GraphedModule)
    calls = count_calls(graphed)
    mine, twin = graphed, module
    for step in range(3):
        found = eqx.filter_value_and_grad(sum_squares)(mine, X[step])
        expected = eqx.filter_value_and_grad(sum_squares)(twin, X[step])
        assert_close(found, expected)
        update = functools.partial(jax.tree.map, lambda g: -0.1 * g)
        mine = eqx.apply_updates(mine, update(found[1]))
        twin = eqx.apply_updates(twin, update(expected[1]))
    assert isinstance(mine, tg.GraphedModule)
    assert count_calls(mine) > calls
    assert_close(eqx.filter(mine.module, eqx.is_array), eqx.filter(twin, eqx.is_array))
    assert_close(mine(X[0]), twin(X[0]))


def test_training_and_evaluation_of_equinox():
    eqx = pytest.importorskip("equinox")
    module = eqx.nn.Dropout(0.5)
    key = jax.random.key(5)
    evaluated = eqx.nn.inference_mode(module)
    trained, plain = tg.make_graphed_callables(
        (module, evaluated), ((X,), (X,)), ({"key": key}, {})
    )
    assert_close(trained(X, key=key), module(X, key=key))
    assert_close(plain(X), X)
    with pytest.raises(tg.ReplayError, match="another signature"):
        eqx.nn.inference_mode(trained)(X, key=key)


def test_a_partial_of_jax_is_a_module():
    scale = jax.tree_util.Partial(jnp.multiply, jnp.float32(3))
    graphed = tg.make_graphed_callables(scale, (X,))
    gradient = jax.grad(sum_squares)(graphed, X)
    assert isinstance(gradient, tg.GraphedModule)
    assert_close(gradient, jax.grad(sum_squares)(scale, X))
    again = copy.deepcopy(graphed)
    assert again._graphs is graphed._graphs
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(graphed)]
    assert paths[0].startswith(".module")


def test_apply_of_linen_in_both_modes():
    nn = pytest.importorskip("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, *, is_training: bool) -> Any:
            x = nn.BatchNorm(use_running_average=not is_training)(nn.Dense(8)(x))
            return nn.Dropout(0.5, deterministic=not is_training)(jnp.tanh(x))

    net = Net()
    variables = net.init(jax.random.key(0), X, is_training=False)
    train = functools.partial(net.apply, is_training=True, mutable=["batch_stats"])
    evaluate = functools.partial(net.apply, is_training=False)
    rngs = {"dropout": jax.random.key(1)}
    graphed_train, graphed_evaluate = tg.make_graphed_callables(
        (train, evaluate),
        ((variables, X), (variables, X)),
        ({"rngs": rngs}, {}),
        allow_unused_input=True,
    )

    def loss(function: Any, parameters: Any) -> Any:
        y, state = function({**variables, "params": parameters}, X, rngs=rngs)
        return jnp.sum(y**2), state

    results = [
        jax.value_and_grad(functools.partial(loss, function), has_aux=True)(variables["params"])
        for function in (graphed_train, jax.jit(train))
    ]
    assert results[0][0][1]["batch_stats"]["BatchNorm_0"]["mean"].shape == (8,)
    assert_close(*results)
    assert_close(graphed_evaluate(variables, X), evaluate(variables, X))


def make_nnx() -> tuple[Any, Any, Any]:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.inner = nnx.Linear(4, 6, rngs=rngs)
            self.norm = nnx.BatchNorm(6, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.outer = nnx.Linear(6, 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.outer(self.dropout(jnp.tanh(self.norm(self.inner(x)))))

    return nnx, Net(), Net()


def read_state(nnx: Any, module: Any) -> list[Any]:
    leaves = jax.tree.leaves(nnx.state(module))
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [jax.random.key_data(x) if k else x for x, k in zip(leaves, is_key, strict=True)]


@pytest.mark.parametrize("is_argument", [True, False])
def test_a_module_of_nnx_is_updated_as_by_its_own_call(is_argument):
    nnx, module, twin = make_nnx()
    if is_argument:
        graphed = tg.make_graphed_callables(lambda module, x: module(x), (module, X))
    else:
        graphed = tg.make_graphed_callables(module, (X,))
    assert_close(read_state(nnx, module), read_state(nnx, twin))

    def loss(module: Any) -> Any:
        y = graphed(module, X) if is_argument else module(X)
        return jnp.sum(y**2)

    calls = count_calls(graphed)
    for _ in range(3):
        found = nnx.value_and_grad(loss)(module if is_argument else graphed)
        expected = nnx.value_and_grad(lambda module: jnp.sum(module(X) ** 2))(twin)
        assert_close(found, expected)
        assert_close(read_state(nnx, module), read_state(nnx, twin))
    assert count_calls(graphed) > calls
    y = graphed(module, X) if is_argument else graphed(X)
    assert_close(y, twin(X))
    assert_close(read_state(nnx, module), read_state(nnx, twin))
    module.eval()
    with pytest.raises(tg.ReplayError, match="another signature"):
        graphed(module, X) if is_argument else graphed(X)


def test_a_module_of_nnx_that_gets_new_attributes_is_refused():
    nnx, module, _ = make_nnx()

    def grow(module: Any, x: Any) -> Any:
        module.seen = nnx.Variable(x)
        return module(x)

    with pytest.raises(tg.CaptureError, match="attributes are others after the call"):
        tg.make_graphed_callables(grow, (module, X))


def test_flax_and_equinox_are_not_imported():
    run_program(
        "import sys, jax.numpy as jnp, tracegraph as tg\n"
        "tg.make_graphed_callables(jnp.sin, (jnp.zeros(2),))(jnp.ones(2))\n"
        "assert not {'flax', 'equinox', 'optax'} & set(sys.modules)\n"
    )
