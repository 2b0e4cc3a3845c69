"""What a leaf is: an array, static, or refused; and the fix that is named works."""

import array
import collections
import dataclasses
import datetime
import enum
import fractions
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.constraints.leaf_kinds import (
    describe_refusal,
    is_array,
    is_static,
    suggest_static,
)

X = jnp.arange(3.0)


class Mode(enum.Enum):
    FAST = 1


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Batch:
    x: jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    width: int


class Holder:
    def __init__(self, **values):
        vars(self).update(values)

    def method(self):
        return self


class Known(Holder):
    """Says itself when it is equal."""

    def __eq__(self, other):
        return vars(self).keys() == vars(other).keys()

    def __hash__(self):
        return 1


class Foreign:
    def __array__(self, dtype=None, copy=None):
        return np.arange(3.0, dtype=np.float32)


@pytest.mark.parametrize(
    "value",
    [
        "text",
        b"bytes",
        Mode.FAST,
        np.dtype("float32"),
        jnp.float32,
        np.float32,
        jnp.sin,
        jax.nn.relu,
        len,
        lambda: X,
        functools.partial(jnp.sum, axis=0),
        Config(3),
        frozenset({1}),
        datetime.date(2024, 1, 1),
        np.datetime64("2024-01-01"),
        np.str_("a"),
        fractions.Fraction(1, 3),
        object(),
        Holder(a=1),
        Holder(a=1).method,
        Known(a=X),
        Ellipsis,
        types.ModuleType("math"),
    ],
)
def test_what_can_be_hashed_is_static(value):
    assert is_static(value)
    assert not is_array(value)


@pytest.mark.parametrize(
    "value", [True, 1, 1.5, 2j, Number.ONE, np.float32(1), np.zeros(2), X, jax.random.key(0)]
)
def test_arrays_and_numbers_are_not_static(value):
    assert is_array(value)
    assert not is_static(value)


def test_a_function_of_a_trace_is_not_static():
    seen = []

    def look(x):
        seen.append(is_static(lambda: x))
        return x

    jax.make_jaxpr(look)(X)
    assert seen == [False]
    assert is_static(lambda: X)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    x: jax.Array


RECORDS = np.ones(2, [("a", "f4"), ("b", "f4")])
DATES = np.array(["2024-01-01", "2024-01-03"], "datetime64[D]")
# What is refused, the fix that is named, and what the fix makes of it.
REFUSED = [
    ({1, 2}, "pass frozenset(x)", frozenset),
    ({"a": 1}.keys(), "pass frozenset(x)", frozenset),
    (bytearray(b"a"), "pass bytes(x)", bytes),
    (collections.UserDict(a=1), "pass dict(x)", dict),
    (collections.Counter("a"), "pass dict(x)", dict),
    ({"a": 1}.values(), "pass list(x)", list),
    (map(str, [1, 2]), "pass next(x), or list(x)", list),
    (array.array("f", [1.0]), "pass np.asarray(x)", np.asarray),
    (memoryview(bytearray(b"ab")), "pass np.asarray(x)", np.asarray),
    (Batch(X), "register its class as a pytree", lambda x: Registered(x.x)),
    (Batch(X), "@dataclass(frozen=True)", lambda _: Config(1)),
    (Holder(x=X), "as vars(x)", vars),
    (Holder(x=X).method, "pass its arrays in a dict", lambda x: vars(x.__self__)),
    (Foreign(), "pass jnp.asarray(x)", jnp.asarray),
    (np.array(["a", "b"]), "pass x.tolist()", lambda x: x.tolist()),
    (np.array([X, "a"], object), "pass x.tolist()", lambda x: x.tolist()),
    (DATES, "x.tolist(), whose", lambda x: x.tolist()),
    (DATES, "(x - x.min()) / np.timedelta64", lambda x: (x - x.min()) / np.timedelta64(1, "s")),
    (RECORDS, "{name: x[name]", lambda x: {name: x[name] for name in x.dtype.names}),
    (RECORDS[0], "{name: x[name]", lambda x: {name: x[name] for name in x.dtype.names}),
    (np.ones(2, ">f4"), "newbyteorder", lambda x: x.astype(x.dtype.newbyteorder("="))),
    (np.ones(2, np.longdouble), "astype(np.float64)", lambda x: x.astype(np.float64)),
    (np.longdouble(1), "astype(np.float64)", lambda x: x.astype(np.float64)),
    (np.ones(2, np.clongdouble), "astype(np.complex128)", lambda x: x.astype(np.complex128)),
]


@pytest.fixture(scope="module")
def returned():
    return tg.capture(lambda x: (x, X + 1), verify=False)


@pytest.mark.filterwarnings("ignore:Python iterable type", "ignore::tracegraph.RecaptureWarning")
@pytest.mark.parametrize(("value", "fix", "apply"), REFUSED)
def test_what_is_refused_names_a_fix_that_works(value, fix, apply, returned):
    assert not is_static(value)
    assert not is_array(value)
    assert fix in describe_refusal(value, takes_static=True)[1]
    with pytest.raises(tg.CaptureError, match="not an array") as caught:
        returned({"leaf": value})
    assert fix in str(caught.value)
    returned({"leaf": apply(value)})


def test_what_is_awaited_once_is_no_key(returned):
    async def load():
        return 1

    coroutine = load()
    try:
        with pytest.raises(tg.CaptureError, match="await it before the call"):
            returned({"leaf": coroutine})
    finally:
        coroutine.close()


def test_the_fix_for_a_reference_works():
    ref = jax.new_ref(X)
    step = tg.capture(lambda x: x + 1)
    with pytest.raises(tg.CaptureError, match=r"a Ref of float32(?s:.*)ref\[\.\.\.\] = f\("):
        step(ref)
    ref[...] = step(ref[...])
    assert ref[...].tolist() == [1.0, 2.0, 3.0]


def test_what_nothing_else_fits_is_bound_before_the_capture():
    value = type("List", (), {"__hash__": None, "scale": 2.0})()

    def scale(x, by):
        return x * by.scale

    with pytest.raises(tg.CaptureError, match=r"functools.partial\(f, name=x\)"):
        tg.capture(scale)(X, value)
    assert tg.capture(functools.partial(scale, by=value))(X).tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ([1, 2], "pass tuple(x)"),
        ([[1]], "functools.partial"),
        ({1}, "pass frozenset(x)"),
        (bytearray(b"a"), "pass bytes(x)"),
        ({"a": 1}, "functools.partial"),
        (X, "leave it out of static_argnums"),
    ],
)
def test_static_arguments_that_cannot_be_hashed(value, fix):
    assert fix in suggest_static(value)
    captured = tg.capture(lambda x, y: x + 1, static_argnames="y")
    with pytest.raises(tg.CaptureError, match="cannot be hashed") as caught:
        captured(X, y=value)
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    ("number", "fix", "apply"),
    [
        (2**31, "pass np.uint32(x)", np.uint32),
        (2**40, "pass float(x)", float),
        (-(2**40), '"jax_enable_x64", True', float),
        (2**70, "pass float(x)", float),
    ],
)
def test_numbers_that_are_too_large(number, fix, apply, returned):
    with pytest.raises(tg.CaptureError, match="cannot hold") as caught:
        returned(number)
    assert fix in str(caught.value)
    assert float(returned(apply(number))[0]) == float(number)


def test_64_bit_numbers_fit_as_the_messages_say(returned):
    with jax.enable_x64(True):
        assert int(returned(2**40)[0]) == 2**40
        with pytest.raises(tg.CaptureError, match=r"pass np.uint64\(x\)"):
            returned(2**63)
        assert int(returned(np.uint64(2**63))[0]) == 2**63


@pytest.mark.parametrize("is_donated", [False, True])
def test_a_deleted_array_says_how_it_can_have_gone(is_donated):
    step = tg.capture(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(2)
    if is_donated:
        new = step(x)
    else:
        x.delete()
        new = jnp.zeros(2)
    with pytest.raises(tg.CaptureError, match=r"has been deleted(?s:.*)freed by x.delete\(\)"):
        step(x)
    step(new)


def test_the_fix_for_sharing_works():
    step = tg.capture(lambda x, y: (x + y, y), donate_argnums=0)
    x = jnp.ones(2)
    with pytest.raises(tg.CaptureError, match=r"jnp.array\(x, copy=True\)"):
        step(x, x)
    assert step(jnp.array(x, copy=True), x)[0].tolist() == [2.0, 2.0]
