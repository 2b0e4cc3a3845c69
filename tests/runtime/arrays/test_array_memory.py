"""Array: its owner's and its user's ways to the memory, who keeps it, and the lock of replays."""

from __future__ import annotations

import gc
import threading
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.host_memory import NumpyBuffer, make_array
from tests.runtime.arrays.test_array import FRESH, RESIDENT, STATIC, make_pair
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.errors import ReplayError, StaleOutputError

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
    assert lines[1].startswith("  where: copy_ at tests/runtime/arrays/test_array_memory.py:")
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
    assert lines[1].startswith("  where: copy_ at tests/runtime/arrays/test_array_memory.py:")
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
