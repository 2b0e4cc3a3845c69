"""What may be padded: tables of functions, random programs, poisoned padding, a planted fault."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.buckets import rules
from tracegraph.buckets.padded import Padded
from tracegraph.buckets.padded_call import pad_with

BUCKETS = {"x": {0: (2, 4, 8)}}


def make_x(size=3):
    return jnp.linspace(-1.0, 1.0, size * 4, dtype=jnp.float32).reshape(size, 4)


def mask(x):
    return (jnp.arange(x.shape[0]) < tg.bucket_size())[:, None]


def cap(function: Any) -> Any:
    # Two traces and a check, without XLA.
    return tg.capture(function, buckets=BUCKETS)


def scan_rows(x):
    def body(carry, column):
        return carry + 1, carry * column

    return jax.lax.scan(body, jnp.float32(1), x.T)[1]


def attend(x):
    scores = jnp.where(mask(x).T, x @ x.T, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ jnp.where(mask(x), x, 0)


def mask_attended(x):
    seen = jax.nn.softmax(jnp.where(mask(x).T, x @ x.T, -jnp.inf), axis=-1)
    return jnp.where(mask(x).T, seen, 0) @ jnp.where(mask(x), x, 0)


def rows(x, dtype):
    return jnp.arange(x.shape[0], dtype=dtype)


def size(dtype):
    return tg.bucket_size().astype(dtype)


def make_weights(x):
    masked = jnp.where(mask(x), x, -jnp.inf)
    return jnp.exp(masked - masked.max(0))


def add_at(x, updates, **promises):
    return jnp.zeros((5, 4)).at[x[:, 0].astype(int)].add(updates, **promises)


def add_weights(x):
    return add_at(x, make_weights(x))


TABLE = jnp.arange(20.0).reshape(5, 4)
PASSING = {
    "elementwise": lambda x: jnp.sin(x) * 2 + jnp.where(x > 0, x, -x),
    "matmul": lambda x: x @ TABLE.T,
    "column sum": lambda x: (x.sum(1), x.max(1), x.argmax(1), jax.nn.softmax(x)),
    "masked sum": lambda x: jnp.where(mask(x), x, 0).sum(0),
    "masked mean": lambda x: jnp.where(mask(x), x, 0).sum(0) / tg.bucket_size(),
    "mean where": lambda x: jnp.mean(x, 0, where=mask(x)),
    "masked maximum": lambda x: jnp.where(mask(x), x, -jnp.inf).max(0),
    "masked minimum": lambda x: jnp.where(~mask(x), jnp.inf, x).min(0),
    "masked argmax": lambda x: jnp.where(mask(x), x, -jnp.inf).argmax(0),
    "any": lambda x: ((x > 0) & mask(x)).any(0),
    "all": lambda x: ((x > 0) | ~mask(x)).all(0),
    "masked integers": lambda x: (x.astype(int) * mask(x)).sum(0),
    "count": lambda x: mask(x).sum(),
    "last row": lambda x: jnp.where(
        (jnp.arange(x.shape[0]) == tg.bucket_size() - 1)[:, None], x, 0
    ).sum(0),
    "softmax": lambda x: jax.nn.softmax(jnp.where(mask(x), x, -jnp.inf), axis=0),
    "softmax where": lambda x: jax.nn.softmax(x, axis=0, where=mask(x)),
    "attention": mask_attended,
    "first row": lambda x: x[0],
    "prefix": lambda x: jnp.cumsum(x, 0),
    "flat": lambda x: x.reshape(-1),
    "flat and back": lambda x: (x.reshape(-1) + 1).reshape(x.shape[0], 2, 2),
    "outer": lambda x: x[:, None, :] - x[None, :, :],
    "transposed": lambda x: x.T + 1,
    "concatenated": lambda x: jnp.concatenate([x, x * 2], axis=1),
    "positions": lambda x: x + np.arange(40.0, dtype=np.float32).reshape(10, 4)[: x.shape[0]],
    "table's rows": lambda x: x + jnp.ones((10, 4))[: x.shape[0]],
    "lookup": lambda x: TABLE[jnp.clip(x.astype(int), 0, 4)],
    "along": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
    "scan": scan_rows,
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 2 + i, x),
    "branch": lambda x: jax.lax.cond(tg.bucket_size() > 2, jnp.sin, jnp.cos, x),
    "dropped": lambda x: TABLE.at[jnp.where(mask(x)[:, 0], jnp.arange(x.shape[0]) % 5, 5)].add(
        x, mode="drop"
    ),
    "gradient": lambda x: jax.grad(lambda y: (jnp.where(mask(y), y, 0) ** 2).sum())(x),
}
REFUSED = {
    "sum": (lambda x: x.sum(0), "sums over the padded axis 0"),
    "mean": (lambda x: jnp.where(mask(x), x, 0).mean(0), "follows from a bucket's size"),
    "size as a number": (lambda x: x * x.shape[0], "follows from a bucket's size"),
    "size as a choice": (lambda x: x + 1 if x.shape[0] > 3 else x * 2, "another way"),
    "size as an array": (lambda x: jnp.ones(3) * np.full(3, x.shape[0]), "bucket's size"),
    "wrong neutral element": (lambda x: jnp.where(mask(x), x, 0).max(0), "masked to 0"),
    "finite mask": (lambda x: jnp.where(mask(x), x, -1e9).max(0), "masked to -1"),
    "leaky mask": (
        lambda x: jnp.where((jnp.arange(x.shape[0]) <= tg.bucket_size())[:, None], x, 0).sum(0),
        "a mask of `leaky mask` lets padding through",
    ),
    "product mask": (lambda x: (x * mask(x)).sum(0), "sums over"),
    "contraction": (lambda x: x.T @ x, "contracts the padded axis"),
    "half masked": (lambda x: x.T @ jnp.where(mask(x), x, 0), "one operand only"),
    "unmasked attention": (attend, "contracts the padded axis"),
    "sort": (lambda x: jnp.sort(x, 0), "sorts along"),
    "reverse": (lambda x: x[::-1], "reverses"),
    "last": (lambda x: x[-1], "takes"),
    "suffix": (lambda x: jax.lax.cumsum(x, 0, reverse=True), "from the end"),
    "shift": (lambda x: jnp.roll(x, 1, 0), "padded axis 0"),
    "column by the size": (lambda x: jnp.tile(x, 4)[:, x.shape[0]], "follows from a bucket's size"),
    "size below 0": (
        lambda x: jnp.where((rows(x, "uint32") < size("uint32") - 4)[:, None], x, 0).sum(0),
        "sums over",
    ),
    "size of few bits": (
        lambda x: jnp.where(
            jnp.arange(32 * x.shape[0], dtype="int8") < size("int8") * 32,
            jnp.tile(x, 8).reshape(-1),
            0,
        ).sum(),
        "sums over",
    ),
    "added NaN": (lambda x: add_weights(x), "writes at indices"),
    "added in order": (
        lambda x: add_at(x, jnp.where(mask(x), x, 0), indices_are_sorted=True),
        "writes at indices",
    ),
    "integers of NaN": (lambda x: make_weights(x).astype(int).sum(0), "sums over"),
    "rows": (lambda x: x.T.reshape(-1), "mixes the padded axis"),
    "joined": (lambda x: jnp.concatenate([x, x]), "joins"),
    "scan": (lambda x: jax.lax.scan(lambda c, y: (c + y, y), jnp.zeros(4), x), "scans"),
    "dynamic": (lambda x: x[x[0, 0].astype(int)], "bucket's size"),
    "scatter": (lambda x: TABLE.at[x[:, 0].astype(int)].set(x), "writes at indices"),
    "loop": (
        lambda x: jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x),
        "sums over the padded axis",
    ),
    "convolution": (
        lambda x: jax.lax.conv(x.T[None], jnp.ones((1, 4, 1)), (1,), "SAME"),
        "convolves",
    ),
    "random numbers": (
        lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
        "lets padding into its results",
    ),
}


POISONS = (0.0, np.nan, np.random.default_rng(7).normal(size=(8, 8)).astype(np.float32) * 1e3)


def run_poisoned(functions, x):
    """Returns the flat results of each function, for every poison that x is padded with."""
    captured: Any = tg.capture(
        lambda x: {name: each(x) for name, each in functions.items()}, buckets=BUCKETS
    )
    outcomes = []
    for poison in POISONS:
        captured._pad = functools.partial(pad_poisoned, poison)
        outcomes.append(captured(x))
    assert captured.cache_info().captures == 1
    return outcomes


def pad_poisoned(poison, array, shape):
    value = poison if np.ndim(poison) == 0 else poison[tuple(map(slice, shape))]
    return pad_with(array, shape, value)


def find_changed(outcomes):
    """Returns the names of the results that depend on what the padding holds, by their bits."""
    clean, *others = [
        {
            name: [np.array(leaf).tobytes() for leaf in jax.tree.leaves(each)]
            for name, each in o.items()
        }
        for o in outcomes
    ]
    return {name for other in others for name in other if other[name] != clean[name]}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_may_not(name):
    function, message = REFUSED[name]
    captured: Any = tg.capture(function, buckets={0: {0: (2, 4, 8)}}, name=name)
    with pytest.raises(tg.CaptureError) as caught:
        captured.trace(make_x())
    assert message in str(caught.value)
    assert {each.rule for each in caught.value.violations} <= {"bucket-padding", "bucket-mask"}


UNARY = (jnp.sin, jnp.abs, jnp.exp, jnp.square, lambda v: 1 / v, lambda v: v @ TABLE[:4] / 9)
ACROSS = (
    jnp.sum,
    jnp.max,
    jnp.min,
    jnp.prod,
    functools.partial(jnp.cumsum, axis=0),
    jnp.argmax,
    lambda v: jax.nn.softmax(v, axis=0),
    lambda v: v.sum(1),
    lambda v: v.T @ v,
    lambda v: v[:1],
    lambda v: v.reshape(2, -1),
    lambda v: v.reshape(-1, 2),
    lambda v: v.T,
    lambda v: jnp.sort(v, 0),
    lambda v: jnp.sort(v, 1),
)
FILLS = (0.0, 1.0, -np.inf, np.inf, 3.0)


@dataclasses.dataclass(frozen=True)
class Program:
    """A random program: elementwise ops and masks, then something across the rows."""

    seed: int

    def __call__(self, x):
        draw = random.Random(self.seed)
        value = x
        for _ in range(draw.randint(0, 2)):
            value = draw.choice(UNARY)(value)
        for _ in range(draw.randint(0, 2)):
            rows = jnp.arange(x.shape[0])[:, None]
            limit = tg.bucket_size() + draw.choice((0, 0, 0, -1, 1))
            fill = draw.choice(FILLS)
            is_true = rows < limit if draw.random() < 0.8 else rows <= limit
            value = jnp.where(is_true, value, fill)
            value = draw.choice((jnp.negative, jnp.exp, lambda v: v, lambda v: v * 2))(value)
        return draw.choice(ACROSS)(value)


def is_taken(program):
    with contextlib.suppress(tg.CaptureError):
        cap(program).trace(make_x())
        return True
    return False


@pytest.fixture(scope="module")
def outcomes():
    """The results of all functions that are taken: under each poison, and without padding."""
    programs = {f"random {seed}": Program(seed) for seed in range(48)}
    taken = {name: each for name, each in programs.items() if is_taken(each)}
    # Both outcomes are common.
    assert 12 < len(taken) < 40
    functions = {**PASSING, **taken}
    inside = tg.capture(lambda x: {n: each(x) for n, each in functions.items()}, buckets=BUCKETS)
    return run_poisoned(functions, make_x()), jax.jit(inside)(make_x())


def check_outcomes(outcomes, names):
    poisoned, expected = outcomes
    assert not find_changed(poisoned).intersection(names)
    for name in names:
        leaves = zip(*map(jax.tree.leaves, (poisoned[0][name], expected[name])), strict=True)
        for one, wanted in leaves:
            assert (one.shape, one.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", PASSING)
def test_a_function_that_may_be_padded(name, outcomes):
    check_outcomes(outcomes, [name])


def test_random_programs_are_refused_or_do_not_see_their_padding(outcomes):
    check_outcomes(outcomes, [name for name in outcomes[1] if name.startswith("random")])


def test_a_rule_that_takes_too_much_is_caught(monkeypatch):
    """The poison shows what a wrong rule lets through: the check of the tests above can fail."""

    def apply_wrongly(context):
        axes = context.op.params["axes"]
        left = [p for axis, p in enumerate(context.operands[0].axes) if axis not in axes]
        return [Padded(tuple(left))]

    monkeypatch.setitem(rules.ALL_RULES, "reduce_sum", apply_wrongly)
    functions = {"wrong": lambda x: x.sum(0), "right": lambda x: x * 2}
    assert find_changed(run_poisoned(functions, make_x())) == {"wrong"}
