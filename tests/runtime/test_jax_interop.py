"""The door to private JAX: names, keys, aliases."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from tests.fakes.host_memory import NumpyBuffer, make_array
from tracegraph import jax_internals
from tracegraph.runtime.arrays import array_forwarding
from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.errors import UnsupportedError
from tracegraph.runtime.jax_interop import (
    PRIVATE_NAMES,
    ArrayImpl,
    alias_host_memory,
    carry_settings,
    is_row_major,
    load_private,
    make_aval,
    to_immutable,
    to_plain,
    to_row_major,
    unwrap_key,
    wrap_key,
)

IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def align(value: np.ndarray) -> np.ndarray:
    """Returns a copy that starts at a multiple of 64 bytes."""
    raw = np.zeros(value.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    view = raw[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    view[...] = value
    return view


def make_key_array(seed: int, implementation: str, state: ArrayState = ArrayState.FRESH):
    """Returns a key, and the same key around key data in a buffer, and the array there."""
    key = jax.random.key(seed, impl=implementation)
    array = make_array(jax.random.key_data(key), state)
    return key, wrap_key(key.dtype, array), array


def test_every_private_name_exists_and_has_a_reason():
    for path, reason in {**PRIVATE_NAMES, **jax_internals.PRIVATE_NAMES}.items():
        assert load_private(path, reason) is not None
        assert reason


@pytest.mark.parametrize("path", ["jax._src.core.no_such_name", "jax._src.no_such_module.name"])
def test_a_missing_private_name_is_refused_by_name(path):
    with pytest.raises(UnsupportedError) as caught:
        load_private(path, "the type of an array", door="runtime/x.py")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"JAX {jax.__version__} has no `{path}`"
    assert lines[1].startswith("  where: runtime/x.py, at `import tracegraph`")
    assert lines[2] == "  why:   JAX has no public name for it: the type of an array"
    assert 'pip install "jax>=0.10,<0.13"' in lines[3]
    assert lines[3].endswith("python -m tracegraph error unsupported-jax")


def test_importing_on_an_unknown_jax_raises_only_where_a_name_is_missing(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "99.0")
    module = importlib.import_module("tracegraph.runtime.jax_interop")
    assert [module.load_private(path, reason) for path, reason in PRIVATE_NAMES.items()]


def test_every_public_name_of_a_jax_array_is_answered():
    missing = [
        name for name in dir(ArrayImpl) if not name.startswith("_") and name not in vars(Array)
    ]
    assert not missing


def test_every_special_name_of_a_jax_array_is_answered():
    # These are those of any object, or belong to what an Array itself is in memory.
    own = {"__annotations__", "__del__", "__dict__", "__firstlineno__", "__numpy_dtype__"}
    own |= {"__static_attributes__", "__weakref__", "__release_buffer__"}
    special = [name for name in dir(ArrayImpl) if name.startswith("__") and name not in own]
    missing = [name for name in special if name not in dir(object) and name not in vars(Array)]
    assert not missing


def test_a_name_left_out_of_the_tables_would_be_noticed(monkeypatch):
    monkeypatch.setattr(array_forwarding, "METHODS", ("sum",))

    class Forgetful:
        pass

    array_forwarding.forward_names(Forgetful, to_plain, np.asarray)
    assert hasattr(Forgetful, "sum")
    assert not hasattr(Forgetful, "mean")


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float64, np.int64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, bool]
    + [np.complex64, np.complex128, np.uint32],
)
def test_alias_host_memory_shares_the_bytes(dtype):
    view = align(np.zeros((4, 3), dtype))
    alias = alias_host_memory(view, jax.devices()[0])
    assert alias is not None
    assert alias.dtype == view.dtype
    assert alias.unsafe_buffer_pointer() == view.ctypes.data
    view[1, 2] = 1
    assert np.asarray(alias).tobytes() == view.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_alias_host_memory_of_small_shapes(shape):
    alias = alias_host_memory(align(np.zeros(shape, np.float32)), jax.devices()[0])
    assert alias is not None
    assert alias.shape == shape


def test_alias_host_memory_says_when_jax_copies():
    device = jax.devices()[0]
    assert alias_host_memory(align(np.zeros(8, ml_dtypes.int4)), device) is None
    assert alias_host_memory(align(np.zeros(9, np.float32))[1:], device) is None


@pytest.mark.parametrize("weak_type", [False, True])
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, ml_dtypes.int4, ml_dtypes.float8_e4m3fn, np.complex128]
)
def test_to_immutable_keeps_value_dtype_and_weak_type(dtype, weak_type):
    value = np.array([1, 2, 3], dtype)
    aval = make_aval(value.shape, value.dtype, weak_type=weak_type)
    array = to_immutable(value.copy(), aval, jax.devices()[0])
    assert type(array) is ArrayImpl
    assert array.dtype == value.dtype
    assert array.weak_type == weak_type
    assert np.asarray(array).tobytes() == value.tobytes()


def test_to_immutable_looks_like_a_result_of_jit():
    result = jax.jit(lambda x: x + 1)(np.zeros(3, np.float32))
    array = to_immutable(np.ones(3, np.float32), result.aval, jax.devices()[0])
    assert array.committed == result.committed
    assert array.sharding == result.sharding
    assert array.devices() == result.devices()
    assert jax.typeof(array) == jax.typeof(result)


def test_to_plain_passes_other_values():
    plain = jnp.ones(3)
    assert to_plain(plain) is plain
    assert to_plain("text") == "text"
    assert type(to_plain(make_array(np.ones(3)))) is ArrayImpl


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_work_with_jax_random(implementation):
    plain, key, array = make_key_array(3, implementation)
    assert unwrap_key(key) is array
    assert unwrap_key(5) == 5
    assert isinstance(key, jax.Array)
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    assert jax.typeof(key) == jax.typeof(plain)
    assert (key == plain).item()
    assert jax.random.normal(key, (4,)).tolist() == jax.random.normal(plain, (4,)).tolist()
    assert (jax.random.split(key) == jax.random.split(plain)).all()
    assert (jax.random.fold_in(key, 2) == jax.random.fold_in(plain, 2)).item()
    assert jax.random.key_data(key).tolist() == jax.random.key_data(plain).tolist()
    assert jax.random.key_impl(key) == jax.random.key_impl(plain)
    assert repr(key) == repr(plain)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_go_through_transformations(implementation):
    plain, key, _ = make_key_array(4, implementation)

    def draw(k):
        return jax.random.uniform(k, (3,))

    wanted = draw(plain).tolist()
    assert jax.jit(draw)(key).tolist() == wanted
    assert jax.jit(lambda: draw(key))().tolist() == wanted
    assert jax.make_jaxpr(draw)(key).in_avals == jax.make_jaxpr(draw)(plain).in_avals
    assert jax.eval_shape(draw, key).shape == (3,)
    assert jax.device_put(key) == plain
    rows = jax.vmap(draw)(jnp.stack([plain, plain])).tolist()
    assert jax.vmap(draw)(jnp.stack([key, plain])).tolist() == rows
    _, drawn = jax.lax.scan(lambda k, _: (jax.random.split(k)[0], draw(k)), key, None, length=2)
    assert drawn[0].tolist() == wanted
    tree = jax.tree.map(lambda leaf: leaf, {"key": key})
    assert tree["key"] is key
    assert jax.block_until_ready(key) is key


def test_an_array_of_keys_indexes_and_iterates():
    keys = jax.random.split(jax.random.key(0), 3)
    wrapped = wrap_key(keys.dtype, make_array(jax.random.key_data(keys)))
    assert wrapped.shape == (3,)
    assert wrapped[1] == keys[1]
    assert [bool(a == b) for a, b in zip(wrapped, keys, strict=True)] == [True] * 3


def test_keys_settle_follow_and_are_consumed_with_their_array():
    plain, key, array = make_key_array(5, "threefry2x32")
    assert isinstance(array._buffer, NumpyBuffer)
    array._buffer.replay(0, array)
    assert (key == plain).item()

    _, resident, data = make_key_array(5, "threefry2x32", ArrayState.RESIDENT)
    other = jax.random.key(9)
    assert isinstance(data._buffer, NumpyBuffer)
    data._buffer.write(np.asarray(jax.random.key_data(other)))
    assert (resident == other).item()

    data.consume()
    assert resident.is_deleted()
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        jax.random.normal(resident)


def test_wrap_key_refuses_what_is_not_key_data():
    dtype = jax.random.key(0).dtype
    with pytest.raises(TypeError, match="invalid PRNG key data"):
        wrap_key(dtype, make_array(np.zeros(2, np.float32)))
    with pytest.raises(TypeError, match="invalid PRNG key data"):
        wrap_key(dtype, make_array(np.zeros(3, np.uint32)))


def test_to_plain_of_a_key_is_a_key_of_plain_data():
    plain, key, _ = make_key_array(6, "threefry2x32", ArrayState.RESIDENT)
    copy = to_plain(key)
    assert type(unwrap_key(copy)) is ArrayImpl
    assert (copy == plain).item()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1)])
def test_an_array_of_another_layout_is_brought_into_the_usual_one(order):
    array = jnp.arange(24.0).reshape(2, 3, 4)
    array = jax.device_put(array, Format(Layout(order), array.sharding))
    assert is_row_major(array) is (order == (0, 1, 2))
    usual = to_row_major(array)
    assert is_row_major(usual)
    assert (usual is array) is (order == (0, 1, 2))
    np.testing.assert_array_equal(usual, np.arange(24.0).reshape(2, 3, 4))


def test_there_is_one_layout_with_less_than_two_dimensions():
    assert is_row_major(jnp.ones(()))
    assert is_row_major(jnp.ones(3, jnp.bfloat16))


def test_settings_are_carried_to_another_thread_and_back():
    def read_type() -> np.dtype:
        return jax.dtypes.canonicalize_dtype(np.float64)

    with jax.enable_x64(True):
        carried = carry_settings(read_type)
    with ThreadPoolExecutor(1) as threads:
        seen = [threads.submit(read).result() for read in (read_type, carried, read_type)]
    assert seen == [np.float32, np.float64, np.float32]
    assert carried() == np.float64
    assert read_type() == np.float32


def test_settings_are_put_back_after_an_error():
    with jax.enable_x64(True):
        carried = carry_settings(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        carried()
    assert jax.dtypes.canonicalize_dtype(np.float64) == np.float32
