"""Array: states, values, errors. Its way through JAX is in test_array_in_jax.py."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.host_memory import NumpyBuffer, make_array
from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.arrays.residence import Donation, Residence
from tracegraph.runtime.errors import InternalError, ReplayError, StaleOutputError
from tracegraph.runtime.jax_interop import ArrayImpl
from tracegraph.runtime.streams.stream import default_stream

FRESH, RESIDENT, STATIC = ArrayState.FRESH, ArrayState.RESIDENT, ArrayState.STATIC


def make_pair(state: ArrayState, value=(1.0, 2.0, 3.0)) -> tuple[NumpyBuffer, Array]:
    buffer = NumpyBuffer(np.array(value, np.float32))
    return buffer, Array(buffer, buffer.clock.generation, state)


# Note [States of an Array]: every arrow.


def test_fresh_is_read_lazily_and_once():
    buffer, array = make_pair(FRESH)
    assert buffer.snapshot_count == 0
    assert array.shape == (3,)
    assert array.dtype == np.float32
    assert len(array) == 3
    assert array.sharding == jnp.zeros(3).sharding
    assert buffer.snapshot_count == 0
    assert array.state is FRESH
    value = array.jax()
    assert type(value) is ArrayImpl
    assert array.jax() is value
    assert array.state is ArrayState.SETTLED
    assert buffer.snapshot_count == 1


def test_fresh_keeps_its_value_when_it_is_settled():
    buffer, array = make_pair(FRESH)
    buffer.replay(9, array)
    array.settle()
    assert array.state is ArrayState.SETTLED
    assert array.tolist() == [1, 2, 3]
    assert buffer.snapshot_count == 1


def test_fresh_keeps_its_value_when_it_was_read_before():
    buffer, array = make_pair(FRESH)
    assert array.sum() == 6
    buffer.replay(9, array)
    assert array.tolist() == [1, 2, 3]
    assert buffer.snapshot_count == 1


def test_a_value_read_from_a_buffer_does_not_change_with_it():
    for state in (FRESH, RESIDENT, STATIC):
        buffer, array = make_pair(state)
        value, seen = array.jax(), np.asarray(array)
        buffer.replay(9)
        assert value.tolist() == [1, 2, 3]
        assert seen.tolist() == [1, 2, 3]


@pytest.mark.parametrize("act", [lambda array: array.settle(), lambda array: array.jax()])
def test_an_owner_that_forgets_to_settle_is_found_out(act):
    buffer, array = make_pair(FRESH)
    buffer.replay(9)
    with pytest.raises(InternalError) as caught:
        act(array)
    assert str(caught.value).splitlines() == [
        "result `y` was overwritten before it had a copy",
        "  where: made by replay 1, the buffer now holds replay 2",
        "  why:   the owner of a buffer settles its live results before a replay; it did not",
        "  fix:   internal error in tracegraph: please report this text"
        "          python -m tracegraph error internal",
    ]


def make_leaf(**donations: Donation) -> tuple[NumpyBuffer, Array, Residence]:
    """Returns a resident array with what it shares with its set."""
    buffer = NumpyBuffer(np.array((1.0, 2.0, 3.0), np.float32))
    residence = Residence(buffer.clock.generation, donations)
    return buffer, Array(buffer, buffer.clock.generation, RESIDENT, residence), residence


def test_resident_shows_the_present_contents_and_caches_them():
    buffer, array, residence = make_leaf()
    assert not residence.values
    first = array.jax()
    assert array.jax() is first
    assert residence.values
    buffer.replay(9, array)
    residence.generation = buffer.clock.generation
    assert array.tolist() == [9, 9, 9]
    assert array.jax() is array.jax()
    assert first.tolist() == [1, 2, 3]
    assert buffer.snapshot_count == 2


@pytest.mark.parametrize("is_read", [False, True])
def test_a_resident_is_deleted_by_the_next_replay(is_read):
    buffer, array, _ = make_leaf(y=Donation("step", "state['w']"))
    if is_read:
        assert array.tolist() == [1, 2, 3]
    buffer.replay(9)
    assert array.is_deleted()
    assert (array.shape, array.dtype) == ((3,), np.float32)
    array.detach()
    assert array.state is RESIDENT
    for _ in range(2):
        with pytest.raises(ReplayError) as caught:
            array.tolist()
        line = test_a_resident_is_deleted_by_the_next_replay.__code__.co_firstlineno + 12
        assert str(caught.value).splitlines() == [
            "this float32[3] has been deleted: it was donated to `step`",
            f"  where: used at tests/runtime/arrays/test_array.py:{line} in "
            "test_a_resident_is_deleted_by_the_next_replay; it was `state['w']` of that call",
            "  why:   a donated array's memory now holds what that call computed, as under "
            "`jax.jit`",
            "  fix:   use what the call returned, or copy before the call: `jnp.copy(x)`, for a "
            "tree `jax.tree.map(jnp.copy, tree)`          python -m tracegraph error deleted-array",
        ]
        # Deleting it once more does not change why it is gone.
        array.delete()


EVERY_READ = {
    "jit": lambda x: jax.jit(jnp.sin)(x),
    "jnp": jnp.sin,
    "operator": lambda x: x + 1,
    "index": lambda x: x[0],
    "numpy": np.asarray,
    "jnp.asarray": lambda x: jnp.asarray(x).tolist(),
    "jnp.array": jnp.array,
    "dlpack": np.from_dlpack,
    "repr": repr,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "device_get": jax.device_get,
    "device_put": jax.device_put,
    "block_until_ready": jax.block_until_ready,
    "is_ready": lambda x: x.is_ready(),
    "vmap": jax.vmap(jnp.sin),
    "eval in a list": lambda x: jnp.stack([x, x]),
    "peek": lambda x: x.peek(),
    "plain array": lambda x: x.jax(),
    "address": lambda x: x.data_ptr(),
    "device": lambda x: x.device,
    "copy_": lambda x: x.copy_(np.zeros(3, np.float32)),
    "record_stream": lambda x: x.record_stream(default_stream()),
}


@pytest.mark.parametrize("name", EVERY_READ)
def test_every_use_of_a_deleted_resident_raises(name):
    read = EVERY_READ[name]
    buffer, array, residence = make_leaf(y=Donation("step", "w"))
    read(array)
    buffer.replay(9)
    assert residence.generation != buffer.clock.generation
    with pytest.raises(ReplayError, match="it was donated to `step`"):
        read(array)


def test_a_consumed_array_says_what_took_it_first():
    for state in (FRESH, RESIDENT, STATIC):
        _, array = make_pair(state)
        array.consume(Donation("step", "w"))
        array.consume(Donation("other", "v"))
        array.delete()
        with pytest.raises(ReplayError, match="donated to `step`"):
            array.tolist()


@pytest.mark.parametrize("is_read", [False, True])
def test_a_detached_resident_keeps_its_value(is_read):
    buffer, array = make_pair(RESIDENT)
    if is_read:
        assert array.tolist() == [1, 2, 3]
    array.detach()
    array.detach()
    buffer.replay(9)
    assert array.tolist() == [1, 2, 3]
    assert array.state is ArrayState.SETTLED


def test_detaching_does_not_reuse_the_value_of_an_older_replay():
    buffer, array, residence = make_leaf()
    assert array.tolist() == [1, 2, 3]
    buffer.replay(5)
    residence.generation = buffer.clock.generation
    array.detach()
    assert array.tolist() == [5, 5, 5]


def test_settle_and_detach_leave_the_other_states_alone():
    for state in (RESIDENT, STATIC):
        _, array = make_pair(state)
        array.settle()
        assert array.state is state
    for state in (FRESH, STATIC):
        _, array = make_pair(state)
        array.detach()
        assert array.state is state


def read_static_too_late(array: Array) -> None:
    float(array[0])


@pytest.mark.parametrize("is_read", [False, True])
def test_a_static_output_read_after_the_next_replay_is_stale(is_read):
    buffer, array = make_pair(STATIC)
    if is_read:
        assert array.tolist() == [1, 2, 3]
    buffer.replay(9, array)
    with pytest.raises(StaleOutputError) as caught:
        read_static_too_late(array)
    line = read_static_too_late.__code__.co_firstlineno + 1
    assert str(caught.value).splitlines() == [
        "static output `y` was overwritten by a later replay",
        f"  where: read at tests/runtime/arrays/test_array.py:{line} in read_static_too_late; "
        "made by replay 1, the buffer now holds replay 2",
        '  why:   outputs="static" returns the static buffer itself, which every replay overwrites',
        "  fix:   copy it before the next call (`.copy()`), "
        'or capture with outputs="fresh"          python -m tracegraph error stale-output',
    ]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: jax.jit(jnp.sin)(x),
        lambda x: jnp.sin(x),
        lambda x: x + 1,
        lambda x: np.asarray(x),
        lambda x: repr(x),
        lambda x: jax.block_until_ready(x),
        lambda x: jax.device_get(x),
        lambda x: jnp.stack([x, x]),
        lambda x: pickle.dumps(x),
        lambda x: x.peek(),
    ],
)
def test_every_kind_of_read_notices_that_a_static_output_is_stale(read):
    buffer, array = make_pair(STATIC)
    read(array)
    buffer.replay(9)
    with pytest.raises(StaleOutputError, match="static output `y` was overwritten"):
        read(array)


# Deletion, as by donation.


@pytest.mark.parametrize("state", [FRESH, RESIDENT, STATIC])
@pytest.mark.parametrize("delete", [lambda x: x.consume(), lambda x: x.delete()])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_consumed_array_answers_like_a_deleted_jax_array(state, delete, is_read):
    buffer, array = make_pair(state)
    plain = jnp.array([1.0, 2.0, 3.0])
    assert not array.is_deleted()
    if is_read:
        assert array.sum() == 6
    delete(array)
    delete(array)
    plain.delete()
    assert array.is_deleted()
    assert array.shape == plain.shape
    assert array.dtype == plain.dtype
    for read in (np.asarray, lambda x: x + 1, jnp.sin, repr, pickle.dumps):
        with pytest.raises(RuntimeError) as wanted:
            read(plain)
        with pytest.raises(RuntimeError) as got:
            read(array)
        assert (
            str(got.value) == str(wanted.value) == ("Array has been deleted with shape=float32[3].")
        )
    for act in (jax.block_until_ready, Array.is_ready, Array.data_ptr, lambda x: x.device):
        with pytest.raises(RuntimeError, match="Array has been deleted"):
            act(array)
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        array.copy_(np.zeros(3, np.float32))
    buffer.replay(0, array)
    array.detach()
    assert array.is_deleted()


def test_an_array_donated_to_jit_is_deleted_and_its_buffer_untouched():
    for state in (FRESH, RESIDENT, STATIC):
        buffer, array = make_pair(state)
        jit = jax.jit(lambda x: x * 2, donate_argnums=0)
        assert jit(array).tolist() == [2, 4, 6]
        assert buffer.view.tolist() == [1, 2, 3]
        assert array.is_deleted()
        with pytest.raises(RuntimeError, match="Array has been deleted"):
            array.tolist()


# Copies leave the pool.


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: x.copy()])
def test_copies_are_plain_arrays(duplicate):
    buffer, array = make_pair(RESIDENT)
    duplicated = duplicate(array)
    assert type(duplicated) is ArrayImpl
    buffer.replay(9)
    assert duplicated.tolist() == [1, 2, 3]


@pytest.mark.parametrize("weak_type", [False, True])
def test_pickling_gives_a_plain_array(weak_type):
    array = make_array(np.float32(3.5), weak_type=weak_type)
    restored = pickle.loads(pickle.dumps(array))
    assert type(restored) is ArrayImpl
    assert restored.weak_type == weak_type
    assert restored == 3.5
