"""An Array can be used wherever a jax.Array can: every row is compared with the plain array."""

from __future__ import annotations

import io
import operator
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.fakes.host_memory import NumpyBuffer, make_array
from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.jax_interop import ArrayImpl

MATRIX = np.array([[1.5, 2.0, -3.0], [4.0, 0.5, 6.0]], np.float32)
DTYPES = (
    *(np.float32, np.float16, np.int32, np.uint8, np.complex64, bool),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4),
)
STATES = (ArrayState.FRESH, ArrayState.RESIDENT, ArrayState.STATIC)


def assert_same(got, wanted):
    """Asserts equal trees, types of leaves, dtypes, weak types and bytes."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.shape(one) == np.shape(other)
        assert np.asarray(one).dtype == np.asarray(other).dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        assert getattr(one, "weak_type", None) == getattr(other, "weak_type", None)


def assert_alike(function: Any, value: Any = MATRIX, state=ArrayState.FRESH):
    """Asserts that a function gives the same for the plain array and for ours."""
    assert_same(function(make_array(value, state)), function(jnp.asarray(value)))


BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.pow, divmod, operator.eq, operator.ne, operator.lt, operator.ge),
    *(operator.le, operator.gt),
]


@pytest.mark.parametrize("op", BINARY)
def test_operators_with_every_kind_of_partner(op):
    for partner in (2, 2.0, np.float32(2), np.full((2, 3), 2, np.float32), jnp.float32(2)):
        assert_alike(lambda x, partner=partner: op(x, partner))
        assert_alike(lambda x, partner=partner: op(partner, x))
    assert_alike(lambda x: op(x, make_array(MATRIX)))


@pytest.mark.parametrize(
    "op",
    [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift],
)
def test_integer_operators(op):
    value = np.array([1, 2, 3], np.int32)
    assert_alike(lambda x: op(x, 2), value)
    assert_alike(lambda x: op(2, x), value)
    assert_alike(lambda x: op(x, value), value)
    assert_alike(lambda x: op(value, x), value)


def test_unary_operators_and_matmul():
    for op in (operator.neg, operator.pos, abs, round):
        assert_alike(op)
    assert_alike(operator.invert, np.array([1, -2], np.int8))
    assert_alike(lambda x: x @ x.T)
    assert_alike(lambda x: MATRIX.T @ x)
    assert_alike(lambda x: x @ MATRIX.T)


def test_in_place_operators_give_new_arrays():
    array = kept = make_array(MATRIX)
    array += 1
    assert type(array) is ArrayImpl
    assert kept.tolist() == MATRIX.tolist()
    with pytest.raises(TypeError, match="immutable"):
        kept[0] = 1  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize(
    "function",
    [
        jnp.asarray,
        jnp.array,
        jnp.sin,
        lambda x: jnp.add(x, x),
        lambda x: jnp.add(1, x),
        lambda x: jnp.where(x > 1, x, 0),
        lambda x: jnp.stack([x, x]),
        lambda x: jnp.concatenate([x, MATRIX]),
        lambda x: jnp.dot(x, x.T),
        lambda x: jnp.einsum("ij,kj->ik", x, x),
        lambda x: jnp.linalg.norm(x),
        lambda x: jnp.array_equal(x, x),
        lambda x: jnp.isclose(x, x),
        lambda x: jnp.argmax(x, axis=1),
        lambda x: jax.lax.add(x, x),
        lambda x: jax.lax.dynamic_slice(x, (0, 1), (2, 2)),
        lambda x: jax.nn.softmax(x),
        lambda x: jnp.broadcast_to(x, (4, 2, 3)),
        lambda x: jnp.zeros_like(x),
        lambda x: jnp.arange(6).reshape(x.shape),
        lambda x: x[0],
        lambda x: x[1, 2],
        lambda x: x[:, ::-1],
        lambda x: x[..., None],
        lambda x: x[np.array([1, 0])],
        lambda x: x[x > 1],
        lambda x: jnp.arange(5)[x[0, 1].astype(int)],
        lambda x: x.at[0].set(7),
        lambda x: x.at[1, 1].add(1),
        lambda x: x.sum(axis=0),
        lambda x: x.reshape(3, 2),
        lambda x: x.astype(np.int32),
        lambda x: x.T,
        lambda x: x.mT,
        lambda x: x.mean(),
        lambda x: (x.max(), x.min(), x.std(), x.var(), x.prod(), x.argmax(), x.any(), x.all()),
        lambda x: (x.ravel(), x.flatten(), x.squeeze(), x.transpose(), x.swapaxes(0, 1)),
        lambda x: (x.cumsum(), x.clip(0, 1), x.round(), x.sort(), x.argsort(), x.take(0)),
        lambda x: (x.real, x.imag, x.conj(), x.copy(), x.view(np.int32), x.dot(x.T)),
        lambda x: (x.nonzero(), x.diagonal(), x.trace(), x.repeat(2), x.ptp()),
        lambda x: x.to_device(jax.devices()[0]),
    ],
)
def test_functions_methods_and_indexing(function):
    assert_alike(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.nbytes, x.itemsize, x.size, x.ndim, x.shape, len(x)),
        lambda x: (x.on_device_size_in_bytes(), x.tobytes(), x.tolist(), x[0, 0].item()),
        lambda x: [row.tolist() for row in x],
        lambda x: [row.tolist() for row in reversed(x)],
        lambda x: (1.5 in x[0], 99 in x.ravel()),
        lambda x: jnp.result_type(x),
        lambda x: jnp.shape(x),
        lambda x: jnp.array_equal(x, x).item(),
    ],
)
def test_answers_that_are_not_arrays(function):
    assert function(make_array(MATRIX)) == function(jnp.asarray(MATRIX))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python classes have no __buffer__ yet")
def test_the_buffer_protocol_gives_read_only_memory():
    view = memoryview(make_array(MATRIX))
    assert view.readonly
    assert view.tobytes() == MATRIX.tobytes()


def loss(x):
    return (jnp.sin(x) * x).sum()


@pytest.mark.parametrize("state", STATES[:2])
@pytest.mark.parametrize(
    "transform",
    [
        lambda x: jax.jit(loss)(x),
        lambda x: jax.jit(lambda y: y + x)(x),
        lambda x: jax.jit(lambda: x * 2)(),
        lambda x: jax.jit(lambda y: y * 2, donate_argnums=0)(x),
        lambda x: jax.grad(loss)(x),
        lambda x: jax.jit(jax.value_and_grad(loss))(x),
        lambda x: jax.jvp(loss, (x,), (x,)),
        lambda x: jax.vjp(jnp.sin, x)[1](x),
        lambda x: jax.vjp(lambda y: (y, y), x)[1]((x, x)),
        lambda x: jax.linearize(jnp.sin, x)[1](x),
        lambda x: jax.hessian(loss)(x),
        lambda x: jax.jacfwd(jnp.sin)(x),
        lambda x: jax.jacrev(jnp.sin)(x),
        lambda x: jax.vmap(jnp.sum)(x),
        lambda x: jax.vmap(lambda a, b: a @ b, in_axes=(0, None))(x, x[0]),
        lambda x: jax.lax.scan(lambda c, row: (c + row, row.sum()), x[0], x),
        lambda x: jax.lax.scan(lambda c, _: (c + x, x.sum()), x, None, length=2),
        lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + x, x),
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 50, lambda c: c + x, x),
        lambda x: jax.lax.cond(x[0, 0] > 1, jnp.sin, jnp.cos, x),
        lambda x: jax.checkpoint(loss)(x),
        lambda x: jax.jit(loss).lower(x).compile()(x),
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((2, 3), np.float32), x),
        lambda x: jax.device_put(x),
        lambda x: jax.device_put(x, jax.devices()[0]),
        lambda x: jax.device_put({"a": x, "b": [x]}, jax.devices()[0]),
        lambda x: jax.device_get(x),
        lambda x: jax.block_until_ready(x),
        lambda x: jax.block_until_ready({"a": x, "b": x})["b"],
        lambda x: jax.tree.map(lambda a, b: a + b, {"k": x}, {"k": x}),
        lambda x: jax.lax.stop_gradient(x),
        lambda x: jax.jit(lambda a, *, b: a + b)(x, b=x),
    ],
)
def test_transformations(transform, state):
    assert_alike(transform, state=state)


def test_tracing_sees_the_same_types():
    plain, array = jnp.asarray(MATRIX), make_array(MATRIX)
    assert jax.typeof(array) == jax.typeof(plain)
    assert str(jax.make_jaxpr(loss)(array)) == str(jax.make_jaxpr(loss)(plain))
    assert jax.eval_shape(jnp.sin, array) == jax.eval_shape(jnp.sin, plain)
    assert array.jax().aval == plain.aval
    assert isinstance(array, jax.Array)


def test_a_function_that_jit_has_seen_is_not_traced_again():
    traces = []

    def function(x):
        traces.append(1)
        return x + 1

    jitted = jax.jit(function)
    jitted(jnp.sin(jnp.asarray(MATRIX)))
    jitted(make_array(MATRIX))
    jitted(make_array(MATRIX, ArrayState.RESIDENT))
    assert traces == [1]


def test_what_jax_keeps_does_not_change_with_the_buffer():
    buffer = NumpyBuffer(MATRIX)
    array = Array(buffer, buffer.clock.generation, ArrayState.RESIDENT)
    _, pull_back = jax.vjp(lambda x: x * x, array)
    jaxpr = jax.make_jaxpr(lambda y: y + array)(1.0)
    jitted = jax.jit(lambda y: y + array)
    wanted = jitted(0.0).tolist()
    buffer.replay(100)
    assert pull_back(jnp.ones((2, 3)))[0].tolist() == (2 * MATRIX).tolist()
    assert jitted(0.0).tolist() == wanted
    (constant,) = jaxpr.consts
    assert type(constant) is ArrayImpl
    assert constant.tolist() == MATRIX.tolist()


def test_conversions_to_numpy():
    array = make_array(MATRIX)
    for convert in (np.asarray, np.array, jax.device_get, lambda x: np.asarray(x, np.float64)):
        assert convert(array).tolist() == MATRIX.tolist()
        assert type(convert(array)) is np.ndarray
    assert np.asarray(array, np.float64).dtype == np.float64
    assert not np.asarray(array).flags.writeable
    assert np.array(array).flags.writeable
    assert np.sum(array) == MATRIX.sum()
    assert np.sin(array).tolist() == np.sin(MATRIX).tolist()
    assert np.array_equal(array, MATRIX)
    assert np.concatenate([array, array]).shape == (4, 3)
    assert (np.multiply(MATRIX, array) == MATRIX * MATRIX).all()


def test_conversions_to_python():
    one = make_array(np.float32(3.0))
    assert (float(one), int(one), bool(one), complex(one)) == (3.0, 3, True, 3 + 0j)
    assert one.item() == 3.0
    assert f"{one:.2f}" == "3.00"
    whole = make_array(np.int32(2))
    assert operator.index(whole) == 2
    assert [10, 20, 30][whole] == 30
    assert "ab" * whole == "abab"
    assert hex(whole) == "0x2"


@pytest.mark.parametrize(
    ("convert", "value"),
    [(float, MATRIX), (bool, MATRIX), (len, np.float32(1)), (iter, np.float32(1)), (hash, MATRIX)]
    + [(operator.index, np.float32(1)), (int, MATRIX), (next, MATRIX)],
)
def test_refused_conversions_raise_what_jax_raises(convert, value):
    with pytest.raises((TypeError, ValueError)) as wanted:
        convert(jnp.asarray(value))
    with pytest.raises(type(wanted.value)) as got:
        convert(make_array(value))
    name = f"{ArrayImpl.__module__}.{ArrayImpl.__qualname__}"
    texts = [str(each.value) for each in (got, wanted)]
    for wording in (name, "ArrayImpl", "tracegraph.Array"):
        texts = [text.replace(wording, "Array") for text in texts]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("value", [MATRIX, np.float32(1), np.zeros((0, 3), np.int32)])
@pytest.mark.parametrize("weak_type", [False, True])
def test_it_prints_like_a_jax_array(value, weak_type):
    array = make_array(value, weak_type=weak_type)
    plain = make_array(value, weak_type=weak_type).jax()
    assert repr(array) == repr(plain)
    assert str(array) == str(plain)
    assert f"{array}" == f"{plain}"


def test_places_and_sizes_are_those_of_a_result_of_jit():
    plain = jax.jit(lambda x: x + 0)(MATRIX)
    names = ("sharding", "device", "committed", "weak_type", "nbytes", "itemsize", "format")
    names += ("is_fully_addressable", "is_fully_replicated", "_committed")
    for state in STATES:
        array = make_array(MATRIX, state)
        for name in names:
            assert getattr(array, name) == getattr(plain, name), name
        assert array.devices() == plain.devices()
        assert array.platform() == plain.platform()
        assert array.on_device_size_in_bytes() == plain.on_device_size_in_bytes()
        (shard,), (other,) = array.addressable_shards, plain.addressable_shards
        assert (shard.device, shard.index) == (other.device, other.index)
        assert shard.data.tolist() == MATRIX.tolist()
        assert array.addressable_data(0).tolist() == MATRIX.tolist()
        assert array.unsafe_buffer_pointer() == array.jax().unsafe_buffer_pointer()
        assert array.is_ready() == plain.is_ready()
        array.copy_to_host_async()
        assert array.block_until_ready() is array
        assert not hasattr(array, "__cuda_array_interface__")
        assert array.__array_namespace__() is jnp


def test_dlpack_and_saving():
    array: Any = make_array(MATRIX)
    assert np.from_dlpack(array).tolist() == MATRIX.tolist()
    assert jax.dlpack.from_dlpack(array).tolist() == MATRIX.tolist()
    plain: Any = jnp.asarray(MATRIX)
    assert array.__dlpack_device__() == plain.__dlpack_device__()
    file = io.BytesIO()
    jnp.save(file, array)
    file.seek(0)
    assert jnp.load(file).tolist() == MATRIX.tolist()


@pytest.mark.parametrize("shape", [(), (3,), (0, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_shapes(dtype, shape):
    value = np.ones(shape, dtype)
    assert_alike(lambda x: x + x, value)
    assert_alike(lambda x: jax.jit(lambda y: (y, jnp.stack([y, y])))(x), value)
    assert_alike(lambda x: x.real.astype(np.float32), value)
    assert_alike(lambda x: np.asarray(x), value)
    buffer = NumpyBuffer(value)
    array = Array(buffer, buffer.clock.generation, ArrayState.FRESH)
    buffer.replay(np.zeros(shape, dtype), array)
    assert_same(array.jax(), jnp.asarray(value))
    assert array.data_ptr() == array.unsafe_buffer_pointer()


def test_64_bit_values_stay_64_bit():
    array = make_array(np.array([1e300, 2.0], np.float64))
    assert array.jax().dtype == np.float64
    assert np.asarray(array).tolist() == [1e300, 2.0]
    with jax.enable_x64(True):
        assert (array * 2).tolist() == [2e300, 4.0]


def test_weak_types_adopt_the_dtype_of_their_partner():
    weak = make_array(np.float32(2.0), weak_type=True)
    half = jnp.ones(3, jnp.bfloat16)
    assert (weak * half).dtype == jnp.bfloat16
    assert (half * weak).dtype == jnp.bfloat16
    assert jax.jit(operator.mul)(weak, half).dtype == jnp.bfloat16
    assert weak.weak_type
    assert weak.jax().weak_type
    strong = make_array(np.float32(2.0))
    assert (strong * half).dtype == np.float32
