"""`tg.capture` from outside: programs equal `jax.jit` bit for bit, and nothing is done twice."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tracegraph.capturing import capture_cache
from tracegraph.lowering import compile as compile_module
from tracegraph.tracing.trace import trace_count

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -0.5, 0.5)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (g * 2.0,))


@jax.custom_jvp
def cubed(x):
    return x**3


cubed.defjvp(lambda primals, tangents: (cubed(*primals), 5.0 * tangents[0]))


def nested_jit(x):
    inner = jax.jit(lambda y: jnp.sin(y) * 2)
    return inner(x) + jax.jit(inner)(x.T).T


def scanned(x):
    carry, rows = lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(4), x)
    return carry, rows, lax.fori_loop(0, 3, lambda i, c: c * 1.5 + i, carry)


def remat(x):
    layer = jax.checkpoint(lambda y: jnp.tanh(y @ y.T) @ y)
    return jax.grad(lambda y: layer(layer(y)).sum())(x)


def linear_algebra(x):
    square = x @ x.T + 3 * jnp.eye(3)
    return jnp.linalg.cholesky(square), jnp.linalg.inv(square), jnp.linalg.eigh(square)


def random_numbers(x):
    key = jax.random.key(3)
    first, second = jax.random.split(key)
    return jax.random.normal(first, x.shape) + x, jax.random.permutation(second, x), second


def low_precision(x):
    half, small = x.astype(jnp.bfloat16), x.astype(jnp.float8_e4m3fn)
    return half @ half.T, small, (x * 7).astype(jnp.int4), x > 0, x + 1j * x


PROGRAMS: dict[str, Callable[..., Any]] = {
    "nested jit": nested_jit,
    "grad of vmap": jax.grad(lambda x: jax.vmap(lambda row: jnp.dot(row, row) ** 1.5)(x).sum()),
    "vmap of grad": jax.vmap(jax.grad(lambda row: jnp.exp(row).prod())),
    "scan": scanned,
    "grad of scan": jax.grad(lambda x: sum(map(jnp.sum, scanned(x)))),
    "custom vjp": jax.value_and_grad(lambda x: clipped(x).sum()),
    "custom jvp": lambda x: jax.jvp(cubed, (x,), (x,)),
    "hessian": jax.hessian(lambda x: (x**3).sum()),
    "remat": remat,
    "linear algebra": linear_algebra,
    "random numbers": random_numbers,
    "low precision": low_precision,
    "sort and gather": lambda x: (jnp.sort(x, axis=1), x[jnp.argsort(x[:, 0])], jnp.roll(x, 1)),
    "convolution": lambda x: lax.conv(x[None, None], jnp.ones((1, 1, 2, 2)), (1, 1), "SAME"),
    "fft": lambda x: jnp.fft.rfft2(x),
    "zero size": lambda x: (x[:0], jnp.zeros((0, 3)).sum(), x[:0] @ x.T),
    "switch on a literal": lambda x: lax.switch(1, [jnp.sin, jnp.cos], x),
    "batched matmul": lambda x: jnp.einsum("ij,kj->ik", x, x, precision="highest"),
    "results that are arguments": lambda x: (x, {"x": x}, x * 1, x),
    "results that are constants": lambda x: (1.5, 2, True, X, np.arange(3), None, ()),
    "one op, twice": lambda x: (jnp.sin(x), jnp.sin(x)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_replays_equal_jit(name):
    function = PROGRAMS[name]
    captured, compiled = tg.capture(function), jax.jit(function)
    for x in (X, X * 3.5 + 1, X):
        assert_same(captured(x), compiled(x))
    assert captured.cache_info() == (2, 1, 64, 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_replays_in_checking_mode_equal_jit(name, monkeypatch):
    monkeypatch.setenv("TRACEGRAPH_CHECK_REPLAY", "1")
    captured = tg.capture(PROGRAMS[name], verify=False)
    for x in (X, X * 3.5 + 1):
        assert_same(captured(x), jax.jit(PROGRAMS[name])(x))


def test_a_hit_does_not_trace():
    calls = []

    @tg.capture
    def double(x):
        calls.append(x.shape)
        return x * 2

    double(X)
    traces, count = len(calls), trace_count()
    for scale in range(5):
        double(X * scale)
    double(np.asarray(X))
    assert (len(calls), trace_count()) == (traces, count)
    assert double.cache_info() == (6, 1, 64, 1)


def test_each_signature_is_captured_once():
    double = tg.capture(lambda x: x * 2)
    arguments = [X, X[0], X.astype(jnp.float16), 2.0, 2, True, 2j, {"a": X}, [X], (X,), None]
    for _ in range(2):
        for value in arguments[:-1]:
            if isinstance(value, dict | list | tuple):
                continue
            assert_same(double(value), jax.jit(lambda x: x * 2)(value))
    assert double.cache_info() == (7, 7, 64, 7)
    assert double.cache_info().captures == 7


def test_the_least_recently_used_signature_is_dropped(monkeypatch):
    monkeypatch.setattr(capture_cache, "MAX_SIGNATURES", 2)
    double = tg.capture(lambda x: x * 2, verify=False)
    for size in (1, 2, 1, 3):
        double(jnp.ones(size))
    assert double.cache_info() == (1, 3, 2, 2)
    double(jnp.ones(1))
    assert double.cache_info() == (2, 3, 2, 2)
    double(jnp.ones(2))
    assert double.cache_info() == (2, 4, 2, 2)


def test_reset_captures_anew_and_keeps_the_counts():
    double = tg.capture(lambda x: x * 2)
    first = double(X)
    double(X)
    double.reset()
    assert double.cache_info() == (1, 1, 64, 0)
    assert_same(first, X * 2)
    assert_same(double(X), X * 2)
    assert double.cache_info() == (1, 2, 64, 1)


@pytest.fixture
def wrong_calls(monkeypatch):
    """Each result of a region is written where another one belongs."""
    make_call = compile_module.make_call

    def exchange(*given, **options):
        call = make_call(*given, **options)
        return dataclasses.replace(call, writes=call.writes[::-1])

    with monkeypatch.context() as patch:
        patch.setattr(compile_module, "make_call", exchange)
        yield patch


def test_verification_catches_a_wrong_graph(wrong_calls):
    def step(s, x):
        return {"w": s["w"] * x}, x + s["w"]

    function = tg.capture(step, donate_argnums=0)
    state = {"w": jnp.ones(2)}
    with pytest.raises(tg.VerificationError) as caught:
        function(state, 3.0)
    what = "the replay of `step` differs from XLA's executable in 1 of 2 results"
    assert caught.value.what == what
    assert caught.value.where == "result[0]['w'] (relative difference 3.3e-01)"
    assert "must not be used" in caught.value.why
    assert "report this text" in caught.value.fix
    assert function.cache_info() == (0, 0, 64, 0)
    wrong_calls.undo()
    assert_same(function(state, 3.0), ({"w": jnp.ones(2) * 3}, jnp.ones(2) * 4))


def test_without_verification_a_wrong_graph_is_used(wrong_calls):
    captured = tg.capture(lambda x: (x * 2, x + 1), verify=False)
    assert [float(each) for each in captured(5.0)] == [6.0, 10.0]


def test_without_arguments_the_graph_is_a_constant():
    table = tg.capture(lambda: {"squares": jnp.arange(4) ** 2, "one": 1})
    assert_same(table(), jax.jit(lambda: {"squares": jnp.arange(4) ** 2, "one": 1})())
    assert_same(table(), table())


def test_results_fed_back_many_times():
    function = tg.capture(lambda x: x * 0.5 + 1)
    compiled = jax.jit(lambda x: x * 0.5 + 1)
    value, wanted = X, X
    for _ in range(30):
        value, wanted = function(value), compiled(wanted)
    assert_same(value, wanted)


def test_lowered_capture_is_instantiated_from_types_alone():
    dot = tg.capture(lambda a, b: {"dot": a @ b})
    types = jax.eval_shape(lambda: (X, X.T))
    lowered = dot.lower(*types)
    assert dot.cache_info().captures == 0
    assert lowered.pool_bytes > 0
    graph = lowered.instantiate()
    assert_same(graph(X, X.T), jax.jit(lambda a, b: {"dot": a @ b})(X, X.T))
    assert "graph definition" in str(lowered)


def test_methods_and_partials_and_callable_objects():
    class Model:
        scale = 3.0

        @functools.partial(tg.capture, static_argnums=0)
        def apply(self, x):
            return x * self.scale

        def __call__(self, x):
            return x - self.scale

    model = Model()
    assert_same(model.apply(X), X * 3.0)
    assert Model.apply.cache_info().captures == 1
    assert_same(tg.capture(model)(X), X - 3.0)
    assert_same(tg.capture(functools.partial(jnp.add, 2.0))(X), X + 2.0)


def test_the_captured_function_keeps_its_name_and_doc():
    @tg.capture
    def step(x):
        """Doubles."""
        return x * 2

    assert (step.__name__, step.__doc__) == ("step", "Doubles.")
    assert step.__wrapped__(3) == 6
    assert repr(step) == "<GraphedFunction step, 0 signatures>"
