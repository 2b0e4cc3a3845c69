"""Matmuls of few rows in programs whose shapes or ops are easily taken for others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from tests.tracegraph.replacements.few_rows.test_rule import (
    BF16,
    HIDDEN,
    WIDTH,
    check,
    draw,
    draw_bytes,
)

f32 = functools.partial(draw, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (
            lambda x, w: x @ jnp.reshape(w, (WIDTH, HIDDEN), order="F"),
            [(1, WIDTH), (HIDDEN, WIDTH)],
        ),
        (lambda x, w: jnp.ravel(x, order="F") @ w, [(16, 16), (WIDTH, HIDDEN)]),
        (lambda x, w: lax.reshape(x @ w, (HIDDEN, 2), (1, 0)) * 2, [(2, WIDTH), (WIDTH, HIDDEN)]),
    ],
)
def test_a_reshape_that_transposes(
    function: Callable[..., Any], shapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(check(monkeypatch, function, *(f32(*shape) for shape in shapes))) == 1


@pytest.mark.parametrize(
    "function",
    [lambda x, w: (x - x.sum(-1)[None]) @ w, lambda x, w: (x - x.max(-1)[:, None]) @ w],
)
def test_as_many_rows_as_columns(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(check(monkeypatch, function, f32(8, 8), f32(8, 2048))) == 1


def test_bytes_that_are_rounded_to_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(x: Any, w: Any) -> Any:
        return x @ w.astype(jnp.float8_e4m3fn).astype(BF16)

    args = draw(1, WIDTH), draw_bytes(WIDTH, WIDTH, dtype=jnp.int8)
    (match,) = check(monkeypatch, multiply, *args)
    assert [str(each.aval.dtype) for each in match.inputs] == ["bfloat16", "float8_e4m3fn"]
