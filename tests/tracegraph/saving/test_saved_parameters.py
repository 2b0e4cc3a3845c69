"""Parameters, settings and closed-over arrays of saved functions."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.jax_internals import read_settings
from tracegraph.lowering.saved_lowering import SaveProblem
from tracegraph.runtime.errors import SavedFileError
from tracegraph.runtime.saving.record_codec import ContentProblem
from tracegraph.saving.held_arrays import name_arrays
from tracegraph.saving.plain_values import Names
from tracegraph.saving.saved_constants import SavedConstant, pack_constant, unpack_constants
from tracegraph.saving.saved_parameters import (
    SavedParameter,
    make_stand_in,
    pack_own_parameters,
    pack_parameters,
    unpack_parameters,
)
from tracegraph.saving.saved_settings import pack_settings, unpack_settings

WEIGHTS = {"w": jnp.ones(2), "b": jnp.zeros(2)}


def example(x: Any, /, n: int = 3, *rest: Any, scale: Any = jnp.sin, **named: Any) -> None: ...


def test_parameters_come_back() -> None:
    parameters = unpack_parameters(pack_parameters(example), Names())
    stand_in = make_stand_in("example", parameters)
    wanted = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in inspect.signature(example).parameters.values()
    ]
    assert list(inspect.signature(stand_in).parameters.values()) == wanted
    assert stand_in.__name__ == "example"
    with pytest.raises(AssertionError):
        stand_in(1)


def test_a_default_that_no_file_holds_is_shown_and_equals_nothing() -> None:
    def function(x: Any = np.ones(2), f: Any = lambda: 0) -> None: ...  # noqa: B008

    first, second = unpack_parameters(pack_parameters(function), Names())
    assert repr(first.default) == "array([1., 1.])"
    assert first.default != first.default.__class__("array([1., 1.])")
    assert second.default is not inspect.Parameter.empty


def test_a_wrapper_has_parameters_of_its_own() -> None:
    @functools.wraps(example)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return example(*args, **kwargs)

    assert [p.name for p in pack_parameters(wrapper)] == ["x", "n", "rest", "scale", "named"]
    assert [p.name for p in pack_own_parameters(wrapper)] == ["args", "kwargs"]
    assert [p.name for p in pack_parameters(dict)] == ["args", "kwargs"]


def test_parameters_that_no_function_has() -> None:
    good = SavedParameter("x", "KEYWORD_ONLY", has_default=False)
    for saved in (
        (SavedParameter("x", "KEYWORD", has_default=False),),
        (good, SavedParameter("y", "POSITIONAL_ONLY", has_default=False)),
        (good, good),
        (SavedParameter("not a name", "KEYWORD_ONLY", has_default=False),),
    ):
        with pytest.raises(ContentProblem):
            unpack_parameters(saved, Names())


def test_settings_come_back() -> None:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        tg.backends.matmul.allow_tf32, before = True, tg.backends.matmul.allow_tf32
        try:
            settings = read_settings()
            assert unpack_settings(pack_settings(settings), Names()) == settings
        finally:
            tg.backends.matmul.allow_tf32 = before
    assert unpack_settings(pack_settings(settings), Names()) == settings
    assert unpack_settings((), Names()) == read_settings()


def test_the_default_device_is_that_of_the_process_which_loads() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        saved = pack_settings(read_settings())
    assert unpack_settings(saved, Names()) == read_settings()


def test_a_mesh_is_an_object_of_its_process() -> None:
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        settings = read_settings()
    if settings == read_settings():
        pytest.skip("this JAX has no mesh among its settings")
    with pytest.raises(SaveProblem, match=r"JAX's setting .* an object of this process"):
        pack_settings(settings)


def apply(x: Any) -> Any:
    return x @ WEIGHTS["w"]


def test_arrays_are_named_by_the_variables_that_hold_them() -> None:
    inner, other = (jnp.ones(1), [jnp.ones(2)]), jnp.ones(3)

    def close(x: Any) -> Any:
        return x + inner[1][0]

    class Model:
        def __init__(self) -> None:
            self.kernel = jnp.ones(3)

        def call(self, x: Any) -> Any:
            return x + self.kernel

    model = Model()
    assert name_arrays(apply, [WEIGHTS["w"], other]) == ["WEIGHTS['w']", "constant 1"]
    assert name_arrays(close, [inner[1][0]]) == ["inner[1][0]"]
    assert name_arrays(model.call, [model.kernel]) == ["self['kernel']"]
    partial = functools.partial(close, other)
    assert name_arrays(partial, [other, WEIGHTS["b"]]) == ["args[0]", "constant 1"]
    assert name_arrays(max, [other]) == ["constant 0"]


def test_constants_are_read_or_given() -> None:
    saved = [
        pack_constant("a['x']", jnp.arange(4).reshape(2, 2), has_data=True),
        pack_constant("b", jnp.ones(2, jnp.bfloat16), has_data=False),
    ]
    assert str(saved[0]) == "a['x']: i32[2,2]"
    with pytest.raises(SavedFileError, match="needs 1 closed-over array"):
        unpack_constants(saved, None, "file")
    first, second = unpack_constants(saved, {"b": WEIGHTS["w"].astype(jnp.bfloat16)}, "file")
    np.testing.assert_array_equal(first, [[0, 1], [2, 3]])
    assert second.dtype == jnp.bfloat16
    for given in ({"b": jnp.ones(3, jnp.bfloat16)}, {"b": 1.0}, [second], {"c": second}):
        with pytest.raises(SavedFileError, match="has other arrays than the graphs of file"):
            unpack_constants(saved, given, "file")
    broken = SavedConstant("x", (3,), np.dtype(np.float32), b"1234")
    with pytest.raises(ContentProblem):
        unpack_constants([broken], None, "file")


def test_a_host_array_that_is_given_is_copied() -> None:
    given = np.ones(2, np.float32)
    (read,) = unpack_constants([pack_constant("a", given, has_data=True)], [given], "file")
    given[:] = 0
    np.testing.assert_array_equal(read, [1, 1])
