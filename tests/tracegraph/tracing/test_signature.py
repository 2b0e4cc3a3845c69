"""Signatures: which calls share one graph, and what inputs are called."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.options import read_options
from tracegraph.runtime.errors import CaptureError
from tracegraph.tracing.signature import (
    LeafType,
    Signature,
    bind_call,
    describe_leaf,
    make_signature,
    name_leaves,
)
from tracegraph.tracing.static_leaves import find_static_kind

jax.config.update("jax_platforms", "cpu")
X = jnp.arange(3.0)
DEFAULTS: dict[str, Any] = {
    "static_argnums": (),
    "static_argnames": (),
    "donate_argnums": (),
    "donate_argnames": (),
    "mode": "whole",
    "outputs": "fresh",
    "pool": None,
    "stream": None,
    "verify": True,
    "name": None,
    "static_leaves": "auto",
    "control_flow": "allow",
    "prefer": "auto",
    "numerics": "xla",
    "debug_nans": False,
    "warm": True,
}


def step(x: Any, n: Any, *rest: Any, flag: Any = False, **others: Any) -> Any:
    return x * n


def sign(*args: Any, **kwargs: Any) -> Signature:
    options = read_options(step, DEFAULTS | {"static_argnums": 1, "static_argnames": "flag"})
    call = bind_call(step, options, args, kwargs)
    leaves, tree = jax.tree_util.tree_flatten((call.args, call.kwargs))
    return make_signature(call, leaves, tree)


def names_of(*args: Any, **kwargs: Any) -> list[str]:
    options = read_options(step, DEFAULTS | {"donate_argnums": 0})
    return name_leaves(step, options, bind_call(step, options, args, kwargs))[0]


def test_a_call_is_split_and_restored():
    options = read_options(step, DEFAULTS | {"static_argnums": 1, "static_argnames": "flag"})
    call = bind_call(step, options, (X, 2, 5.0), {"flag": True, "more": 7})
    assert (call.positions, call.statics) == ((0, 2), ((1, 2), ("flag", True)))
    assert call.args[1:] == (5.0,)
    assert call.kwargs == {"more": 7}
    args, kwargs = call.restore(["a", "b"], {"more": "c"})
    assert args == ["a", 2, "b"]
    assert kwargs == {"more": "c", "flag": True}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X, 2), (X + 1, 2)),
        ((X, 2), (np.zeros(3, np.float32), 2)),
        ((X, (1, "a")), (X, (1, "a"))),
    ],
)
def test_same_signature(one: Any, other: Any):
    assert sign(*one) == sign(*other)
    assert hash(sign(*one)) == hash(sign(*other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((X, 2), (jnp.arange(4.0), 2)),
        ((X, 2), (X.astype(jnp.bfloat16), 2)),
        ((X, 2), ((X,), 2)),
        ((X, 2), (X, 3)),
        ((jnp.float32(2), 2), (2.0, 2)),
        # Python takes these for equal; a traced function does not.
        ((X, 1), (X, 1.0)),
        ((X, 1), (X, True)),
        ((X, 0.0), (X, -0.0)),
        ((X, (1, 2)), (X, (1.0, 2))),
        ((X, ((1,),)), (X, ((True,),))),
        ((X, frozenset([1])), (X, frozenset([1.0]))),
    ],
)
def test_other_signature(one: Any, other: Any):
    assert sign(*one) != sign(*other)


def test_a_static_keyword_counts():
    assert sign(X, 2, flag=True) != sign(X, 2, flag=False)
    assert sign(X, 2, flag=True) != sign(X, 2, flag=1)


def test_static_kinds():
    assert find_static_kind(2) is int
    assert find_static_kind(2) != find_static_kind(True)
    assert find_static_kind("a") == find_static_kind("b")


@pytest.mark.parametrize(
    "values",
    [
        (2, 2.0),
        (1, True),
        (0.0, -0.0),
        ((2,), (2.0,)),
    ],
)
def test_static_values_that_look_equal_are_captured_apart(values: Any):
    def divide(x: Any, n: Any) -> Any:
        return x * n[0] if isinstance(n, tuple) else x / n

    captured = tg.capture(divide, static_argnums=1)
    x = jnp.arange(1, 4)
    for value in (*values, *values):
        got = captured(x, value)
        expected = jax.jit(lambda x, n=value: divide(x, n))(x)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    assert captured.cache_info().captures == 2


@pytest.mark.parametrize(
    ("value", "leaf"),
    [
        (X, LeafType((3,), np.dtype("float32"), False)),
        (2.0, LeafType((), np.dtype("float32"), True)),
        (True, LeafType((), np.dtype("bool"), False)),
        (jax.ShapeDtypeStruct((2, 3), jnp.int8), LeafType((2, 3), np.dtype("int8"), False)),
        (np.zeros((0, 2), np.float32), LeafType((0, 2), np.dtype("float32"), False)),
    ],
)
def test_leaf_types(value: Any, leaf: LeafType):
    assert describe_leaf(value) == leaf


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((X,), {}), ((X, 2), {"n": 3})], ids=["none", "few", "twice"]
)
def test_wrong_arguments_are_refused_with_the_signature(args: Any, kwargs: Any):
    options = read_options(step, DEFAULTS)
    with pytest.raises(CaptureError, match="`step` is called with the wrong arguments") as raised:
        bind_call(step, options, args, kwargs)
    assert "step(x: Any, n: Any, *rest" in raised.value.fix.replace("'", "")


@pytest.mark.parametrize(("args", "kwargs"), [((X, [1]), {}), ((X, 1), {"flag": [1]})])
def test_a_static_value_that_cannot_be_hashed_is_refused(args: Any, kwargs: Any):
    with pytest.raises(CaptureError, match="cannot be hashed: list") as raised:
        sign(*args, **kwargs)
    assert raised.value.anchor == "static-argument"


def test_names_follow_parameters_and_paths():
    names = names_of({"w": X, "b": [X, X]}, 2.0, X, (X,), flag=1, other=X)
    assert names == [
        "x['b'][0]",
        "x['b'][1]",
        "x['w']",
        "n",
        "rest[0]",
        "rest[1][0]",
        "flag",
        "other",
    ]


def test_labels_say_position_and_donation():
    options = read_options(step, DEFAULTS | {"donate_argnums": 0})
    _, leaves = name_leaves(step, options, bind_call(step, options, ([X],), {"n": 2.0}))
    assert [(leaf.path, leaf.is_donated) for leaf in leaves] == [
        ("argument 0 `x[0]`", True),
        ("argument 1 `n`", False),
    ]


class Twins:
    """A node whose two children have the same key."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


_KEY = jax.tree_util.GetAttrKey("twin")
jax.tree_util.register_pytree_with_keys(
    Twins,
    lambda t: (((_KEY, t.first), (_KEY, t.second)), None),
    lambda _, children: Twins(*children),
)


def test_names_are_unique_whatever_the_tree_says():
    assert names_of(Twins(X, X), 1.0) == ["x.twin", "x.twin#2", "n"]
    captured = tg.capture(lambda t: (t.first * 2, t.second * 3), donate_argnums=0)
    for one, other in (([1.0], [5.0]), ([7.0, 8.0], [9.0])):
        got = captured(Twins(jnp.asarray(one), jnp.asarray(other)))
        np.testing.assert_array_equal(got[0], np.multiply(one, 2, dtype=np.float32))
        np.testing.assert_array_equal(got[1], np.multiply(other, 3, dtype=np.float32))


def test_keywords_that_look_like_names_of_ours():
    names = names_of({"a": X}, 1.0, **{"%3": X, "x['a']": X})
    assert names == ["x['a']", "n", "kwargs['%3']", "kwargs[\"x['a']\"]"]
    captured = tg.capture(lambda x, **kwargs: (jnp.sin(x) * kwargs["%2"], kwargs["%1"] + x))
    one, other = captured(X, **{"%1": X + 1, "%2": X + 2})
    np.testing.assert_allclose(one, jnp.sin(X) * (X + 2), rtol=1e-6)
    np.testing.assert_allclose(other, X + 1 + X)
