"""Small matmuls of models as users write them; the kernels run on this machine's threads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.tracegraph.replacements.few_rows.test_rule import GPU, build, check, describe, draw
from tracegraph.replacements.few_rows import small_matmuls
from tracegraph.replacements.few_rows.kernels import KernelCall
from tracegraph.replacements.few_rows.small_matmuls import SmallMatmuls
from tracegraph.replacements.match import Match

ROWS, WIDTH = 20, 32


def f32(*shape: int, seed: int = 0) -> Any:
    """Draws values of so few bits that rounding them for tensor cores changes nothing."""
    return draw(*shape, dtype=jnp.bfloat16, seed=seed).astype(jnp.float32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that threads of this machine multiply by in time."""
    sizes = dataclasses.replace(small_matmuls.SIZES, matrix_bytes=0)
    monkeypatch.setattr(small_matmuls, "SIZES", sizes)


def normalise(x: Any, gain: Any, bias: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    return centred * lax.rsqrt(variance + 1e-5) * gain + bias


def run_layer(x: Any, layer: Any) -> Any:
    gain, bias, up, up_bias, down, down_bias = layer
    hidden = normalise(x, gain, bias) @ up + up_bias
    return x + jax.nn.gelu(hidden) @ down + down_bias


def make_layer(seed: int = 0) -> tuple[Any, ...]:
    wide = 2 * WIDTH
    return (
        1 + f32(WIDTH, seed=seed),
        f32(WIDTH, seed=seed + 1),
        f32(WIDTH, wide, seed=seed),
        f32(wide, seed=seed),
        f32(wide, WIDTH, seed=seed),
        f32(WIDTH, seed=seed + 2),
    )


def find(monkeypatch: pytest.MonkeyPatch, function: Any, *args: Any) -> list[Match]:
    return check(monkeypatch, function, *args, rule=SmallMatmuls())


def test_a_layer_is_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    matches = find(monkeypatch, run_layer, f32(2, ROWS, WIDTH), make_layer())
    # Its activation is stored by the first, which has each element once.
    assert describe(matches) == ["5 -> 1", "4 -> 1"]


def test_parts_that_are_padded_and_added_up_are_read_as_one_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compute(one: Any, other: Any, matrix: Any, gain: Any) -> Any:
        parts = (
            lax.pad(one, 0.0, [(0, 0, 0), (0, WIDTH, 0)]),
            lax.pad(other, 0.0, [(0, 0, 0), (WIDTH, 0, 0)]),
        )
        return (parts[0] + parts[1]) * gain @ matrix

    args = f32(ROWS, WIDTH), f32(ROWS, WIDTH, seed=1), f32(2 * WIDTH, WIDTH), f32(2 * WIDTH)
    (match,) = find(monkeypatch, compute, *args)
    shapes = sorted(value.aval.shape for value in match.inputs)
    assert shapes == [(ROWS, 2 * WIDTH), (2 * WIDTH,), (2 * WIDTH, WIDTH)]


def test_a_step_is_a_kernel_for_each_matmul_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_loss(layers: Any, x: Any) -> Any:
        for layer in layers:
            x = run_layer(x, layer)
        return (x**2).mean()

    layers, x = [make_layer(), make_layer(3)], f32(2, ROWS, WIDTH)
    matches = find(monkeypatch, jax.value_and_grad(compute_loss), layers, x)
    # The gradient of the loss is what the last matmul is read by.
    forward = ["5 -> 2", "4 -> 1", "5 -> 2", "4 -> 2"]
    # Derivatives of a norm are in front of the next matmul's rows, sums of each row among them.
    backward = ["3 -> 1", "2 -> 1", "6 -> 1", "2 -> 1"]
    assert describe(matches) == [*forward, *backward]
    shapes = [[value.shape[-1] for value in match.results] for match in matches]
    assert shapes == [[64, 64], [32], [64, 64], [32, 32], [64], [32], [64], [32]]


@pytest.mark.parametrize("rows", [17, 33, 80])
def test_rows_that_fill_no_tile(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = f32(rows, 40), f32(40, 36), f32(40, 20, seed=1)
    (match,) = find(monkeypatch, lambda x, y, z: (x @ y, jnp.sin(x @ z)), *args)
    assert [value.shape for value in match.results] == [(rows, 36), (rows, 20)]


def test_rows_of_an_rms_norm_are_multiplied_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def project(x: Any, gain: Any, weights: Any) -> Any:
        return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain @ weights

    (match,) = find(monkeypatch, project, f32(ROWS, WIDTH), f32(WIDTH), f32(WIDTH, 48))
    assert isinstance(match.compute, KernelCall)
    assert "sum[m] *= factor" in match.compute.kernel.source


def test_matmuls_that_something_joins_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def gate(x: Any, one: Any, other: Any) -> Any:
        return jax.nn.silu(x @ one) * (x @ other)

    args = f32(ROWS, WIDTH), f32(WIDTH, 48), f32(WIDTH, 48, seed=1)
    assert describe(find(monkeypatch, gate, *args)) == ["3 -> 1"]


def exact(x: Any, weights: Any) -> Any:
    return jnp.matmul(x, weights, precision="highest")


def by_name(x: Any, weights: Any) -> Any:
    return jnp.matmul(x, weights, precision=lax.DotAlgorithmPreset.F32_F32_F32)


def narrow(x: Any, weights: Any) -> Any:
    return x.astype(jnp.bfloat16) @ weights.astype(jnp.bfloat16)


def batched(x: Any, weights: Any) -> Any:
    return jnp.einsum("rbd,bdc->rbc", x.reshape(ROWS, 2, -1), weights.reshape(2, 16, -1))


@pytest.mark.parametrize("function", [exact, by_name, narrow, batched])
def test_what_is_something_else_is_left_to_xla(function: Any) -> None:
    assert SmallMatmuls().find(build(function, f32(ROWS, WIDTH), f32(WIDTH, WIDTH)), GPU) == []


def test_matmuls_with_many_tiles_are_left_to_xla() -> None:
    graph = build(jnp.matmul, f32(1024, WIDTH), f32(WIDTH, 1024))
    assert SmallMatmuls().find(graph, GPU) == []
    larger = dataclasses.replace(GPU, processors=1024)
    assert len(SmallMatmuls().find(graph, larger)) == 1


def test_older_gpus_and_hosts_have_no_such_kernel() -> None:
    graph = build(jnp.matmul, f32(ROWS, WIDTH), f32(WIDTH, WIDTH))
    assert len(SmallMatmuls().find(graph, GPU)) == 1
    assert SmallMatmuls().find(graph, dataclasses.replace(GPU, architecture="8.0")) == []
    assert SmallMatmuls().find(graph, None) == []
