"""Copies and pickles of captured functions: the function and options travel, graphs do not."""

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tests.processes import run_program

X = jnp.arange(4.0)


@tg.capture(static_argnames="n")
def power(x, n=2):
    return x**n


@tg.capture(pool=tg.graph_pool_handle(), stream=tg.Stream())
def in_a_pool(x):
    return x + 1


def plain(x):
    return x * 3


tripled = tg.capture(plain, name="tripled", outputs="static")


class Model:
    """Captures one method as a function of its class, another as an attribute."""

    def __init__(self, scale):
        self.scale = scale
        self.attribute = tg.capture(self.run)

    def run(self, x):
        return x * self.scale

    @functools.partial(tg.capture, static_argnums=0)
    def method(self, x):
        return x * self.scale


def travel(value):
    return pickle.loads(pickle.dumps(value))


def travel_by_cloud(value):
    return cloudpickle.loads(cloudpickle.dumps(value))


COPIES = [copy.copy, copy.deepcopy, travel, travel_by_cloud]


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_has_the_function_and_the_options(copied):
    assert_same(tripled(X), X * 3)
    new = copied(tripled)
    assert new is not tripled
    assert new.cache_info() == (0, 0, 64, 0)
    assert new._options == dataclasses.replace(tripled._options, stream=new._options.stream)
    assert new.__wrapped__ is plain
    assert_same(new(X), X * 3)
    assert new.cache_info().captures == 1
    assert new.pool() != tripled.pool()
    assert tripled.cache_info().captures == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, travel_by_cloud])
def test_options_that_were_given_as_iterators_travel(copied):
    captured = tg.capture(
        lambda a, b, n: (a * n, b), static_argnums=iter([2]), donate_argnames=iter(["a"])
    )
    new = copied(captured)
    x = jnp.array(X, copy=True)
    assert_same(new(x, X, 2), (X * 2, X))
    assert x.is_deleted()


@pytest.mark.parametrize("load", [travel, travel_by_cloud])
@pytest.mark.parametrize("value", [power, in_a_pool, Model.method])
def test_a_decorated_function_is_pickled_by_its_name(load, value):
    assert load(value) is value
    assert load({"f": [value]})["f"][0] is value


def test_a_copy_of_a_decorated_function_is_a_new_one():
    for copied in (copy.copy, copy.deepcopy):
        new = copied(power)
        assert new is not power
        assert_same(new(X, n=3), X**3)


def test_copies_share_the_pool_and_the_stream_that_were_given():
    for copied in (copy.copy, copy.deepcopy):
        new = copied(in_a_pool)
        assert new.pool() == in_a_pool.pool()
        assert new._options.stream is in_a_pool._options.stream


@pytest.mark.parametrize("keyword", ["pool", "stream"])
def test_a_pool_or_a_stream_is_not_pickled(keyword):
    given: dict[str, Any] = {"pool": tg.graph_pool_handle(), "stream": tg.Stream()}
    captured = tg.capture(plain, **{keyword: given[keyword]})
    for dump in (pickle.dumps, cloudpickle.dumps):
        with pytest.raises(tg.ConfigError, match=f"captured with {keyword}=, cannot be") as caught:
            dump(captured)
        assert caught.value.anchor == "pickle"
    assert_same(captured(X), X * 3)


def test_functions_without_a_name_need_cloudpickle():
    factor = 5.0
    captured = tg.capture(lambda x: x * factor)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(captured)
    assert_same(travel_by_cloud(captured)(X), X * 5)


@pytest.mark.parametrize("copied", [copy.deepcopy, travel, travel_by_cloud])
def test_an_object_that_holds_its_own_captured_method(copied):
    model = Model(2.0)
    assert_same(model.attribute(X), X * 2)
    new = copied(model)
    new.scale = 3.0
    # The copied function is a method of the copied object.
    assert_same(new.attribute(X), X * 3)
    assert_same(model.attribute(X), X * 2)
    assert new.attribute.__wrapped__.__self__ is new
    assert_same(new.method(X), X * 3)
    assert_same(copied(model.attribute)(X), X * 2)


class Layer(eqx.Module):
    weight: jax.Array
    apply: Callable[..., Any] = eqx.field(static=True)


class Linear(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(4))
        self.apply = tripled


@dataclasses.dataclass
class Record:
    apply: Any
    value: Any


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("make", [lambda: Layer(X, tripled), Linear, lambda: Record(tripled, X)])
def test_modules_with_a_captured_function_are_copied(copied, make):
    assert_same(copied(make()).apply(X), X * 3)


def test_partials_and_trees():
    cubed = functools.partial(power, n=3)
    assert_same(cubed(X), X**3)
    assert_same(travel(cubed)(X), X**3)
    assert_same(copy.deepcopy(cubed)(X), X**3)
    of_partial = tg.capture(functools.partial(power.__wrapped__, n=4))
    assert_same(of_partial(X), X**4)
    assert_same(copy.deepcopy(of_partial)(X), X**4)

    tree = {"apply": power, "w": X}
    leaves, structure = jax.tree.flatten(tree)
    assert leaves[0] is power
    assert jax.tree.unflatten(structure, leaves)["apply"] is power
    assert jax.tree.map(lambda leaf: leaf, tree)["apply"] is power
    assert jax.tree.leaves(jax.tree.map(callable, tree)) == [True, False]


@pytest.mark.parametrize("make", [tg.Stream, tg.Event, tg.memory.MemPool])
def test_handles_are_shared_by_copies_and_not_pickled(make):
    handle = make()
    assert copy.copy(handle) is handle
    assert copy.deepcopy({"handle": handle})["handle"] is handle
    with pytest.raises(tg.ConfigError, match=f"a {make.__name__} cannot be pickled") as caught:
        pickle.dumps(handle)
    assert caught.value.anchor == "pickle"


MAIN = """
import pickle, sys
import cloudpickle, jax.numpy as jnp
import tracegraph as tg

@tg.capture(static_argnums=1)
def power(x, n):
    return x**n if n < 3 else power(x, 2) * x

assert pickle.loads(pickle.dumps(power)) is power
path = sys.argv[1]
with open(path, "wb") as file:
    cloudpickle.dump(power, file)
print("ok")
"""
OTHER = """
import pickle, sys
import jax.numpy as jnp

with open(sys.argv[1], "rb") as file:
    power = pickle.load(file)
assert str(power) == "<GraphedFunction power, 0 signatures>"
print(power(jnp.arange(3.0), 3))
"""


def test_a_function_of_main_reaches_another_process(tmp_path):
    """By value, as `cloudpickle` does with functions of `__main__`; it may call itself."""
    path = tmp_path / "power.pickle"
    assert run_program(MAIN, path) == "ok\n"
    assert run_program(OTHER, path) == "[0. 1. 8.]\n"
