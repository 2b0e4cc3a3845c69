"""The flags in a trace: every open matmul and convolution, at any depth, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas

from tracegraph.jax_internals import make_function, name_jaxprs, open_jaxpr
from tracegraph.precision.apply_flags import apply_flags
from tracegraph.precision.flags import UNSET, PrecisionFlags

X = jnp.ones((4, 4))
NO_TF32 = PrecisionFlags(matmul_tf32=False, cudnn_tf32=False)
HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
DEFAULT = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)


def list_products(jaxpr: Any) -> Iterator[Any]:
    """Yields the matmuls and convolutions of a jaxpr, those of inner jaxprs too."""
    for equation in open_jaxpr(jaxpr)[0].eqns:
        if equation.primitive.name == "pallas_call" or "precision" in equation.params:
            yield equation
        else:
            for _, inner in name_jaxprs(equation.params):
                yield from list_products(inner)


def write(function: Callable[..., Any], *args: Any, flags: PrecisionFlags = NO_TF32) -> list[Any]:
    """Returns the products of a function with the flags in it; it must compute what it did."""
    before = jax.make_jaxpr(function)(*args)
    after = apply_flags(before, flags)
    run = make_function(after)
    wanted, got = jax.tree.leaves(jax.jit(function)(*args)), run(*jax.tree.leaves(args))
    assert all(jnp.allclose(one, other) for one, other in zip(wanted, got, strict=True))
    return [*list_products(after)]


@jax.custom_jvp
def with_own_derivative(x: Any) -> Any:
    return x @ x


with_own_derivative.defjvp(lambda primals, tangents: (primals[0] @ primals[0], tangents[0]))


@jax.custom_vjp
def with_own_gradient(x: Any) -> Any:
    return x @ x


with_own_gradient.defvjp(lambda x: (x @ x, x), lambda x, g: (x @ g,))


def solve(x: Any) -> Any:
    return lax.custom_linear_solve(
        lambda v: (x * 0 + jnp.eye(4)) @ v, x[0], lambda matvec, b: matvec(b) * 1, symmetric=True
    )


NESTED = {
    "plain": (lambda x: x @ x, 1),
    "jit": (lambda x: jax.jit(lambda y: y @ y)(x), 1),
    "scan": (lambda x: lax.scan(lambda c, y: (c @ x, y), x, None, 3)[0], 1),
    "while": (
        lambda x: lax.while_loop(lambda c: (c @ c)[0, 0] < 9, lambda c: c @ x + 1, x),
        2,
    ),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y + 1, x), 1),
    "checkpoint": (lambda x: jax.checkpoint(lambda y: y @ y)(x), 1),
    "grad": (jax.grad(lambda x: (x @ x).sum()), 3),
    "jvp": (with_own_derivative, 1),
    "vjp": (with_own_gradient, 1),
    "grad of vjp": (jax.grad(lambda x: with_own_gradient(x).sum()), 2),
    "linear solve": (solve, 2),
    "vmap": (jax.vmap(lambda x: jnp.outer(x, x) @ x), 1),
}


@pytest.mark.parametrize("name", NESTED)
def test_every_open_matmul_gets_the_flag(name: str) -> None:
    function, least = NESTED[name]
    products = write(function, X)
    assert len(products) >= least
    assert {each.params["precision"] for each in products} == {HIGHEST}


def test_matmuls_and_convolutions_have_flags_of_their_own() -> None:
    images, filters = jnp.ones((1, 2, 4, 4)), jnp.ones((2, 2, 1, 1))

    def both(i: Any, f: Any) -> Any:
        return lax.conv(i, f, (1, 1), "SAME") @ X

    def find(flags: PrecisionFlags) -> list[Any]:
        return [each.params["precision"] for each in write(both, images, filters, flags=flags)]

    assert find(PrecisionFlags(matmul_tf32=False)) == [None, HIGHEST]
    assert find(PrecisionFlags(cudnn_tf32=False)) == [HIGHEST, None]
    assert find(PrecisionFlags(matmul_tf32=True, cudnn_tf32=False)) == [HIGHEST, DEFAULT]
    gradient = jax.grad(lambda i, f: lax.conv(i, f, (1, 1), "SAME").sum(), (0, 1))
    found = write(gradient, images, filters)
    assert [each.params["precision"] for each in found] == [HIGHEST] * len(found)


def test_a_precision_that_is_named_stays() -> None:
    def named(x: Any) -> Any:
        with jax.default_matmul_precision("high"):
            y = x @ x
        return jnp.matmul(x, y, precision="default")

    high = (lax.Precision.HIGH, lax.Precision.HIGH)
    assert [each.params["precision"] for each in write(named, X)] == [high, DEFAULT]


@pytest.mark.parametrize("dtype", ["int32", "float16", "bfloat16"])
def test_other_types_have_no_tf32(dtype: str) -> None:
    (product,) = write(lambda x: x @ x, jnp.ones((4, 4), dtype))
    assert product.params["precision"] is None


def test_complex_matmuls_have_tf32() -> None:
    (product,) = write(lambda x: x @ x, jnp.ones((4, 4), "complex64"))
    assert product.params["precision"] == HIGHEST


@pytest.mark.parametrize(
    ("flags", "dtype", "wanted"),
    [
        (PrecisionFlags(matmul_fp16_reduction=False), "float16", "float32"),
        (PrecisionFlags(matmul_bf16_reduction=False), "bfloat16", "float32"),
        (PrecisionFlags(matmul_fp16_reduction=False), "bfloat16", "bfloat16"),
        (PrecisionFlags(matmul_bf16_reduction=False), "float16", "float16"),
        (PrecisionFlags(True, True, True, True), "float16", "float16"),
    ],
)
def test_sums_of_16_bits_are_widened(flags: PrecisionFlags, dtype: str, wanted: str) -> None:
    (product,) = write(lambda x: x @ x, jnp.ones((4, 4), dtype), flags=flags)
    assert product.outvars[0].aval.dtype == wanted


def test_grouped_matmuls_are_widened() -> None:
    flags, sizes = PrecisionFlags(False, False), jnp.array([1, 3])
    for dtype, wanted in (("float32", HIGHEST), ("float16", None)):
        groups = jnp.ones((2, 4, 4), dtype)
        (product,) = write(lax.ragged_dot, jnp.ones((4, 4), dtype), groups, sizes, flags=flags)
        assert product.params["precision"] == wanted
        assert product.outvars[0].aval.dtype == "float32"


def test_an_algorithm_says_how_it_adds() -> None:
    def named(x: Any) -> Any:
        return lax.dot(x, x, precision=lax.DotAlgorithmPreset.F16_F16_F32)

    jaxpr = jax.make_jaxpr(named)(jnp.ones((4, 4), "float16"))
    assert apply_flags(jaxpr, PrecisionFlags(False, False, False, False)) is jaxpr


def test_what_has_no_open_product_is_the_same_jaxpr() -> None:
    for function in (jnp.sin, lambda x: lax.scan(lambda c, y: (c + x, y), x, None, 3)[0]):
        jaxpr = jax.make_jaxpr(function)(X)
        assert apply_flags(jaxpr, NO_TF32) is jaxpr
    jaxpr = jax.make_jaxpr(lambda x: x @ x)(X)
    assert apply_flags(jaxpr, UNSET) is jaxpr


def test_a_jaxpr_that_is_used_twice_stays_one() -> None:
    inner = jax.jit(lambda x: x @ x)
    jaxpr = apply_flags(jax.make_jaxpr(lambda x: inner(inner(x)))(X), NO_TF32)
    one, other = (each.params["jaxpr"] for each in open_jaxpr(jaxpr)[0].eqns)
    assert one is other


def test_a_kernel_of_pallas_stays_as_it_is() -> None:
    def kernel(x: Any, y: Any) -> None:
        y[...] = x[...] @ x[...]

    def call(x: Any) -> Any:
        return pallas.pallas_call(kernel, out_shape=x, interpret=True)(x)

    jaxpr = jax.make_jaxpr(call)(X)
    assert apply_flags(jaxpr, NO_TF32) is jaxpr
