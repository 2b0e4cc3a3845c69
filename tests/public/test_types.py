"""What type checkers see of the public names. `make check` reads this file, pytest runs it.

An expected error that is no longer one fails there, since the comment that expects it is unused.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import pytest

import tracegraph as tg
from tracegraph.reports.report import Report

X = jnp.ones(3)


@tg.capture
def scale(x: jax.Array, factor: float = 2.0, *, shift: int = 0) -> jax.Array:
    return x * factor + shift


@tg.capture(donate_argnums=0, static_argnames="count", outputs="static", mode="partial")
def update(state: dict[str, jax.Array], count: int) -> tuple[dict[str, jax.Array], jax.Array]:
    return {"w": state["w"] * count}, state["w"].sum()


@dataclasses.dataclass(frozen=True)
class Model:
    width: int

    @tg.capture(static_argnums=0)
    def apply(self, x: jax.Array, *, rate: float = 1.0) -> jax.Array:
        return x[: self.width] * rate


@pytest.fixture(autouse=True, scope="module")
def clean() -> Iterator[None]:
    """Leaves no graph, since other tests count memory."""
    yield
    scale.reset()
    update.reset()
    Model.apply.reset()


def test_a_captured_function_keeps_its_signature() -> None:
    assert_type(scale(X), jax.Array)
    assert_type(scale(X, 3.0, shift=1), jax.Array)
    assert_type(scale(x=X, factor=3.0), jax.Array)
    assert_type(scale.__wrapped__(X), jax.Array)


def test_a_decorator_with_options_keeps_the_signature() -> None:
    state, total = update({"w": jnp.ones(3)}, 2)
    assert_type(state, dict[str, jax.Array])
    assert_type(total, jax.Array)


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(tg.CaptureError):
        scale()  # pyright: ignore[reportCallIssue]
    with pytest.raises(tg.CaptureError):
        scale(X, 1.0, 2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(tg.CaptureError):
        scale(X, other=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(tg.CaptureError):
        scale({1})  # pyright: ignore[reportArgumentType]
    with pytest.raises(tg.CaptureError):
        update({"w": X})  # pyright: ignore[reportCallIssue]


def test_a_captured_method_takes_no_self() -> None:
    model = Model(2)
    assert_type(model.apply(X), jax.Array)
    assert_type(model.apply(X, rate=2.0), jax.Array)
    assert_type(Model.apply(model, X), jax.Array)
    assert Model.apply.cache_info().captures == 2
    with pytest.raises(tg.CaptureError):
        model.apply(X, X, X)  # pyright: ignore[reportCallIssue]
    with pytest.raises(tg.CaptureError):
        model.apply(X, decay=2.0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(tg.CaptureError):
        Model.apply(X)  # pyright: ignore[reportCallIssue]


def test_types_stand_in_for_arrays_outside_of_calls() -> None:
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert_type(scale.explain(shape), Report)
    assert scale.trace(shape).graph.name == "scale"
    assert scale.lower(shape).pool_bytes == 512


def test_wrong_options_are_errors() -> None:
    # Without a rule: which ones an overloaded call breaks is the checker's choice.
    def function(x: jax.Array) -> jax.Array:
        return x

    with pytest.raises(tg.ConfigError, match="no option `donate`"):
        tg.capture(function, donate=0)  # pyright: ignore
    with pytest.raises(tg.ConfigError, match="no option `donate`"):
        tg.capture(donate=0)(function)  # pyright: ignore
    with pytest.raises(tg.ConfigError, match="mode='half' is unknown"):
        tg.capture(function, mode="half")  # pyright: ignore
    with pytest.raises(tg.ConfigError, match="outputs='old' is unknown"):
        tg.capture(function, outputs="old")  # pyright: ignore
    with pytest.raises(tg.ConfigError, match="donate_argnums='0' is not allowed"):
        tg.capture(donate_argnums="0")(function)  # pyright: ignore
    with pytest.raises(tg.ConfigError, match="capture is given int"):
        tg.capture(3)  # pyright: ignore


def test_options_of_every_allowed_type() -> None:
    stream, pool = tg.Stream(), tg.memory.MemPool()
    for decorate in (
        tg.capture(pool=pool, stream=stream, name="scale", verify=False),
        tg.capture(pool=pool.id, static_argnums=None, donate_argnums=[0], donate_argnames={"x"}),
        tg.capture(None, mode="whole", outputs="fresh", static_argnames=("factor", "shift")),
    ):
        captured = decorate(scale.__wrapped__)
        assert_type(captured(X + 1, 2.0), jax.Array)


def test_a_generic_is_written_out() -> None:
    def call(function: tg.GraphedFunction[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return function(x)

    def name(function: tg.GraphedFunction[..., Any]) -> str:
        return function.__name__

    square = tg.capture(jnp.square)
    assert name(square) == "square"
    doubled = tg.capture(lambda x: x * 2)
    assert_type(call(doubled, X), jax.Array)
