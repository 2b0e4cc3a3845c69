"""Array: states, values, errors. Its way through JAX is in test_array_in_jax.py.

This file is past 400 lines because every state of an Array meets every method in it.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.host_memory import NumpyBuffer, make_array
from tracegraph.runtime.array import Array, ArrayState
from tracegraph.runtime.errors import InternalError, ReplayError, StaleOutputError
from tracegraph.runtime.jax_interop import ArrayImpl
from tracegraph.runtime.residence import Donation, Residence
from tracegraph.runtime.stream import default_stream

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
            f"  where: used at tests/runtime/test_array.py:{line} in "
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
        f"  where: read at tests/runtime/test_array.py:{line} in read_static_too_late; "
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


# The owner's and the user's ways to the memory.


def test_peek_shows_memory_without_a_copy():
    buffer, array = make_pair(FRESH)
    assert array.peek() is buffer.view
    array.settle()
    assert array.peek().tolist() == [1, 2, 3]
    assert not np.shares_memory(array.peek(), buffer.view)
    assert array.jax().tolist() == array.peek().tolist()
    array.consume()
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        array.peek()


def test_is_in_names_the_arena_until_the_array_has_left():
    buffer, array = make_pair(FRESH)
    assert array.is_in(buffer.arena)
    assert not array.is_in(object())
    array.settle()
    assert not array.is_in(buffer.arena)


def test_data_ptr_is_the_static_address_and_later_the_private_one():
    buffer, array = make_pair(RESIDENT)
    assert array.data_ptr() == buffer.address
    array.detach()
    assert array.data_ptr() != buffer.address
    assert array.data_ptr() == array.jax().unsafe_buffer_pointer()


@pytest.mark.parametrize("state", [RESIDENT, STATIC])
@pytest.mark.parametrize("wrap", [np.asarray, jnp.asarray, make_array])
def test_copy_writes_the_static_buffer(state, wrap):
    buffer, array = make_pair(state)
    assert array.sum() == 6
    assert array.copy_(wrap(np.array([7, 8, 9], np.float32))) is array
    assert buffer.view.tolist() == [7, 8, 9]
    assert array.tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("source", "got"),
    [
        (np.zeros(4, np.float32), "float32[4]"),
        (np.zeros((3, 1), np.float32), "float32[3,1]"),
        (np.zeros(3, np.float64), "float64[3]"),
        (1.0, "float"),
        ([1.0, 2.0, 3.0], "list"),
    ],
)
def test_copy_refuses_another_shape_or_dtype(source, got):
    buffer, array = make_pair(RESIDENT)
    with pytest.raises(ReplayError) as caught:
        array.copy_(source)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"`copy_` into `y`: wanted float32[3], got {got}"
    assert lines[1].startswith("  where: copy_ at tests/runtime/test_array.py:")
    assert lines[1].endswith(", argument 0 `src`")
    assert lines[2].startswith("  why:   a static buffer has a fixed shape and dtype")
    assert lines[3].endswith("python -m tracegraph error array-copy")
    assert buffer.view.tolist() == [1, 2, 3]


@pytest.mark.parametrize("is_settled", [False, True])
def test_copy_refuses_an_immutable_value(is_settled):
    buffer, array = make_pair(FRESH)
    if is_settled:
        array.settle()
    with pytest.raises(ReplayError) as caught:
        array.copy_(np.zeros(3, np.float32))
    lines = str(caught.value).splitlines()
    assert lines[0] == "`copy_` cannot write to this float32[3]: it is an immutable value"
    assert lines[1].startswith("  where: copy_ at tests/runtime/test_array.py:")
    assert lines[2].startswith("  why:   only donated state and static outputs")
    assert lines[3].startswith("  fix:   pass the new value to the next call")
    assert buffer.view.tolist() == [1, 2, 3]


def test_copy_into_a_stale_output_is_refused():
    buffer, array = make_pair(STATIC)
    buffer.replay(9)
    with pytest.raises(StaleOutputError):
        array.copy_(np.zeros(3, np.float32))
    assert buffer.view.tolist() == [9, 9, 9]


# Who keeps what alive.


def test_an_array_keeps_its_buffer_until_it_is_settled():
    buffer, array = make_pair(FRESH)
    reference = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert reference() is not None
    array.settle()
    gc.collect()
    assert reference() is None
    assert array.tolist() == [1, 2, 3]


@pytest.mark.parametrize("act", [lambda x: x.jax(), lambda x: x.consume()])
def test_a_read_or_consumed_fresh_array_lets_go_of_its_buffer(act):
    buffer, array = make_pair(FRESH)
    reference = weakref.ref(buffer)
    act(array)
    del buffer
    gc.collect()
    assert reference() is None


def test_a_dropped_array_goes_at_once():
    buffer, array = make_pair(FRESH)
    reference = weakref.ref(array)
    del array
    assert reference() is None
    assert buffer.snapshot_count == 0


def test_arrays_hold_nothing_but_their_slots():
    _, array = make_pair(FRESH)
    assert not hasattr(array, "__dict__")
    with pytest.raises(TypeError, match="unhashable"):
        hash(array)


# Threads.


def test_a_read_waits_for_the_replay_that_holds_the_lock():
    buffer, array = make_pair(FRESH)
    seen = []
    reader = threading.Thread(target=lambda: seen.append(array.tolist()))
    with buffer.clock.lock:
        assert array.is_ready()
        reader.start()
        array.settle()
        buffer.view[...] = 4
        buffer.clock.generation += 1
    reader.join()
    assert seen == [[1, 2, 3]]


def test_a_read_of_state_does_not_wait_for_the_replay_that_deletes_it():
    buffer, array = make_pair(RESIDENT)
    seen = []

    def read() -> None:
        with pytest.raises(RuntimeError, match="deleted"):
            array.tolist()
        seen.append(array.is_deleted())

    reader = threading.Thread(target=read, daemon=True)
    with buffer.clock.lock:
        buffer.clock.generation += 1
        reader.start()
        reader.join(timeout=240)
        assert seen == [True]


def test_is_ready_is_false_while_another_thread_holds_the_lock():
    buffer, array = make_pair(FRESH)
    answers = []
    with buffer.clock.lock:
        asker = threading.Thread(target=lambda: answers.append(array.is_ready()))
        asker.start()
        asker.join()
    assert answers == [False]
    assert array.is_ready()
    assert array.block_until_ready() is array


def test_readers_and_an_owner_agree_in_many_threads():
    buffer = NumpyBuffer(np.zeros(64, np.int32))
    mixed: list[list[int]] = []
    live: list[Array] = []

    def read() -> None:
        for array in list(live):
            value = array.tolist()
            if len(set(value)) != 1:
                mixed.append(value)

    for number in range(1, 60):
        array = Array(buffer, buffer.clock.generation, FRESH)
        live.append(array)
        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        buffer.replay(number, *live)
        for reader in readers:
            reader.join()
        live = live[-3:]
    assert not mixed


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
