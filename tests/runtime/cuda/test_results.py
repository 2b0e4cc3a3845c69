"""Results in memory of JAX's own: kept, dropped, read, by several threads and in any order."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.core import Tracer

from tests.fakes.cuda_on_host import (
    CudaOnHost,
    floats,
    kernel,
    make_cuda_replay,
    make_device,
    place,
)
from tests.fakes.definitions import make_copy, make_definition, make_stage
from tests.fakes.fake_state import MisuseError
from tracegraph.runtime.arena import Arena
from tracegraph.runtime.arrays.array import ArrayState
from tracegraph.runtime.cuda import jax_order
from tracegraph.runtime.cuda.memory import jax_arrays
from tracegraph.runtime.cuda.memory.jax_provider import JaxProvider
from tracegraph.runtime.cuda.results import MAX_SPARES, STOCK, ResultPort
from tracegraph.runtime.errors import CudaError
from tracegraph.runtime.jax_interop import make_aval
from tracegraph.runtime.replay import Replay

DOUBLE = make_definition(make_stage(kernel("double", "x", "y")))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaOnHost]:
    """A device that does nothing before the host waits; memory it works on must be kept."""
    device = make_device(monkeypatch, is_deferred=True)
    yield device
    # What keeps the memory of pending work is dropped with the test.
    with device.context.order.use_context():
        device.driver.synchronize_context()


def find_port(replay: Replay) -> ResultPort:
    """Returns the port of `DOUBLE`'s result."""
    taker: Any = replay.takers["y"]
    return taker.__self__


def call(replay: Replay, value: float) -> Any:
    replay.settle()
    replay.load([(0, floats([value] * 4))])
    replay.launch()
    return replay.make_taker(0)()


def test_results_that_are_kept_keep_their_values(late: CudaOnHost) -> None:
    replay = make_cuda_replay(late, DOUBLE)
    results = [call(replay, value) for value in range(40)]
    assert len({result.data_ptr() for result in results}) == 40
    assert [float(result[0]) for result in results] == [2 * value for value in range(40)]


def test_a_loop_alternates_between_two_pieces_of_memory(device: CudaOnHost) -> None:
    replay, result, addresses = make_cuda_replay(device, DOUBLE), None, []
    for value in range(10):
        result = call(replay, value)
        addresses.append(result.data_ptr())
    assert result is not None
    assert len(set(addresses)) == 2
    assert all(one != other for one, other in itertools.pairwise(addresses))


def test_the_memory_of_a_result_that_is_dropped_unread_serves_again(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DOUBLE)
    first = call(replay, 1).data_ptr()
    sends = device.driver.count_calls("send")
    assert call(replay, 2).data_ptr() == first
    assert device.driver.count_calls("send") == sends


def test_a_result_that_was_read_survives_later_replays(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DOUBLE)
    result = call(replay, 1)
    plain = result.jax()
    del result
    for value in range(2, 30):
        assert call(replay, value).data_ptr() != plain.unsafe_buffer_pointer()
    np.testing.assert_array_equal(plain, [2] * 4)


def test_a_copy_of_a_result_leaves_it_readable(late: CudaOnHost) -> None:
    replay = make_cuda_replay(late, DOUBLE)
    result = call(replay, 3)
    copy = result.peek().copy()
    assert copy.address != result.data_ptr()
    assert copy.copy() is copy
    np.testing.assert_array_equal(result, [6] * 4)
    np.testing.assert_array_equal(copy.to_jax(), [6] * 4)


def test_dropping_a_result_changes_nothing_that_a_launch_decides(device: CudaOnHost) -> None:
    # Another thread may drop it between any two lines of a launch.
    replay = make_cuda_replay(device, DOUBLE)
    port, result = find_port(replay), call(replay, 1)
    before = (port.is_taken, port._piece)
    del result
    assert (port.is_taken, port._piece) == before


def test_spares_are_few(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DOUBLE)
    results = [call(replay, value) for value in range(3 * STOCK)]
    results.clear()
    assert len(find_port(replay).spares) <= MAX_SPARES
    assert float(call(replay, 5)[0]) == 10


def test_a_large_result_has_no_stock(device: CudaOnHost) -> None:
    kind = jax.ShapeDtypeStruct((1 << 15,), np.float32)
    definition = make_definition(
        make_stage(make_copy("x", "y", 1 << 17)),
        types={"x": kind, "y": kind},
        offsets={"x": 0, "y": 1 << 17},
        arena_bytes=1 << 18,
    )
    replay = make_cuda_replay(device, definition)
    replay.load([(0, np.ones(1 << 15, np.float32))])
    replay.launch()
    result = replay.make_taker(0)()
    assert find_port(replay).spares == []
    assert float(result.sum()) == 1 << 15


def test_results_of_several_threads(device: CudaOnHost) -> None:
    replay, wrong = make_cuda_replay(device, DOUBLE), []

    def work(number: int) -> None:
        kept = []
        for turn in range(40):
            value = 1000 * number + turn
            with replay.clock.lock:
                result = call(replay, value)
            if turn % 3:
                kept.append((value, result))
        wrong.extend(v for v, result in kept if np.asarray(result).tolist() != [2 * v] * 4)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_result_does_not_keep_the_arena(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DOUBLE)
    result, arena = call(replay, 4), weakref.ref(replay.arena)
    assert device.allocator.statistics.all.reserved_bytes.current > 0
    del replay
    gc.collect()
    assert arena() is None
    assert device.allocator.statistics.all.reserved_bytes.current == 0
    assert result.state is ArrayState.FRESH
    np.testing.assert_array_equal(result, [8] * 4)


def test_everything_goes_with_the_last_result(device: CudaOnHost) -> None:
    before = device.driver.live_handles()
    replay = make_cuda_replay(device, DOUBLE)
    result = call(replay, 4)
    del replay
    gc.collect()
    del result
    gc.collect()
    left = set(device.driver.live_handles().values()) - set(before.values())
    # Staging memory stays for other graphs.
    assert left <= {"host memory", "event"}


def test_the_first_results_need_no_compile(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    compile_allocator = jax_arrays._compile_allocator

    def note(shapes: Any, jax_device: Any) -> Any:
        # The arena has another.
        compiled.extend(each for each in shapes[:1] if each[0] == (4,))
        return compile_allocator(shapes, jax_device)

    monkeypatch.setattr(jax_arrays, "SMALL_RESULTS_BYTES", 1000)
    monkeypatch.setattr(jax_arrays, "_allocators", {})
    monkeypatch.setattr(jax_arrays, "_compile_allocator", note)
    replay = make_cuda_replay(device, DOUBLE)
    kept = [call(replay, value) for value in range(STOCK)]
    assert not compiled
    kept += [call(replay, value) for value in range(STOCK, 2 * STOCK)]
    assert len(compiled) == 1
    for value, result in enumerate(kept):
        np.testing.assert_array_equal(result, [2 * value] * 4)
    assert len({each.unsafe_buffer_pointer() for each in kept}) == 2 * STOCK
    # Where that program is at hand, nothing is copied.
    assert not find_port(make_cuda_replay(device, DOUBLE)).spares


@pytest.mark.parametrize("dtype", ["float64", "int4", "bfloat16", "bool"])
def test_first_arrays_have_the_type_that_is_asked_for(dtype: str) -> None:
    device = jax.devices("cpu")[0]
    aval = make_aval((3,), np.dtype(dtype), weak_type=True)
    (array,) = jax_arrays.make_first_arrays(aval, device, 1)
    assert (array.shape, array.dtype, array.weak_type) == ((3,), np.dtype(dtype), True)
    assert not array.committed
    wide = make_aval((jax_arrays.SMALL_RESULTS_BYTES,), np.dtype("int16"))
    assert not jax_arrays.make_first_arrays(wide, device, 1)


@pytest.mark.parametrize("reason", ["RESOURCE_EXHAUSTED", "INTERNAL"])
def test_only_missing_memory_is_left_to_the_launch(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any) -> Any:
        raise jax.errors.JaxRuntimeError(f"{reason}: planted")

    monkeypatch.setattr(jax_arrays, "to_immutable", fail)
    arguments = make_aval((3,), np.dtype("float32")), jax.devices("cpu")[0], 7
    if reason == "RESOURCE_EXHAUSTED":
        assert jax_arrays.make_first_arrays(*arguments) == []
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
        jax_arrays.make_first_arrays(*arguments)


def test_a_read_that_fails_may_be_tried_again(
    late: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call(make_cuda_replay(late, DOUBLE), 4)
    define = jax_order._define_anew

    def fail(array: Any) -> Any:
        monkeypatch.setattr(jax_order, "_define_anew", define)
        raise MemoryError("planted")

    monkeypatch.setattr(jax_order, "_define_anew", fail)
    with pytest.raises(MemoryError, match="planted"):
        result.jax()
    np.testing.assert_array_equal(result, [8] * 4)


def test_a_read_while_jax_traces_is_no_part_of_the_trace(late: CudaOnHost) -> None:
    result = call(make_cuda_replay(late, DOUBLE), 4)

    def add(x: jax.Array) -> Any:
        plain = result.jax()
        assert not isinstance(plain, Tracer)
        return x + 1

    assert [eqn.primitive.name for eqn in jax.make_jaxpr(add)(1.0).eqns] == ["add"]
    np.testing.assert_array_equal(result, [8] * 4)


def test_memory_that_is_taken_while_jax_traces_is_no_part_of_the_trace() -> None:
    device = jax.devices("cpu")[0]

    def add(x: jax.Array) -> Any:
        jax_arrays.allocate_bytes(64, device).unsafe_buffer_pointer()
        return x + 1

    assert [eqn.primitive.name for eqn in jax.make_jaxpr(add)(1.0).eqns] == ["add"]


def test_a_failed_launch_hands_out_nothing_old(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DOUBLE)
    kept = call(replay, 1)
    for name in ("send", "launch"):
        device.driver.fail_on = name
        with pytest.raises(CudaError, match=name):
            call(replay, 50)
        np.testing.assert_array_equal(call(replay, 3), [6] * 4)
    np.testing.assert_array_equal(kept, [2] * 4)


def test_two_results_of_one_value_stay_apart(device: CudaOnHost) -> None:
    definition = make_definition(make_stage(kernel("double", "x", "y")), outputs="y y")
    replay = make_cuda_replay(device, definition)
    replay.load([(0, floats([1] * 4))])
    replay.launch()
    one, other = (replay.make_taker(index)() for index in range(2))
    plain = one.jax()
    plain.delete()
    np.testing.assert_array_equal(other, [2] * 4)


def test_a_result_that_an_input_is_stands_in_the_arena(device: CudaOnHost) -> None:
    definition = make_definition(make_stage(kernel("double", "x", "y")), outputs="x y")
    replay = make_cuda_replay(device, definition)
    replay.inputs[0].make_writer()(place([1] * 4))
    replay.launch()
    one, other = (replay.make_taker(index)() for index in range(2))
    np.testing.assert_array_equal(one, [1] * 4)
    np.testing.assert_array_equal(other, [2] * 4)


def test_the_array_between_a_value_and_its_readers_keeps_the_memory() -> None:
    # Others may be copying from the address while a read makes the array that JAX knows.
    device = jax.devices("cpu")[0]
    (raw,) = jax_arrays.allocate_arrays((4,), np.dtype(np.float32), False, device, 1)
    address = raw.unsafe_buffer_pointer()
    defined = jax_order._define_anew(raw)
    assert defined is not raw
    assert raw.is_deleted()
    assert defined.unsafe_buffer_pointer() == address


@pytest.mark.parametrize("dtype", ["float64", "int64", "bfloat16", "bool", "complex128"])
def test_defining_anew_keeps_the_type(dtype: str) -> None:
    with jax.enable_x64(True):
        array = jax.numpy.ones(3, dtype)
    assert jax_order._define_anew(array).dtype == dtype


def test_memory_of_weak_type() -> None:
    device = jax.devices("cpu")[0]
    arrays = jax_arrays.allocate_arrays((3,), np.dtype(np.float32), True, device, 2)
    assert [array.aval for array in arrays] == [make_aval((3,), np.float32, weak_type=True)] * 2
    assert (arrays[0] + np.int8(1)).aval.weak_type
    assert len({array.unsafe_buffer_pointer() for array in arrays}) == 2
    assert not arrays[0].committed


def test_a_result_says_what_it_is(late: CudaOnHost) -> None:
    result = call(make_cuda_replay(late, DOUBLE), 1)
    buffer = result._buffer
    assert (buffer.name, buffer.arena) == ("y", None)
    assert (result.shape, result.dtype, result.devices()) == (
        (4,),
        np.float32,
        {late.jax_device},
    )
    assert not result.is_ready()
    result.block_until_ready()
    assert result.is_ready()
    assert result.is_in(object()) is False


@pytest.mark.parametrize("provider", ["jax", "cuda"])
def test_copies_are_not_pointed_at_memory_of_another_origin(
    monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    """The driver refuses that, as a GPU has shown; kernels take any address."""
    monkeypatch.setenv("TRACEGRAPH_ALLOC_CONF", f"provider:{provider}")
    device = make_device(monkeypatch)
    assert device.allocator.provider.name == provider
    definition = make_definition(
        make_stage(kernel("double", "x", "y"), make_copy("y", "z"), edges=[(0, 1)]), outputs="y z"
    )
    replay = make_cuda_replay(device, definition)
    assert (replay.takers.keys() == {*"yz"}) is (provider == "jax")
    write = replay.inputs[0].make_writer()
    kept = []
    for value in range(5):
        write(place([value] * 4))
        replay.settle()
        replay.launch()
        kept.append([replay.make_taker(index)() for index in range(2)])
    for value, results in enumerate(kept):
        for result in results:
            np.testing.assert_array_equal(result, [2 * value] * 4)


def test_the_fake_driver_refuses_such_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEGRAPH_ALLOC_CONF", "provider:cuda")
    monkeypatch.setattr(Arena, "provider", JaxProvider(jax.devices()[0]))
    device = make_device(monkeypatch)
    definition = make_definition(make_stage(make_copy("x", "y")), outputs="y")
    with pytest.raises(MisuseError, match="memory of another origin"):
        make_cuda_replay(device, definition).launch()
