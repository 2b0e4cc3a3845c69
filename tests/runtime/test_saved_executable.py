"""Compiled functions of the CPU, taken apart and made again."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from tests.optimized import compile_as_for_users
from tests.processes import run_program
from tracegraph.runtime.jax_interop import (
    _cached_code,
    get_quick_call,
    keep_code,
    load_executable,
    save_executable,
)
from tracegraph.runtime.saved_executable import ArrayAval, SavedExecutable

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def compile_function(function: Any, *args: Any, **options: Any) -> jax.stages.Compiled:
    types = [jax.typeof(each) for each in args]
    # XLA:CPU writes only the code that it has compiled itself.
    with compile_as_for_users():
        return jax.jit(function, **options).lower(*types).compile()


def save(function: Any, *args: Any, **options: Any) -> SavedExecutable:
    return save_executable(compile_function(function, *args, **options))


def load(saved: SavedExecutable) -> jax.stages.Compiled:
    return load_executable(saved, jax.devices("cpu")[0])


def test_a_loaded_function_computes_the_same_bits():
    def function(x: jax.Array, scale: jax.Array, unused: jax.Array) -> tuple[jax.Array, jax.Array]:
        del unused
        return jnp.sin(x) @ x.T, scale * 2

    args = (jnp.asarray(X), jnp.asarray(2.0), jnp.zeros(3))
    saved = save(function, *args)
    assert (saved.kept, saved.arguments, saved.is_bare) == ((0, 1), 3, False)
    assert saved.inputs == (
        ArrayAval((8, 8), np.dtype("float32")),
        ArrayAval((), np.dtype("float32"), weak_type=True),
    )
    loaded = load(saved)
    for call in (loaded, get_quick_call(loaded)):
        result, scaled = call(*args)
        np.testing.assert_array_equal(result, compile_function(function, *args)(*args)[0])
        assert (float(scaled), scaled.weak_type) == (4.0, True)


def test_one_result_comes_bare_and_donated_memory_is_taken():
    saved = save(lambda x: x + 1, jnp.asarray(X), donate_argnums=0)
    assert saved.is_bare
    x = jnp.asarray(X)
    np.testing.assert_array_equal(load(saved)(x), X + 1)
    assert x.is_deleted()


def compile_and_keep() -> jax.stages.Compiled:
    jax.clear_caches()
    lowered = jax.jit(lambda x: jnp.cos(x) * 3 + x.T).lower(jnp.asarray(X))
    return keep_code(lowered.compile)()


def test_code_that_was_read_is_saved_as_it_was_read():
    # XLA writes such a program without its machine code.
    if not jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        pytest.skip("needs JAX's persistent cache, which tests use where there is no GPU")
    compile_and_keep()
    compiled = compile_and_keep()
    assert compiled in _cached_code, "JAX has compiled what is in its cache"
    saved = save_executable(compiled)
    assert saved is not None
    loaded = load(saved)
    np.testing.assert_array_equal(loaded(X), compiled(X))
    assert save_executable(loaded) is saved


def test_other_arguments_are_refused():
    loaded = load(save(lambda x: x + 1, jnp.asarray(X)))
    with pytest.raises(TypeError):
        loaded(jnp.zeros(3))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.pure_callback(np.sin, x, x),
        lambda x: (jax.debug.print("{}", x[0, 0]), x)[1],
        lambda x: io_callback(np.sin, x, x, ordered=True),
    ],
)
def test_what_calls_back_into_python_is_not_saved(function: Any):
    with pytest.raises(ValueError, match="it calls back into Python"):
        save(function, jnp.asarray(X))


class Stub:
    """Something else's attributes, but for some."""

    def __init__(self, of: Any, **attributes: Any) -> None:
        self._of = of
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def test_code_that_xla_cannot_write_is_not_saved():
    def refuse(_: Any) -> bytes:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: `LessThan` is not serializable.")

    compiled: Any = compile_function(jnp.sin, jnp.asarray(X))
    parts = compiled._executable._unloaded_executable
    code = Stub(parts.xla_executable, client=Stub(None, serialize_executable=refuse))
    executable = Stub(None, _unloaded_executable=Stub(parts, xla_executable=code))
    broken: Any = Stub(compiled, _executable=executable)
    with pytest.raises(ValueError, match=r"XLA cannot write its code .*LessThan"):
        save_executable(broken)


def test_code_that_was_read_is_saved_again():
    saved = save(lambda x: x - 1, jnp.asarray(X))
    assert save_executable(load(saved)) is saved


def test_code_that_is_none_and_records_that_do_not_fit_it_are_refused():
    saved = save(lambda x: x + 1, jnp.asarray(X))
    with pytest.raises(jax.errors.JaxRuntimeError):
        load(dataclasses.replace(saved, code=b"no code"))
    for field in ("inputs", "outputs"):
        with pytest.raises(ValueError, match="other arrays than its record says"):
            load(dataclasses.replace(saved, **{field: ()}))


LOAD_CHOLESKY = """
import pathlib, sys
import jax, numpy as np
from tracegraph.runtime.jax_interop import load_executable
from tracegraph.runtime.saved_executable import ArrayAval, SavedExecutable

aval = ArrayAval((8, 8), np.dtype("float32"))
code = pathlib.Path(sys.argv[1]).read_bytes()
saved = SavedExecutable("jit(f)", code, (aval,), (aval,), (0,), 1, is_bare=True)
x = np.eye(8, dtype=np.float32) * 4
assert np.array_equal(load_executable(saved, jax.devices()[0])(x), x / 2)
"""


def test_lapack_is_found_where_jax_has_not_lowered_a_call_of_it(tmp_path: pathlib.Path):
    saved = save(jnp.linalg.cholesky, jnp.asarray(X))
    path = tmp_path / "code"
    path.write_bytes(saved.code)
    run_program(LOAD_CHOLESKY, path)
