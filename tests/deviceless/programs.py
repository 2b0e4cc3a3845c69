"""The corpus: programs that are built for an H200 without a GPU here, and replayed in tests/gpu/.

Arguments are NumPy arrays, so that making them needs no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas

from tests.deviceless import models

Arguments = tuple[Any, ...]
TABLE = np.random.default_rng(7).normal(size=(32, 64)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Program:
    """One function with a recipe for its arguments.

    Attributes:
        name: unique in the corpus.
        function: takes and returns trees of arrays.
        make_arguments: gives NumPy arguments of one signature; other values for other draws.
        donate_argnums: the positions of arguments that the function may overwrite.
        needs_x64: has float64 or int64 values; without 64-bit types it is another program.
        needs_gpu: can't run on the host device.
    """

    name: str
    function: Callable[..., Any]
    make_arguments: Callable[[np.random.Generator], Arguments]
    donate_argnums: tuple[int, ...] = ()
    needs_x64: bool = False
    needs_gpu: bool = False


def draw(*shapes: tuple[int, ...], dtype: Any = np.float32) -> Callable[..., Arguments]:
    """Returns a maker of one normally distributed array per shape, all of one dtype."""

    def make_arguments(rng: np.random.Generator) -> Arguments:
        return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)

    return make_arguments


def _draw_integers(high: int, *shapes: tuple[int, ...], dtype: Any = np.int32) -> Any:
    def make_arguments(rng: np.random.Generator) -> Arguments:
        return tuple(rng.integers(0, high, shape).astype(dtype) for shape in shapes)

    return make_arguments


def _join(*makers: Callable[[np.random.Generator], Arguments]) -> Callable[..., Arguments]:
    def make_arguments(rng: np.random.Generator) -> Arguments:
        return tuple(argument for maker in makers for argument in maker(rng))

    return make_arguments


def _draw_complex(rng: np.random.Generator) -> Arguments:
    real, imaginary = draw((64, 33), (64, 33))(rng)
    return ((real + 1j * imaginary).astype(np.complex64),)


def _make_adam(rng: np.random.Generator) -> Arguments:
    parameter, gradient = draw((300, 200), (300, 200))(rng)
    state = {"parameter": parameter, "m": gradient * 0, "v": gradient * 0}
    return {**state, "count": np.zeros((), np.int32)}, gradient


def _update_adam(state: dict[str, Any], gradient: Any) -> dict[str, Any]:
    m = 0.9 * state["m"] + 0.1 * gradient
    v = 0.999 * state["v"] + 0.001 * gradient**2
    parameter = state["parameter"] - 0.001 * m / (jnp.sqrt(v) + 1e-8)
    return {"parameter": parameter, "m": m, "v": v, "count": state["count"] + 1}


def _make_mlp_arguments(rng: np.random.Generator) -> Arguments:
    state = models.make_mlp_state(rng)
    return state, *draw((32, 64))(rng), *_draw_integers(10, (32,))(rng)


def _make_gpt_arguments(layers: int) -> Callable[..., Arguments]:
    tokens = _draw_integers(models.VOCABULARY, (4, models.CONTEXT), (4, models.CONTEXT))

    def make_arguments(rng: np.random.Generator) -> Arguments:
        return models.make_gpt_state(rng, layers, 128), *tokens(rng)

    return make_arguments


def _draw_random(implementation: str) -> Callable[..., Any]:
    def draw_random(data: Any) -> Any:
        key = jax.random.wrap_key_data(data, impl=implementation)
        first, second = jax.random.split(key)
        return (
            jax.random.bits(first, (1000,)),
            jax.random.normal(second, (64, 33)),
            jax.random.key_data(second),
        )

    return draw_random


def _scale_block(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] * 2.0 + jnp.sin(y_ref[...])


def _call_pallas(x: Any, y: Any) -> Any:
    # Imported here, for it needs the Triton dialect, which not every jaxlib has.
    from jax.experimental.pallas import triton

    block = pallas.BlockSpec((64, 64), lambda i, j: (i, j))
    call = pallas.pallas_call(
        _scale_block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 64, x.shape[1] // 64),
        in_specs=[block, block],
        out_specs=block,
        compiler_params=triton.CompilerParams(num_warps=4),
    )
    return call(x, y) + 1.0


def _multiply(precision: str | None = None) -> Callable[[Any, Any], Any]:
    return lambda x, y: jnp.matmul(x, y, precision=precision)


def _apply_gelu(x: Any, weight: Any, bias: Any) -> Any:
    return jax.nn.gelu(x @ weight + bias)


def _reduce(x: Any) -> Any:
    return x.sum(), x.max(0), x.min(1), x.mean((0, 1)), jnp.argmax(x, 1), jnp.prod(x[:3], 0)


def _normalize_rows(x: Any) -> Any:
    return jax.nn.softmax(x, -1), jax.nn.logsumexp(x, 0), x / jnp.linalg.norm(x, axis=1)[:, None]


def _mix_integers(x: Any, y: Any) -> Any:
    return (x * y).astype(jnp.int8), x.astype(jnp.int32) @ y.astype(jnp.int32).T, x << 1


ELEMENTWISE = (
    Program("double", lambda x: x * 2, draw((5,))),
    Program(
        "add_large", lambda x, y: jnp.sin(x) + jnp.exp(y) * 0.1, draw((1024, 1024), (1024, 1024))
    ),
    Program("broadcast", lambda x, y: jnp.where(x > y, x - y, y[None]), draw((64, 100), (100,))),
    Program(
        "chain_of_powers", lambda x: [x, x**2, jnp.tanh(x) ** 3, 1 / (1 + x * x)], draw((777,))
    ),
    Program("booleans", lambda x, y: (x > y, ~(x > y) & (x < 0)), draw((129,), (129,))),
    Program("int8", _mix_integers, _draw_integers(100, (16, 24), (16, 24), dtype=np.int8)),
    Program("complex64", lambda z: (z * z.conj(), jnp.abs(z), jnp.exp(z * 0.1)), _draw_complex),
    Program(
        "uint64", lambda x: x * 3 + (x >> 2), _draw_integers(99, (65,), dtype=np.uint64), (), True
    ),
    Program("bfloat16", lambda x: jnp.tanh(x) + x * 2, draw((1000,), dtype=jnp.bfloat16)),
    Program("iota", lambda x: x + jnp.arange(640.0).reshape(10, 64), draw((10, 64))),
)
REDUCTIONS = (
    Program("reductions", _reduce, draw((257, 300))),
    Program("sum_large", lambda x: x.sum(), draw((2048, 2048))),
    Program("softmax", _normalize_rows, draw((128, 500))),
    Program("cumsum", lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x[::-1], 1)), draw((100, 513))),
    Program("cumulative_large", lambda x: jnp.cumsum(x), draw((1 << 20,))),
    Program(
        "window",
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (2, 2), "SAME"),
        draw((65, 65)),
    ),
    Program("argmax", lambda x: (jnp.argmax(x), jnp.argmin(x, 0)), draw((99, 101))),
)
MATMULS = (
    Program("product_default", _multiply(), draw((256, 512), (512, 384))),
    Program("product_highest", _multiply("highest"), draw((256, 512), (512, 384))),
    Program("product_odd", _multiply(), draw((37, 53), (53, 29))),
    Program("product_bfloat16", _multiply(), draw((256, 512), (512, 384), dtype=jnp.bfloat16)),
    Program("product_float16", _multiply(), draw((256, 512), (512, 384), dtype=np.float16)),
    Program(
        "product_float64", _multiply(), draw((128, 256), (256, 64), dtype=np.float64), (), True
    ),
    Program("product_batched", _multiply(), draw((8, 64, 32), (8, 32, 48))),
    Program("product_transposed", lambda x, y: x.T @ y.T, draw((96, 128), (64, 96))),
    Program("product_vector", lambda x, y: (x @ y, y @ x.T), draw((300, 200), (200,))),
    Program("product_large", _multiply(), draw((2048, 2048), (2048, 2048), dtype=jnp.bfloat16)),
    Program("bias_float32", lambda x, w, b: x @ w + b, draw((128, 256), (256, 512), (512,))),
    Program("gelu_float32", _apply_gelu, draw((128, 256), (256, 512), (512,))),
    Program("gelu_bfloat16", _apply_gelu, draw((256, 256), (256, 512), (512,), dtype=jnp.bfloat16)),
    Program(
        "relu_float16",
        lambda x, w, b: jax.nn.relu(x @ w + b),
        draw((128, 256), (256, 512), (512,), dtype=np.float16),
    ),
    Program(
        "einsum",
        lambda x, y: jnp.einsum("bhqd,bhkd->bhqk", x, y),
        draw((2, 4, 64, 32), (2, 4, 64, 32)),
    ),
)
MOVEMENTS = (
    Program("transpose", lambda x: x.transpose(2, 0, 1), draw((32, 48, 40))),
    Program("transpose_large", lambda x: x.T, draw((2000, 1000))),
    Program(
        "concatenate", lambda x, y: jnp.concatenate([x, y, x[:3]], 0), draw((40, 30), (20, 30))
    ),
    Program("pad_and_flip", lambda x: jnp.pad(x, ((1, 2), (3, 4)))[::-1], draw((33, 21))),
    Program("sort_small", lambda x: jnp.sort(x), draw((8, 100))),
    Program("sort_large", lambda x: jnp.sort(x), draw((1 << 17,))),
    Program("sort_pairs", lambda x, y: lax.sort((x, y), num_keys=1), draw((5000,), (5000,))),
    Program("top_k", lambda x: lax.top_k(x, 5), draw((16, 400))),
    Program("gather", lambda x, i: x[i], _join(draw((500, 64)), _draw_integers(500, (77,)))),
    Program(
        "scatter_add",
        lambda x, i, u: x.at[i].add(u),
        _join(draw((100, 8)), _draw_integers(100, (64,)), draw((64, 8))),
    ),
    Program(
        "scatter_set",
        lambda x, i: x.at[i].set(1.0),
        _join(draw((100, 8)), _draw_integers(100, (9,))),
    ),
    Program(
        "dynamic_slice",
        lambda x, i: lax.dynamic_slice(x, (i, i), (10, 20)),
        _join(draw((64, 64)), _draw_integers(40, ())),
    ),
    Program(
        "dynamic_update",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        _join(draw((64, 64), (4, 64)), _draw_integers(60, ())),
        (0,),
    ),
    Program(
        "dynamic_update_copied",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
        _join(draw((64, 64), (4, 64)), _draw_integers(60, ())),
    ),
)
RANDOM = (
    Program(
        "threefry", _draw_random("threefry2x32"), _draw_integers(1 << 31, (2,), dtype=np.uint32)
    ),
    Program("rbg", _draw_random("rbg"), _draw_integers(1 << 31, (4,), dtype=np.uint32)),
)
ROLES = (
    Program("passthrough", lambda x, y: (x, y + 1, x), draw((17,), (9,))),
    Program("all_passed_through", lambda x, y: (y, x), draw((17,), (9,))),
    Program("duplicate_outputs", lambda x: [jnp.cos(x)] * 3, draw((40,))),
    Program("unused_argument", lambda x, y: x + 1, draw((40,), (3, 3))),
    Program("closed_over", lambda x: x @ TABLE, draw((16, 32))),
    Program("literals", lambda x: x + np.array([1.5, -2.0, 3.25], np.float32), draw((4, 3))),
    Program(
        "constant_outputs", lambda x: (jnp.ones((5, 7)), jnp.arange(11), x * 0 + 2), draw((3,))
    ),
    Program("no_arguments", lambda: jnp.arange(12.0).reshape(3, 4) * 2, draw()),
    Program(
        "empty_arrays",
        lambda x, y: (x * 2, y.sum(), jnp.concatenate([x[:, :0], x], 1)),
        draw((0, 4), (3, 0)),
    ),
    Program("scalars", lambda x, y: (x * y, x > y), draw((), ())),
    Program("donated_update", _update_adam, _make_adam, (0,)),
    Program("donated_swap", lambda x, y: (y, x), draw((64,), (64,)), (0, 1)),
    Program("donated_and_read", lambda x, y: (x + y, x * y, x.sum()), draw((64,), (64,)), (0,)),
)
KERNELS = (Program("pallas", _call_pallas, draw((128, 256), (128, 256)), needs_gpu=True),)
MODELS = (
    Program("mlp", models.step_mlp, _make_mlp_arguments, (0,)),
    Program("gpt_2x128", models.make_gpt_step(4), _make_gpt_arguments(2), (0,)),
    Program("gpt_12x128", models.make_gpt_step(4), _make_gpt_arguments(12), (0,)),
)
PROGRAMS: tuple[Program, ...] = (
    ELEMENTWISE + REDUCTIONS + MATMULS + MOVEMENTS + RANDOM + ROLES + KERNELS + MODELS
)
