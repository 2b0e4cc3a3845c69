"""Matmuls of a few hundred rows, as of a small model's train step; kernels run on this machine."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.fakes import kernels_on_host
from tests.tracegraph.replacements.attention.ways import draw
from tests.tracegraph.replacements.few_rows.test_rule import build, compile_nothing, evaluate
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements.few_rows import kernels
from tracegraph.replacements.few_rows.row_matmuls import MAX_ROWS, MOST_ROWS
from tracegraph.replacements.few_rows.rule import FewRowMatmuls
from tracegraph.replacements.match import Machine, Match
from tracegraph.replacements.splice import splice_matches

BATCH, LENGTH, WIDTH, HIDDEN = 3, 16, 128, 256
RULE = FewRowMatmuls("matmuls of a few hundred rows", is_many=True)
MACHINE = Machine("9.0", 8, compile_nothing)


def find(function: Any, *args: Any) -> tuple[Any, list[Match]]:
    graph = build(function, *args)
    matches = RULE.find(graph, MACHINE)
    verify_graph(splice_matches(graph, matches))
    return graph, matches


def check(function: Any, *args: Any, run: Any = kernels_on_host.run_kernel_on_host) -> list[Match]:
    """Compares the kernels of a function with its reference, and returns their matches."""
    call = functools.partial(kernels_on_host.call_on_host, run=run)
    graph, matches = find(function, *args)
    known = evaluate(graph, args)
    for match in matches:
        given = [known[value] for value in match.inputs]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(kernels, "call_kernel", call)
            found, wanted = match.compute(*given), match.reference(*given)
        for value, one, right in zip(match.results, found, wanted, strict=True):
            assert (one.shape, one.dtype) == (value.shape, value.dtype)
            ours, theirs, right = (
                np.asarray(each, np.float64) for each in (one, known[value], right)
            )
            rounding = 4 * float(jnp.finfo(value.dtype).eps) * np.abs(right).max()
            error = np.abs(ours - right).max()
            assert error <= max(np.abs(theirs - right).max(), rounding)
    return matches


def normalise(x: Any, gain: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain


def apply_layer(x: Any, layer: Any) -> Any:
    hidden = normalise(x, layer["gain"]) @ layer["up"] + layer["bias"]
    return x + jnp.maximum(hidden, 0) @ layer["down"]


def make_layer(dtype: Any, seed: int = 0) -> dict[str, Any]:
    return {
        "gain": 1 + draw(WIDTH, dtype=dtype, seed=seed) / 8,
        "up": draw(WIDTH, HIDDEN, dtype=dtype, seed=seed) / 8,
        "bias": draw(HIDDEN, dtype=dtype, seed=seed),
        "down": draw(HIDDEN, WIDTH, dtype=dtype, seed=seed) / 16,
    }


def make_rows(dtype: Any, rows: tuple[int, ...] = (BATCH, LENGTH)) -> Any:
    return draw(*rows, WIDTH, dtype=dtype, seed=9)


def compute_loss(layers: Any, x: Any) -> Any:
    for layer in layers:
        x = apply_layer(x, layer)
    return (x.astype(jnp.float32) ** 2).mean()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_layer_is_two_kernels_with_norm_bias_and_residual(dtype: Any) -> None:
    layer, x = make_layer(dtype), make_rows(dtype)
    matches = check(apply_layer, x, layer)
    assert len(matches) == 2
    # Of the second one the bias and what is done in between are a part.
    assert {each.shape for each in matches[1].inputs} >= {(HIDDEN,), x.shape, (HIDDEN, WIDTH)}
    for match in matches:
        call: Any = match.compute
        assert call.kernel.shape.grid[1] == BATCH * LENGTH // MAX_ROWS


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_rows_are_kernels_too(dtype: Any) -> None:
    layers, x = [make_layer(dtype, seed) for seed in range(2)], make_rows(dtype)
    matches = check(jax.grad(compute_loss, argnums=(0, 1)), layers, x)
    # Forward and backward two for each layer; gradients of weights are sums over all rows.
    assert len(matches) == 8


def test_a_deep_model_computes_nothing_again_from_its_end() -> None:
    layers, x = [make_layer(jnp.float32, seed) for seed in range(6)], make_rows(jnp.float32)
    _, matches = find(jax.grad(compute_loss, argnums=(0, 1)), layers, x)
    assert len(matches) == 24
    assert max(len(match.inputs) for match in matches) <= 8


@pytest.mark.parametrize("rows", [(32,), (4, 4, 16), (1, MOST_ROWS)])
def test_any_axes_are_rows(rows: tuple[int, ...]) -> None:
    layer = make_layer(jnp.float32)
    x = make_rows(jnp.float32, rows)
    matches = check(apply_layer, x, layer) if x.size < 1 << 15 else find(apply_layer, x, layer)[1]
    assert len(matches) == 2


def test_weights_in_another_type_are_weights() -> None:
    def apply(x: Any, weight: Any) -> Any:
        return x @ weight.astype(x.dtype)

    assert len(check(apply, make_rows(jnp.bfloat16), draw(WIDTH, HIDDEN, dtype=jnp.float32))) == 1


@pytest.mark.parametrize(
    ("function", "rows", "columns"),
    [
        (lambda x, w: x @ w, (40,), HIDDEN),
        (lambda x, w: x @ w, (MOST_ROWS + 16,), HIDDEN),
        (lambda x, w: x @ w, (8,), HIDDEN),
        (lambda x, w: x @ w, (32,), 4096),
        (lambda x, w: x @ jnp.tanh(w), (32,), HIDDEN),
        (lambda x, w: x.T @ (x @ jnp.tanh(w)), (32,), HIDDEN),
    ],
    ids=["odd", "many", "few", "large", "computed", "gradient"],
)
def test_others_are_left_to_xla(function: Any, rows: Any, columns: int) -> None:
    x, weight = make_rows(jnp.float32, rows), draw(WIDTH, columns, dtype=jnp.float32)
    assert find(lambda x, w: x @ w, make_rows(jnp.float32), draw(WIDTH, HIDDEN))[1]
    assert find(function, x, weight)[1] == []


def test_each_block_has_its_own_rows() -> None:
    def run_spoilt(kernel: Any, *rest: Any) -> None:
        assert "blockIdx.y * ROWS" in kernel.source
        source = kernel.source.replace("blockIdx.y * ROWS", "0 * ROWS")
        kernels_on_host.run_kernel_on_host(dataclasses.replace(kernel, source=source), *rest)

    with pytest.raises(AssertionError, match="<="):
        check(apply_layer, make_rows(jnp.float32), make_layer(jnp.float32), run=run_spoilt)
