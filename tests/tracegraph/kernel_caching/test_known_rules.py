"""What a name does not tell: rules of users, settings around an op, arrays in parameters."""

from __future__ import annotations

import functools
import importlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import internal
from equinox.internal import unvmap_any
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.extend.random import define_prng_impl
from jax.interpreters import mlir

import tracegraph as tg
from tests.tracegraph.kernel_caching.test_program_key import X, find_key
from tracegraph.jax_internals import list_lowering_rules
from tracegraph.kernel_caching import surroundings
from tracegraph.kernel_caching.known_rules import describe_rules
from tracegraph.kernel_caching.program_key import NoKey
from tracegraph.runtime import installed_packages
from tracegraph.runtime.jax_interop import make_mark


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(tmp_path))


def make_primitive(rule: Any) -> Primitive:
    primitive = Primitive("scale")
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, rule)
    return primitive


def make_scale(factor: float) -> Primitive:
    return make_primitive(mlir.lower_fun(lambda x: x * factor, multiple_results=False))


def find_rule(primitive: Any) -> Any:
    (rule,) = list_lowering_rules(primitive)
    return rule


def add_one(x: jax.Array, **_: Any) -> jax.Array:
    return x + 1


@pytest.fixture
def sine() -> Iterator[Primitive]:
    rule = find_rule(lax.sin_p)
    yield lax.sin_p
    mlir.register_lowering(lax.sin_p, rule)


def test_primitives_of_jax_and_of_ours_are_known():
    known = [each for each in vars(lax).values() if isinstance(each, Primitive)]
    assert len(known) > 50
    assert None not in map(describe_rules, known)
    leave_mark = make_mark("tg_test")
    jaxpr = jax.make_jaxpr(lambda x: (leave_mark(1, 2), jnp.sin(x)))(1.0)
    assert all(describe_rules(equation.primitive) is not None for equation in jaxpr.eqns)
    assert len(jaxpr.eqns) == 2


def test_a_rule_of_a_user_has_no_key():
    def call(x: jax.Array) -> jax.Array:
        return make_scale(2.0).bind(x)

    with pytest.raises(NoKey, match="`scale` is lowered by a rule that is not JAX's"):
        find_key(call)


def test_a_rule_of_jax_for_a_primitive_of_a_user_has_no_key():
    # It is of JAX, and what it is given is not.
    primitive = make_primitive(jax.ffi.ffi_lowering("target"))
    with pytest.raises(NoKey, match="`scale`"):
        find_key(lambda x: primitive.bind(x))


SCALERS = """
from jax.extend.core import Primitive
from jax.interpreters import mlir

def make(factor):
    primitive = Primitive("scale")
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x * factor, multiple_results=False))
    return primitive
"""


@pytest.fixture
def scalers(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Installs a package that makes primitives; yields the folder that it is in."""
    (tmp_path / "scalers").mkdir()
    (tmp_path / "scalers" / "__init__.py").write_text(SCALERS)
    (tmp_path / "scalers-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(surroundings, "_IMPORTED", time.time() + 60)
    forget_packages()
    yield tmp_path
    sys.modules.pop("scalers", None)
    forget_packages()


def forget_packages() -> None:
    for function in (surroundings.describe_package, surroundings._digest_packages):
        function.cache_clear()
    installed_packages.list_packages.cache_clear()


def find_scaled_key(factor: Any) -> str:
    forget_packages()
    primitive = importlib.import_module("scalers").make(factor)
    return find_key(lambda x: primitive.bind(x))


def test_rules_of_an_installed_package_are_what_its_files_say(scalers: pathlib.Path):
    keys = [find_scaled_key(2.0), find_scaled_key(3.0)]
    assert find_scaled_key(2.0) == keys[0]
    (scalers / "scalers" / "rule.py").write_text("FACTOR = 2")
    keys.append(find_scaled_key(2.0))
    (scalers / "another-1.0.dist-info").mkdir()
    keys.append(find_scaled_key(2.0))
    assert len(set(keys)) == 4


def test_a_rule_of_an_installed_package_that_holds_an_object_has_no_key(scalers: pathlib.Path):
    del scalers
    assert find_scaled_key(None)
    with pytest.raises(NoKey, match="`scale` is lowered by a rule that is not JAX's"):
        find_scaled_key(np.float32(2.0))


def test_what_bears_the_name_of_a_package_is_not_of_it(scalers: pathlib.Path):
    del scalers
    make = importlib.import_module("scalers").make

    @functools.wraps(make)
    def twice(x: jax.Array) -> jax.Array:
        return 2 * x

    class Wrapper:
        __wrapped__, __module__ = make, "scalers"

        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * x

    for rule in (twice, Wrapper()):
        primitive = make_primitive(mlir.lower_fun(rule, multiple_results=False))
        with pytest.raises(NoKey, match="`scale`"):
            find_key(lambda x, p=primitive: p.bind(x))


def test_a_rule_of_a_package_that_changed_in_a_running_process_has_no_key(
    scalers: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    del scalers
    monkeypatch.setattr(surroundings, "_IMPORTED", time.time() - 60)
    with pytest.raises(NoKey, match="`scale`"):
        find_scaled_key(2.0)


def test_a_rule_of_an_editable_package_has_no_key(scalers: pathlib.Path):
    (scalers / "scalers-1.0.dist-info").rmdir()
    with pytest.raises(NoKey, match="`scale`"):
        find_scaled_key(2.0)


@pytest.mark.usefixtures("folder")
def test_a_loop_of_equinox_is_found_again():
    def solve(x: jax.Array) -> jax.Array:
        return internal.while_loop(
            lambda c: unvmap_any(c < 9), lambda c: c * 2, x, kind="bounded", max_steps=8
        )

    for hits in (0, 1):
        before = tg.kernel_cache.info()
        np.testing.assert_array_equal(tg.capture(solve)(X), jax.jit(solve)(X))
        assert tg.kernel_cache.info().hits == before.hits + hits
    assert tg.kernel_cache.info().entries == 1


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (find_rule(lax.cos_p), jnp.cos),
        (mlir.lower_fun(add_one, multiple_results=False), add_one),
    ],
    ids=["of JAX", "of the user"],
)
@pytest.mark.usefixtures("folder")
def test_another_rule_for_a_primitive_of_jax_is_used(sine: Primitive, rule: Any, expected: Any):
    def call(x: jax.Array) -> jax.Array:
        return lax.cond(x.sum() > 0, lax.sin, lax.neg, x)

    np.testing.assert_allclose(tg.capture(call)(X), np.sin(X), rtol=1e-6)
    mlir.register_lowering(sine, rule)
    jax.clear_caches()
    np.testing.assert_allclose(tg.capture(call)(X), expected(X), rtol=1e-6)


@pytest.mark.usefixtures("folder")
def test_the_rule_of_now_is_used():
    for factor in (2.0, 3.0):
        primitive = make_scale(factor)
        np.testing.assert_array_equal(
            tg.capture(lambda x, p=primitive: p.bind(x), name="scale")(X), factor * X
        )
    assert tg.kernel_cache.info().entries == 0


def draw(is_partitionable: bool) -> Callable[[Any], Any]:
    def run(key: Any) -> Any:
        with jax.threefry_partitionable(is_partitionable):
            return jax.random.bits(key, (3, 5))

    return run


@pytest.mark.usefixtures("folder")
def test_settings_inside_of_the_function_count():
    key = jax.random.key(0)
    assert find_key(draw(True), key) != find_key(draw(False), key)
    for is_partitionable in (True, False):
        step = tg.capture(draw(is_partitionable), name="draw")
        np.testing.assert_array_equal(step(key), draw(is_partitionable)(key))
    assert tg.kernel_cache.info().entries == 2


def test_metadata_for_xla_count():
    def mark(text: str | None, x: jax.Array) -> jax.Array:
        with set_xla_metadata(option=text):
            return jnp.sin(x)

    keys = {find_key(functools.partial(mark, text)) for text in (None, "1", "2", "1")}
    assert len(keys) == 3


def test_random_keys_of_a_user_have_no_key():
    implementation = define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.zeros(2, jnp.uint32),
        split=lambda key, shape: jnp.zeros((*shape, 2), jnp.uint32),
        random_bits=lambda key, width, shape: jnp.full(shape, 7, jnp.uint32),
        fold_in=lambda key, data: key,
        name="seven",
        tag="sv",
    )
    key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl=implementation)
    with pytest.raises(NoKey, match="random keys of an implementation that is not JAX's"):
        find_key(lambda key: jax.random.bits(key, (3,)), key)


@pytest.mark.parametrize("name", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_of_jax_have_keys(name: str):
    key = jax.random.key(0, impl=name)
    keys = {find_key(lambda key, n=n: jax.random.bits(key, (n,)), key) for n in (3, 4)}
    assert len(keys) == 2


MANY = np.arange(2000)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (MANY, np.where(MANY == 1000, 0, MANY)),
        (np.array([0.1234567891]), np.array([0.1234567892])),
        (np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int64)),
    ],
    ids=["in the middle", "last digits", "dtype"],
)
def test_arrays_in_parameters_count_by_their_bytes(one: Any, other: Any):
    def call(value: Any, x: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("target", result)(x, table=value)

    keys = [find_key(functools.partial(call, value)) for value in (one, other, one.copy())]
    assert keys[0] == keys[2] != keys[1]
