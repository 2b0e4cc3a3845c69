"""`tg.amp.autocast`: the same bits as casts written by hand, wherever the region stands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

import tracegraph as tg
from tests.draws import read_words
from tests.tracegraph.mixed_precision.matmuls import list_equations, name_matmuls
from tracegraph.mixed_precision import cast_rules

BF16, F16 = jnp.bfloat16, jnp.float16
NO_BOOL: Any = 0
KEYS = jax.random.split(jax.random.key(0), 2)
W, X = jax.random.normal(KEYS[0], (8, 8)), jax.random.normal(KEYS[1], (4, 8))


def plain(a: Any, b: Any) -> Any:
    return a @ b


def by_hand(a: Any, b: Any) -> Any:
    return (a.astype(BF16) @ b.astype(BF16)).astype(jnp.float32)


def make_loss(matmul: Callable[..., Any]) -> Callable[..., Any]:
    def loss(w: Any, x: Any) -> Any:
        hidden = jnp.tanh(matmul(x, w))
        return jnp.mean(jax.nn.softmax(matmul(hidden, w)) ** 2)

    return loss


LOSS, TWIN = make_loss(plain), make_loss(by_hand)


def assert_same_bits(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def step() -> Any:
    return tg.capture(jax.value_and_grad(tg.amp.autocast(LOSS)))


def test_a_captured_step_equals_casts_by_hand(step: Any) -> None:
    """The gradient's matmuls are of 16 bits too, and it returns in the parameter's dtype."""
    twin = tg.capture(jax.value_and_grad(TWIN))
    assert_same_bits(step(W, X), twin(W, X))
    assert_same_bits(step(X.T @ X, -X), twin(X.T @ X, -X))
    assert step(W, X)[1].dtype == jnp.float32
    assert step.cache_info().misses == 1


def test_the_captured_gradient_is_near_that_in_float32(step: Any) -> None:
    wanted = jax.grad(LOSS)(W, X)
    difference = jnp.abs(step(W, X)[1] - wanted).max()
    # Each of four roundings is at most 2**-8; the planted fault is a loss without the region.
    assert 0 < difference < 4 * 2**-8 * jnp.abs(wanted).max()


def test_a_parameter_is_cast_once_in_the_graph(step: Any) -> None:
    graph = step.trace(W, X).graph
    weight = graph.inputs[0]
    casts = [op for op in graph.ops if op.name == "convert_element_type" and weight in op.operands]
    assert len(casts) == 1, "it is used by four matmuls"


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_region_works_without_capture(transform: Callable[..., Any]) -> None:
    assert_same_bits(transform(tg.amp.autocast(LOSS))(W, X), transform(TWIN)(W, X))
    inside = transform(jax.grad(tg.amp.autocast(LOSS)))
    assert_same_bits(inside(W, X), transform(jax.grad(TWIN))(W, X))


def test_a_region_around_a_derivative_has_the_same_bits_op_by_op() -> None:
    assert_same_bits(tg.amp.autocast(jax.grad(LOSS))(W, X), jax.grad(TWIN)(W, X))


def test_a_block_in_the_function() -> None:
    def loss(w: Any, x: Any) -> Any:
        with tg.amp.autocast(BF16):
            y = jnp.tanh(x @ w)
        return jnp.mean((y @ w) ** 2)

    def twin(w: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(by_hand(x, w)) @ w) ** 2)

    assert_same_bits(jax.grad(loss)(W, X), jax.grad(twin)(W, X))
    captured = tg.capture(jax.grad(loss))
    assert_same_bits(captured(W, X), tg.capture(jax.grad(twin))(W, X))
    assert "bf16" in captured.explain(W, X).ir


def test_regions_in_each_other() -> None:
    def nested(w: Any, x: Any) -> Any:
        a = x @ w
        with tg.amp.autocast(F16):
            b = x @ w
            with tg.amp.autocast(enabled=False):
                c = x @ w
        return a, b, c, x @ w

    wanted = ["bfloat16", "float16", "float32", "bfloat16"]
    region = tg.amp.autocast(BF16)
    assert name_matmuls(region(nested), W, X) == wanted
    assert name_matmuls(region(jax.jit(nested)), W, X) == wanted
    gradient = jax.grad(lambda w, x: sum(y.sum() for y in nested(w, x)))
    both = sorted(name_matmuls(region(gradient), W, X))
    assert both == sorted([*wanted, *wanted]), "forward, and the weight's gradient"


def test_what_is_turned_off_is_not_cast() -> None:
    assert name_matmuls(tg.amp.autocast(enabled=False)(LOSS), W, X) == ["float32"] * 2
    assert name_matmuls(tg.amp.autocast(LOSS, enabled=False), W, X) == ["float32"] * 2


@pytest.mark.parametrize(
    "name", ["scan", "while", "cond", "checkpoint", "jit", "vmap", "shard_map"]
)
def test_what_jax_traces_on_its_own(name: str) -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()

    def apply(w: Any, x: Any) -> Any:
        def body(y: Any) -> Any:
            return jnp.tanh(y @ w)

        cases: dict[str, Callable[[], Any]] = {
            "scan": lambda: lax.scan(lambda c, _: (body(c), None), x, None, 2)[0],
            "while": lambda: lax.while_loop(lambda c: (c @ w)[0, 0] > 9, body, x),
            "cond": lambda: lax.cond(x[0, 0] < 99, body, lambda y: y * 2, x),
            "checkpoint": lambda: jax.checkpoint(body)(x),
            "jit": lambda: jax.jit(body)(x),
            "vmap": lambda: jax.vmap(body)(x),
            "shard_map": lambda: jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(x),
        }
        return cases[name]().sum()

    region = tg.amp.autocast(BF16)
    assert set(name_matmuls(region(apply), W, X)) == {"bfloat16"}
    assert set(name_matmuls(region(jax.jit(apply)), W, X)) == {"bfloat16"}
    if name != "while":
        outside, inside = jax.grad(region(apply)), region(jax.grad(apply))
        assert set(name_matmuls(outside, W, X)) == set(name_matmuls(inside, W, X)) == {"bfloat16"}
        if name != "scan":
            return
        assert np.allclose(jax.jit(outside)(W, X), jax.jit(inside)(W, X), atol=2**-4)


@jax.custom_jvp
def with_own_derivative(a: Any, b: Any) -> Any:
    return a @ b


@with_own_derivative.defjvp
def _differentiate(primals: Any, tangents: Any) -> Any:
    (a, b), (da, db) = primals, tangents
    return a @ b, da @ b + a @ db


@jax.custom_vjp
def with_own_gradient(a: Any, b: Any) -> Any:
    return a @ b


with_own_gradient.defvjp(lambda a, b: (a @ b, (a, b)), lambda r, g: (g @ r[1].T, r[0].T @ g))


@pytest.mark.parametrize("matmul", [with_own_derivative, with_own_gradient])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["-", "jit", "ckpt"])
def test_derivatives_of_a_function_itself_are_cast(matmul: Any, wrap: Any) -> None:
    def loss(w: Any, x: Any) -> Any:
        return wrap(lambda y: matmul(y, w))(x).sum()

    region = tg.amp.autocast(BF16)
    for function in (region(jax.grad(loss)), jax.grad(region(loss))):
        assert set(name_matmuls(function, W, X)) == {"bfloat16"}
        wanted = jnp.broadcast_to(X.astype(BF16).astype(jnp.float32).sum(0)[:, None], W.shape)
        assert np.allclose(jax.jit(function)(W, X), wanted, rtol=2**-6)


def test_convolutions() -> None:
    images, filters = jnp.ones((1, 2, 4, 4)) * 1.001, jnp.ones((2, 2, 3, 3)) * 1.001

    def convolve(i: Any, f: Any) -> Any:
        return lax.conv(i, f, (1, 1), "SAME").sum()

    def twin(i: Any, f: Any) -> Any:
        return lax.conv(i.astype(F16), f.astype(F16), (1, 1), "SAME").astype(jnp.float32).sum()

    gradient = jax.grad(tg.amp.autocast(F16)(convolve), (0, 1))
    assert set(name_matmuls(gradient, images, filters)) == {"float16"}
    assert_same_bits(gradient(images, filters), jax.grad(twin, (0, 1))(images, filters))


def test_an_array_is_cast_once_in_an_eager_block() -> None:
    def count(*, cache_enabled: bool) -> int:
        def run(x: Any) -> Any:
            with tg.amp.autocast(cache_enabled=cache_enabled):
                return x @ W + x @ W

        equations = list_equations(run, X)
        casts = [each for each in equations if each.primitive.name == "convert_element_type"]
        return len([each for each in casts if each.invars[0].aval.shape == W.shape])

    assert count(cache_enabled=True) == 1
    assert count(cache_enabled=False) == 2


def test_a_region_belongs_to_its_thread() -> None:
    seen: list[Any] = []
    with tg.amp.autocast(BF16):
        thread = threading.Thread(target=lambda: seen.append(X @ W))
        thread.start()
        thread.join()
        assert_same_bits(X @ W, by_hand(X, W))
    assert_same_bits(seen, [X @ W])
    assert not np.array_equal(X @ W, by_hand(X, W))


def test_an_error_ends_the_region() -> None:
    wanted = X @ W
    with pytest.raises(ZeroDivisionError), tg.amp.autocast():
        _ = 1 / 0
    assert_same_bits(X @ W, wanted)


def test_one_region_is_entered_again_and_again() -> None:
    region = tg.amp.autocast()
    with region, region:
        assert_same_bits(X @ W, by_hand(X, W))
    with region:
        assert_same_bits(X @ W, by_hand(X, W))
    assert not np.array_equal(X @ W, by_hand(X, W))


def test_sums_of_16_bits_are_added_in_float32() -> None:
    x = jnp.full(4096, 1 / 16, BF16)

    def add(x: Any) -> Any:
        return lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None)

    with tg.amp.autocast():
        assert jnp.exp(x).dtype == add(x).dtype == BF16
    (cast, exp, back) = list_equations(tg.amp.autocast(jnp.exp), x)
    assert exp.invars[0].aval.dtype == exp.outvars[0].aval.dtype == jnp.float32
    assert (cast.params["new_dtype"], back.params["new_dtype"]) == (jnp.float32, BF16)


def test_recorded_blocks() -> None:
    g = tg.CUDAGraph()
    with tg.graph(g), tg.amp.autocast():
        y = X @ W
    g.replay()
    assert_same_bits(y, jax.jit(by_hand)(X, W))
    refused = pytest.raises(tg.CaptureError, match="records or traces something else")
    with refused, tg.amp.autocast(), tg.graph(tg.CUDAGraph()):
        pass


def test_what_is_written_between_two_ops_is_cast_anew() -> None:
    x = tg.static_input(X)
    with tg.amp.autocast():
        first = x @ W
        x.copy_(X * 2)
        second = x @ W
    assert_same_bits([first, second], [by_hand(X, W), by_hand(X * 2, W)])


def test_rules_of_the_user() -> None:
    keep = {"dot_general": "keep"}
    assert name_matmuls(tg.amp.autocast(rules=keep)(LOSS), W, X) == ["float32"] * 2
    wider = {primitives.dot_general_p: F16}
    assert name_matmuls(tg.amp.autocast(rules=wider)(LOSS), W, X) == ["float16"] * 2

    def mixed(w: Any, x: Any) -> Any:
        return lax.dot_general(x, w.astype(BF16), (((1,), (0,)), ((), ())))

    promote = tg.amp.autocast(rules={"dot_general": "promote"})
    assert name_matmuls(promote(mixed), W, X) == ["float32"]
    assert name_matmuls(tg.amp.autocast(mixed), W, X) == ["bfloat16"]
    found = list_equations(tg.amp.autocast(rules={"tanh": BF16})(jnp.tanh), X)
    assert [str(each.outvars[0].aval.dtype) for each in found] == [
        "bfloat16",
        "bfloat16",
        "float32",
    ]


def test_what_says_itself_how_it_computes_is_left() -> None:
    def named(w: Any, x: Any) -> Any:
        return jnp.matmul(x, w, precision="highest")

    assert name_matmuls(tg.amp.autocast(named), W, X) == ["float32"]
    with jax.default_matmul_precision("highest"):
        assert name_matmuls(tg.amp.autocast(plain), X, W) == ["bfloat16"]
    assert name_matmuls(tg.amp.autocast(plain), X.astype(int), W.astype(int)) == ["int32"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tg.amp.autocast(jnp.float32), "dtype="),
        (lambda: tg.amp.autocast(jnp.int8), "dtype="),
        (lambda: tg.amp.autocast("half past"), "dtype="),
        (lambda: tg.amp.autocast(enabled=NO_BOOL), "enabled=0"),
        (lambda: tg.amp.autocast(cache_enabled=NO_BOOL), "cache_enabled=0"),
        (lambda: tg.amp.autocast(rules={"tahn": "keep"}), "tahn"),
        (lambda: tg.amp.autocast(rules={"tanh": "up"}), "up"),
        (lambda: tg.amp.autocast(rules={"tanh": jnp.ones(2)}), "tanh"),
        (lambda: tg.amp.autocast(rules=["tanh"]), "rules="),  # pyright: ignore
        (lambda: tg.amp.autocast(rules={"tanh": jnp.int8}), "int8"),
        (lambda: tg.amp.autocast(rules={"scan": BF16}), "scan"),
        (lambda: tg.amp.autocast()(3), "int"),
        (lambda: tg.amp.autocast().__exit__(None, None, None), "not entered"),
    ],
)
def test_bad_input_is_refused_at_the_door(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(tg.ConfigError, match=words) as caught:
        call()
    assert read_words(caught.value) == ["where", "why", "fix"]
    assert "test_autocast.py" in str(caught.value)


def test_a_dtype_for_an_op_with_a_function_in_it_is_refused() -> None:
    def scatter(x: Any) -> Any:
        return x.at[0].add(1.0)

    with pytest.raises(tg.ConfigError, match="scatter-add"):
        tg.amp.autocast(rules={"scatter-add": BF16})(scatter)(X)


def test_a_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region whose casts are lost computes other bits, which the comparison shows."""
    monkeypatch.setattr(cast_rules, "IN_LOW_TYPE", frozenset())
    with pytest.raises(AssertionError):
        test_a_block_in_the_function()
