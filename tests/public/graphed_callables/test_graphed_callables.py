"""`tg.make_graphed_callables`, on the host device and on a CudaDevice over host memory.

The names of cases (G17...) are those of PyTorch's own tests of graphs. The twin of a graphed
callable is `jax.jit` of the same function in the same eager code: the programs are the same.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.raw_graphs import use_device
from tracegraph.runtime.cuda.jax_order import JaxOrder

BATCH, IN, HIDDEN, OUT = 4, 5, 6, 3
Weights = dict[str, jax.Array]


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


def make_weights(seed: int, rows: int, columns: int) -> Weights:
    w, b = jax.random.split(jax.random.key(seed))
    scale = 1 / np.sqrt(rows)
    return {
        "w": jax.random.normal(w, (rows, columns)) * scale,
        "b": jax.random.normal(b, (columns,)),
    }


def make_input(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(100 + seed), shape)


def layer(weights: Weights, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weights["w"] + weights["b"])


def dropout(x: jax.Array, key: jax.Array, rate: float = 0.2) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_close(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), one, other)


def make_layer() -> tuple[Any, Weights, jax.Array]:
    weights, x = make_weights(0, IN, HIDDEN), make_input(0, BATCH, IN)
    return tg.make_graphed_callables(layer, (weights, x)), weights, x


def square_loss(function: Callable[..., Any], *args: Any) -> jax.Array:
    return jnp.sum(function(*args) ** 2)


def measure_grads(function: Callable[..., Any], *args: Any, argnums: Any = 0) -> Any:
    return jax.value_and_grad(functools.partial(square_loss, function), argnums)(*args)


def count_fresh(graphed: Any) -> int:
    """Returns how many residuals the forward graph itself writes."""
    (pair,) = graphed._graphs._pairs.values()
    return sum(kind == 2 for kind, _ in pair.pullback.sources)


def test_a_pullback_may_be_called_twice_while_the_device_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(JaxOrder, "is_idle", lambda _order: False)
    weights, x = make_weights(0, IN, HIDDEN), make_input(0, BATCH, IN)
    graphed = tg.make_graphed_callables(layer, (weights, x))
    y, pull = jax.vjp(graphed, weights, x)
    assert_same(pull(y), pull(y))


def test_g17_checkpointing_keeps_its_policy_and_its_random_numbers():
    policies = jax.checkpoint_policies

    def body(weights: Weights, x: jax.Array, key: jax.Array) -> jax.Array:
        return layer(weights, dropout(layer(weights, x), key))

    weights, x = make_weights(0, IN, IN), make_input(0, BATCH, IN)
    key = jax.random.key(42)
    kept = {}
    for name in ("nothing_saveable", "everything_saveable"):
        function = jax.checkpoint(body, policy=getattr(policies, name))
        graphed = tg.make_graphed_callables(function, (weights, x, key))
        kept[name] = count_fresh(graphed)
        found = measure_grads(graphed, weights, x, key)
        assert_close(found, measure_grads(jax.jit(body), weights, x, key))
    assert kept["nothing_saveable"] < kept["everything_saveable"]


def test_g19_g20_a_key_that_is_passed_gives_the_bits_of_eager_calls():
    x = jnp.ones((8, 16))
    graphed = tg.make_graphed_callables(dropout, (x, jax.random.key(0)))
    eager = jax.jit(dropout)
    for seed in (6, 128, 9999):
        key = jax.random.key(seed)
        assert_same(graphed(x, key), eager(x, key))
        assert_same(measure_grads(graphed, x, key), measure_grads(eager, x, key))
    assert not np.array_equal(graphed(x, jax.random.key(6)), graphed(x, jax.random.key(7)))


def test_g22_all_memory_goes_with_the_last_name_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        graphed, weights, x = make_layer()
        measure_grads(graphed, weights, x)
        measure_grads(graphed, weights, x, argnums=(0, 1))
        (pair, *_) = graphed._graphs._pairs.values()
        held = [weakref.ref(each) for each in (pair, pair.forward.find(), pair.backward.find())]
        del graphed, pair
        assert [each() for each in held] == [None, None, None]
    finally:
        gc.enable()


def test_g22_a_pullback_keeps_what_it_needs():
    graphed, weights, x = make_layer()
    y, pull = jax.vjp(graphed, weights, x)
    _, expected = jax.vjp(jax.jit(layer), weights, x)
    del graphed
    assert_same(pull(y), expected(y))
    assert_same(pull(y), expected(y))


def test_g23_two_threads_make_and_use_graphs_at_once():
    x = make_input(0, BATCH, IN)
    barrier = threading.Barrier(2)
    found: dict[int, Any] = {}

    def work(seed: int) -> None:
        weights = make_weights(seed, IN, HIDDEN)
        barrier.wait(60)
        graphed = tg.make_graphed_callables(layer, (weights, x))
        found[seed] = [measure_grads(graphed, weights, x) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        expected = measure_grads(jax.jit(layer), make_weights(seed, IN, HIDDEN), x)
        for each in found[seed]:
            assert_same(each, expected)


def test_g24_after_a_failed_capture_the_next_one_works():
    def reads(x: jax.Array) -> jax.Array:
        return x * float(x.sum())

    with pytest.raises(tg.CaptureError, match="`reads`"):
        tg.make_graphed_callables(reads, (jnp.ones(3),))
    graphed, weights, x = make_layer()
    assert_same(measure_grads(graphed, weights, x), measure_grads(jax.jit(layer), weights, x))


def make_five() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns five callables in their order of use, and their samples."""

    def first(weights: Weights, inputs: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        return dropout(inputs["x"] @ weights["w"] + weights["b"], key)

    def split(h: jax.Array) -> dict[str, jax.Array]:
        return {"h": h, "unused": h * 2}

    def second(weights: Weights, h: jax.Array, key: jax.Array) -> jax.Array:
        return dropout(h @ weights["w"] + weights["b"], key, rate=0.1)

    def loss(y: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.mean((y - target) ** 2)

    key, h, y = jax.random.key(0), jnp.ones((BATCH, HIDDEN)), jnp.ones((BATCH, OUT))
    samples = (
        (make_weights(0, IN, HIDDEN), {"x": make_input(0, BATCH, IN)}, key),
        (h,),
        (h,),
        (make_weights(1, HIDDEN, OUT), h, key),
        (y, make_input(1, BATCH, OUT)),
    )
    return (first, split, jax.nn.relu, second, loss), samples


def train(functions: tuple[Any, ...], steps: int) -> list[Any]:
    first, split, relu, second, loss = functions
    parameters = [make_weights(0, IN, HIDDEN), make_weights(1, HIDDEN, OUT)]

    def compute(parameters: Any, x: Any, target: Any, key: Any) -> Any:
        h = split(first(parameters[0], {"x": x}, key))["h"]
        return loss(second(parameters[1], relu(h), key), target)

    history = []
    for step in range(steps):
        x, target = make_input(step, BATCH, IN), make_input(50 + step, BATCH, OUT)
        key = jax.random.key(step)
        value, gradients = jax.value_and_grad(compute)(parameters, x, target, key)
        parameters = jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)
        history.append((value, parameters))
    return history


def test_g26_five_callables_ten_steps_of_sgd():
    functions, samples = make_five()
    graphed = tg.make_graphed_callables(functions, samples, num_warmup_iters=2)
    assert isinstance(graphed, tuple)
    assert len({each.pool() for each in graphed}) == 1
    assert_same(train(graphed, 10), train(tuple(map(jax.jit, functions)), 10))


def test_g26_forwards_are_captured_in_order_then_backwards_in_reverse(monkeypatch):
    captured: list[str] = []
    from tracegraph.graphed_callables import graph_pair

    capture = graph_pair.Recipe.capture

    def watch(self: Any, prepared: Any) -> Any:
        captured.append(prepared.options.name)
        return capture(self, prepared)

    monkeypatch.setattr(graph_pair.Recipe, "capture", watch)
    functions, samples = make_five()
    tg.make_graphed_callables(functions[2:], samples[2:])
    names = ["relu", "second", "loss"]
    assert captured == names + [f"{name}.backward" for name in reversed(names)]


def test_g26_an_unused_input_is_an_error_with_its_path():
    def half(weights: Weights, x: jax.Array) -> jax.Array:
        return x @ weights["w"]

    sample = (make_weights(0, IN, HIDDEN), make_input(0, BATCH, IN))
    with pytest.raises(tg.CaptureError) as caught:
        tg.make_graphed_callables(half, sample)
    assert "no result of `half` depends on `weights['b']`" in str(caught.value)
    assert "allow_unused_input=True" in caught.value.fix
    graphed = tg.make_graphed_callables(half, sample, allow_unused_input=True)
    assert_same(measure_grads(graphed, *sample), measure_grads(jax.jit(half), *sample))


def test_g26_training_and_evaluation_variants():
    def apply(weights: Weights, x: jax.Array, key: Any = None, *, is_training: bool) -> jax.Array:
        h = layer(weights, x)
        return dropout(h, key) if is_training else h

    weights, x, key = make_weights(0, IN, HIDDEN), make_input(0, BATCH, IN), jax.random.key(3)
    trained = functools.partial(apply, is_training=True)
    evaluated = functools.partial(apply, is_training=False)
    train_step, evaluate = tg.make_graphed_callables(
        (trained, evaluated), ((weights, x), (weights, x)), ({"key": key}, {})
    )
    expected = measure_grads(jax.jit(trained), weights, x, key)
    assert_same(measure_grads(train_step, weights, x, key), expected)
    assert_same(evaluate(weights, x), jax.jit(evaluated)(weights, x))


def test_g27_without_parameters_and_without_gradients():
    def gather(indices: jax.Array) -> jax.Array:
        return jnp.arange(10)[indices]

    graphed = tg.make_graphed_callables(gather, (jnp.array([1, 2]),))
    assert_same(graphed(jnp.array([3, 4])), jnp.array([3, 4]))
    relu = tg.make_graphed_callables(jax.nn.relu, (jnp.zeros(4),))
    x = make_input(0, 4)
    assert_same(measure_grads(relu, x), measure_grads(jax.jit(jax.nn.relu), x))


def test_g28_graphed_one_by_one_into_one_pool():
    handle = tg.graph_pool_handle()
    x = make_input(0, BATCH, IN)
    samples = [(make_weights(seed, IN, HIDDEN), x) for seed in range(3)]
    graphed = [tg.make_graphed_callables(layer, sample, pool=handle) for sample in samples]
    assert {each.pool() for each in graphed} == {handle}
    found = [measure_grads(each, *s) for each, s in zip(graphed, samples, strict=True)]
    expected = [measure_grads(jax.jit(layer), *sample) for sample in samples]
    assert_same(found, expected)


def test_g29_made_where_jax_computes_at_compile_time_and_used_outside():
    with jax.ensure_compile_time_eval():
        graphed, weights, x = make_layer()
    assert_same(measure_grads(graphed, weights, x), measure_grads(jax.jit(layer), weights, x))


@pytest.mark.parametrize("name", ["adam", "sgd", "rmsprop"])
def test_g30_optimizers_of_optax(name):
    optax = pytest.importorskip("optax")
    x = make_input(0, BATCH, IN)

    def run(function: Any) -> list[Any]:
        parameters = make_weights(0, IN, HIDDEN)
        optimizer = getattr(optax, name)(0.01)
        state, history = optimizer.init(parameters), []
        for _ in range(5):
            loss, gradients = measure_grads(function, parameters, x)
            updates, state = optimizer.update(gradients, state, parameters)
            parameters = optax.apply_updates(parameters, updates)
            history.append((loss, parameters))
        return history

    graphed, _, _ = make_layer()
    assert_same(run(graphed), run(jax.jit(layer)))


def test_g33_a_loss_scale_that_changes_between_replays():
    graphed, weights, x = make_layer()

    def scaled(function: Any, weights: Weights, scale: float) -> Any:
        return jnp.sum(function(weights, x) ** 2) * scale

    for scale in (128.0, 64.0, float("inf")):
        found = jax.grad(scaled, argnums=1)(graphed, weights, scale)
        assert_same(found, jax.grad(scaled, argnums=1)(jax.jit(layer), weights, scale))
    assert not np.isfinite(found["w"]).all()
