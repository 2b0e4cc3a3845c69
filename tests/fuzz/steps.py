"""What a random program may do: each step takes values of the program and returns new ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Draw: TypeAlias = random.Random
Step: TypeAlias = Callable[[Draw, list[Any]], list[Any]]

DTYPES = ("float32", "float32", "bfloat16", "float16", "complex64", "int32", "uint8", "bool")
CLOSED_OVER = {
    "numpy": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "jax": jnp.arange(4.0) / 3,
    "integers": np.arange(3, dtype=np.int32),
}


def is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def is_inexact(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)


def pick(draw: Draw, values: list[Any], *, ndim: int | None = None, kind: Any = None) -> Any:
    """Returns one of the values that are no keys, or a new one of the wanted sort."""
    fits = [
        v
        for v in values
        if not is_key(v) and (ndim is None or v.ndim == ndim) and (kind is None or kind(v))
    ]
    if fits:
        return draw.choice(fits)
    shape = {0: (), 1: (4,), 2: (3, 4)}[1 if ndim is None else ndim]
    return jnp.linspace(0.5, 1.5, int(np.prod(shape))).reshape(shape)


def tame(value: Any) -> Any:
    """Keeps numbers small: what overflows says little."""
    if is_float(value):
        return jnp.clip(jnp.nan_to_num(value), -8, 8)
    return value


def apply_unary(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values)
    if is_inexact(x):
        chosen = draw.choice([jnp.sin, jnp.tanh, jnp.exp, jnp.abs, jnp.square, lax.neg, jnp.cos])
        return [tame(chosen(tame(x)))]
    if x.dtype == bool:
        return [~x]
    return [draw.choice([jnp.abs, jnp.square, jnp.sign, jnp.bitwise_not])(x)]


def apply_binary(draw: Draw, values: list[Any]) -> list[Any]:
    x, y = pick(draw, values), pick(draw, values)
    if x.shape != y.shape and x.ndim and y.ndim:
        y = y.ravel()[0]
    name = draw.choice(["add", "multiply", "subtract", "maximum", "equal", "divide"])
    if name == "subtract" and x.dtype == y.dtype == bool:
        name = "add"
    if name == "divide" and not (is_inexact(x) and is_inexact(y)):
        name = "multiply"
    return [tame(getattr(jnp, name)(x, y))]


def apply_number(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values)
    number = draw.choice([2, 0.5, 3.0, True, -1, 1e-3])
    if x.dtype == jnp.uint8 and number == -1:
        number = 1
    return [tame(draw.choice([lambda: x * number, lambda: number + x])())]


def select(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values)
    return [jnp.where(x == x.ravel()[0] if x.ndim else x > 0 if is_float(x) else x == 0, x, 0)]


def convert(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values)
    x = jnp.real(x) if jnp.iscomplexobj(x) else x
    return [tame(x).astype(draw.choice(DTYPES))]


def multiply_matrices(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values, ndim=2, kind=is_inexact)
    return [tame(draw.choice([lambda: x @ x.T, lambda: jnp.einsum("ij,ij->j", x, x)])())]


def reduce(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values)
    if x.dtype == bool or draw.random() < 0.1:
        return [jnp.any(x), jnp.all(x)]
    axis = draw.randrange(x.ndim) if x.ndim and draw.random() < 0.5 else None
    if is_inexact(x):
        return [tame(draw.choice([jnp.sum, jnp.mean])(x, axis=axis))]
    return [draw.choice([jnp.sum, jnp.max, jnp.min])(x, axis=axis)]


def search(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values, ndim=1, kind=is_float)
    return [jnp.argmax(x), jnp.cumsum(x), jnp.sort(x), jnp.argsort(x)][draw.randrange(4) :][:1]


def move(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values, ndim=draw.choice([1, 2]))
    row = x.shape[0] - 1
    return [
        draw.choice(
            [
                lambda: x[::-1],
                lambda: x[row],
                lambda: lax.dynamic_slice_in_dim(x, 1, row),
                lambda: x[jnp.asarray([0, row, 0])],
                lambda: jnp.concatenate([x, x])[: row + 1],
                lambda: x.T,
                lambda: x.reshape(-1)[: row + 1],
                lambda: jnp.roll(x, 1),
            ]
        )()
    ]


def scatter(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values, ndim=draw.choice([1, 2]))
    at = x.at[jnp.asarray([0, x.shape[0] - 1])]
    return [
        draw.choice(
            [
                lambda: at.set(jnp.ones((), x.dtype)),
                lambda: at.max(0) if is_float(x) else at.set(jnp.zeros((), x.dtype)),
            ]
        )()
    ]


def draw_numbers(draw: Draw, values: list[Any]) -> list[Any]:
    keys = [v for v in values if is_key(v) and v.ndim == 0]
    key = draw.choice(keys) if keys else jax.random.key(draw.randrange(9))
    return draw.choice(
        [
            lambda: [jax.random.normal(key, (4,))],
            lambda: [jax.random.uniform(key, (3, 4)), jax.random.fold_in(key, 7)],
            lambda: [jax.random.split(key)[0]],
            lambda: [jax.random.randint(key, (4,), 0, 9)],
            lambda: [jax.random.key_data(key)],
        ]
    )()


def scan(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values, ndim=1, kind=is_float)
    start = draw.choice([0.5, jnp.float32(0.25)])

    def turn(carry: Any, y: Any) -> Any:
        return jnp.tanh(carry + y.astype(jnp.float32)), carry * 2

    last, each = lax.scan(turn, start, x)
    return [last, each]


def loop_a_known_number_of_times(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values, ndim=1, kind=is_float)
    return [lax.fori_loop(0, 3, lambda i, v: (v * 0.5 + i).astype(v.dtype), x)]


def call(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values, kind=is_inexact)
    return draw.choice(
        [
            lambda: list(jax.jit(lambda v: (jnp.sin(v), v * 2))(x)),
            lambda: [jax.checkpoint(lambda v: jnp.cos(v) * v)(x)],
            lambda: [jax.vmap(lambda v: v * v + 1)(jnp.stack([x, x]))[1]],
        ]
    )()


def differentiate(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values, kind=is_float)
    value, gradient = jax.value_and_grad(lambda v: jnp.sum(jnp.sin(v) * v))(tame(x))
    return [value, gradient]


def close_over(draw: Draw, values: list[Any]) -> list[Any]:
    constant = CLOSED_OVER[draw.choice(sorted(CLOSED_OVER))]
    x = pick(draw, values, ndim=0)
    return [constant * x, jnp.asarray(constant)]


def make_constant(draw: Draw, values: list[Any]) -> list[Any]:
    return [
        draw.choice([lambda: jnp.arange(4), lambda: jnp.full((3, 4), 1.5), lambda: jnp.eye(4)])()
    ]


def branch(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values, kind=is_float)
    return [lax.cond(jnp.sum(x) > 1, lambda v: jnp.sin(v), lambda v: v * 2, x)]


def switch(draw: Draw, values: list[Any]) -> list[Any]:
    """Chooses one of three branches, one of which loops; perhaps with its gradient."""
    x, index = tame(pick(draw, values, kind=is_float)), pick(draw, values, ndim=0)
    index = jnp.abs(jnp.real(tame(index))).astype(jnp.int32)

    def choose(v: Any) -> Any:
        def repeat(v: Any) -> Any:
            return lax.scan(lambda c, _: (jnp.tanh(c * v), c), v, None, 3)[0]

        return lax.switch(index, [jnp.sin, repeat, lambda v: v * v], v)

    if draw.random() < 0.5:
        return [choose(x)]
    return [jax.grad(lambda v: jnp.sum(choose(v)))(x)]


def loop_an_unknown_number_of_times(draw: Draw, values: list[Any]) -> list[Any]:
    """Counts to a value of the program; each round branches on what is carried."""
    x = tame(pick(draw, values, ndim=draw.choice([0, 1]), kind=is_float))
    end = jnp.abs(jnp.real(tame(pick(draw, values, ndim=0)))).astype(jnp.int32) % 5

    def turn(index: Any, v: Any) -> Any:
        return lax.cond(jnp.sum(v) > index, lambda v: v * 0.5, lambda v: jnp.cos(v) + v, v)

    if draw.random() < 0.5:
        return [lax.fori_loop(0, end, turn, x)]
    return [jax.vmap(lambda v: lax.fori_loop(0, end, turn, v))(jnp.stack([x, x + 1]))]


def draw_until_accepted(draw: Draw, values: list[Any]) -> list[Any]:
    shape = jnp.abs(jnp.real(tame(pick(draw, values, ndim=0)))).astype(jnp.float32) + 0.5
    return [jax.random.gamma(jax.random.key(draw.randrange(9)), shape)]


def loop(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values, ndim=0, kind=is_float)
    start = (jnp.abs(tame(x)).astype(jnp.float32), draw.choice([1, 2.0, jnp.int32(3)]))
    return list(lax.while_loop(lambda c: c[0] < 50, lambda c: (c[0] * 2 + 1, c[1] + 1), start))


def call_back(draw: Draw, values: list[Any]) -> list[Any]:
    x = pick(draw, values, kind=is_float)
    return [
        jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    ]


ANYWHERE: tuple[Step, ...] = (
    apply_unary,
    apply_binary,
    apply_binary,
    apply_number,
    select,
    convert,
    multiply_matrices,
    reduce,
    search,
    move,
    scatter,
    draw_numbers,
    scan,
    loop_a_known_number_of_times,
    call,
    differentiate,
    close_over,
    make_constant,
)
# What ``control_flow="refuse"`` refuses.
DATA_DEPENDENT: tuple[Step, ...] = (
    branch,
    switch,
    loop,
    loop_an_unknown_number_of_times,
    draw_until_accepted,
)
# What only partial mode takes.
EAGER: tuple[Step, ...] = (call_back,)
