"""Functions in blocks of `tg.graph` that close over arrays: what they return, and where."""

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
from tracegraph.recording import kept_traces


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


# From an argument and an array of outside; the latter is closed over, and returned.
INNER: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda z, c: jax.jit(lambda z: (z * c, c))(z),
    "checkpoint": lambda z, c: jax.checkpoint(lambda z: (z * c, c))(z),
    "jit of checkpoint": lambda z, c: jax.jit(jax.checkpoint(lambda z: (z * c, c)))(z),
    "checkpoint of jit": lambda z, c: jax.checkpoint(jax.jit(lambda z: (z * c, c)))(z),
}
OUTER: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "value_and_grad": lambda f, x: jax.value_and_grad(f, has_aux=True)(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,), has_aux=True),
    "vjp": lambda f, x: jax.vjp(f, x)[0],
    "linearize": lambda f, x: jax.linearize(f, x)[0],
    "nested": lambda f, x: jax.value_and_grad(
        lambda y: (f(y)[0], jax.value_and_grad(f, has_aux=True)(y)), has_aux=True
    )(x),
}


def differentiate(inner: str, outer: str, x: Any) -> Any:
    def measure(y: Any) -> Any:
        made, closed_over = INNER[inner](y, x)
        return (made * made).sum(), closed_over

    return OUTER[outer](measure, x + 1)


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
def test_what_is_closed_over_and_returned_follows_the_input(
    inner: str, outer: str, *, is_made: bool
) -> None:
    x = tg.static_input((N,))
    g, result = record(lambda: differentiate(inner, outer, x * 2 if is_made else x))
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(result))
    value = jnp.arange(float(N))
    x.copy_(value)
    g.replay()
    assert_same(result, differentiate(inner, outer, value * 2 if is_made else value))


def make_uses(x: Any) -> dict[str, Callable[[], Any]]:
    one = jnp.ones(N)
    functions = {
        "used": jax.jit(lambda y: y * x),
        "returned": jax.jit(lambda y: (y, x)),
        "checkpoint": jax.checkpoint(lambda y: y * x),
        "read": jax.jit(lambda y: y * x.jax()),
    }
    uses: dict[str, Any] = {
        name: lambda function=function: jax.tree.leaves(function(one))[-1]
        for name, function in functions.items()
    }

    def body(carry: Any, _: Any) -> Any:
        return carry * x, None

    return uses | {
        "scan": lambda: jax.lax.scan(body, one, None, length=1)[0],
        "grad": lambda: jax.grad(lambda y: functions["used"](y).sum())(one),
    }


NAMES = list(make_uses(None))


@pytest.mark.parametrize("name", NAMES)
def test_one_function_follows_an_input_in_two_blocks(name: str) -> None:
    x = tg.static_input((N,))
    use = make_uses(x)[name]
    blocks = [record(use) for _ in range(2)]
    for value in (3, 4):
        x.copy_(fill(value))
        for g, made in blocks:
            g.replay()
            assert_value(made, fill(value))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_called_outside_before_and_after_a_block(name: str) -> None:
    x = tg.static_input((N,))
    use = make_uses(x)[name]
    x.copy_(fill(2))
    before = use()
    g, made = record(use)
    x.copy_(fill(5))
    g.replay()
    assert_value(made, fill(5))
    assert_value(before, fill(2))
    # What JAX has traced outside keeps the value, as ever.
    assert_value(use(), fill(2))


def test_an_array_that_a_block_has_made_is_read_in_the_next_one() -> None:
    x, held = tg.static_input((N,)), []
    use = jax.jit(lambda y: y + held[-1])
    first, _ = record(lambda: held.append(x * 2) or use(jnp.ones(N)))
    second, made = record(lambda: use(jnp.ones(N)))
    x.copy_(fill(3))
    first.replay()
    second.replay()
    assert_value(made, fill(7))


def test_blocks_share_what_closes_over_nothing() -> None:
    calls = []

    @jax.jit
    def double(y: Any) -> Any:
        calls.append(y)
        return y * 2

    x, number = tg.static_input((N,)), kept_traces._setting.value
    record(lambda: double(x))
    record(lambda: (double(x), jax.grad(lambda y: double(jnp.sin(y)).sum())(x)))
    assert len(calls) == 1
    assert kept_traces._setting.value == number == 0


def test_a_block_that_fails_gives_its_number_back() -> None:
    def see() -> None:
        seen.append(kept_traces._setting.value)
        raise ZeroDivisionError

    seen: list[int] = []
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            record(see)
    assert seen[0] == seen[1] > 0 == kept_traces._setting.value


def test_with_one_number_for_all_blocks_a_trace_of_another_would_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_traces, "_free", [10**6] * 2)
    x = tg.static_input((N,))
    use = make_uses(x)["used"]
    record(use)
    with pytest.raises(Exception, match=r"traced array|compiled for 2 inputs"):
        record(use)
