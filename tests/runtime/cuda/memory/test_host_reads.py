"""Reads of small values by the host: from the stream, once, and as JAX's own arrays read."""

from __future__ import annotations

import gc
import operator
import threading
import warnings
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.definitions_anew import note_definitions
from tests.fakes.cuda_on_host import CudaOnHost, floats, kernel, make_cuda_replay, make_device
from tests.fakes.definitions import make_copy, make_definition, make_stage
from tracegraph.runtime.arrays.array import ArrayState
from tracegraph.runtime.cuda import context
from tracegraph.runtime.errors import CudaError, ReplayError
from tracegraph.runtime.replay import Replay

DOUBLE = make_definition(make_stage(kernel("double", "x", "y")))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    return make_device(monkeypatch, is_deferred=True)


@pytest.fixture
def defined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return note_definitions(monkeypatch)


def call(replay: Replay, value: Any) -> Any:
    replay.settle()
    replay.load([(0, value)])
    replay.launch()
    return replay.make_taker(0)()


def make_pass(value: np.ndarray[Any, Any]) -> Any:
    """Returns a graph that copies a value like this one."""
    kind = jax.ShapeDtypeStruct(value.shape, value.dtype)
    copy = make_copy("x", "y", value.nbytes)
    offsets, nbytes = {"x": 0, "y": 1 << 22}, 1 << 23
    types = {"x": kind, "y": kind}
    return make_definition(make_stage(copy), types=types, offsets=offsets, arena_bytes=nbytes)


SCALARS = (
    np.bool_(True),
    np.int32(-3),
    np.uint8(200),
    np.float32(2.5),
    np.float64(-0.0),
    np.float16(1.5),
    ml_dtypes.bfloat16(1.25),
    np.complex64(1 + 2j),
)


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda scalar: scalar.dtype.name)
def test_a_scalar_reads_as_jaxs_own(late: CudaOnHost, defined: list[Any], scalar: Any) -> None:
    with jax.enable_x64(True):
        value = np.asarray(scalar)
        result = call(make_cuda_replay(late, make_pass(value)), value)
        plain = jax.numpy.asarray(value)
        for read in (bool, int, float, complex, hex, str, format, lambda x: f"{x:>12}"):
            assert _try(read, result) == _try(read, plain)
        for read in (np.asarray, lambda x: x.item(), lambda x: x.tolist(), operator.index):
            ours, theirs = _try(read, result), _try(read, plain)
            assert (type(ours), ours) == (type(theirs), theirs)
    # Those that JAX refuses were asked of a plain array.
    assert len(defined) <= 1


def _try(read: Any, value: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
            return read(value)
    except (TypeError, ValueError) as error:
        return type(error), str(error)


def test_a_read_asks_nothing_of_xla(late: CudaOnHost, defined: list[Any]) -> None:
    result = call(make_cuda_replay(late, DOUBLE), floats([1, 2, 3, 4]))
    host = np.asarray(result)
    np.testing.assert_array_equal(host, [2, 4, 6, 8])
    assert not host.flags.writeable
    assert np.asarray(result) is host
    assert (result.tolist(), result.item(2)) == ([2, 4, 6, 8], 6)
    np.testing.assert_array_equal(np.array(result, np.int8), [2, 4, 6, 8])
    assert result.state is ArrayState.FRESH
    assert not defined
    assert late.driver.count_calls("synchronize_event") == 1
    # The value is still where it was, for JAX and for other graphs.
    np.testing.assert_array_equal(result.jax() + 1, [3, 5, 7, 9])
    np.testing.assert_array_equal(result, host)


def test_the_memory_of_a_result_that_the_host_has_read_serves_again(device: CudaOnHost) -> None:
    replay, addresses = make_cuda_replay(device, DOUBLE), set()
    for value in range(5):
        result = call(replay, floats([value] * 4))
        np.testing.assert_array_equal(result, [2 * value] * 4)
        addresses.add(result.data_ptr())
    # Two, since the name holds one result while the next is written.
    assert len(addresses) == 2


def test_a_read_waits_for_the_work_before_it_only(late: CudaOnHost) -> None:
    replay = make_cuda_replay(late, DOUBLE)
    first = call(replay, floats([1] * 4))
    first.copy_to_host_async()
    second = call(replay, floats([2] * 4))
    np.testing.assert_array_equal(first, [2] * 4)
    assert not late.context.is_idle()
    np.testing.assert_array_equal(second, [4] * 4)
    assert late.context.is_idle()


def test_a_read_that_is_dropped_gives_its_memory_back_when_it_is_over(late: CudaOnHost) -> None:
    replay, reads = make_cuda_replay(late, DOUBLE), late.context._reads
    result = call(replay, floats([1] * 4))
    result.copy_to_host_async()
    result.copy_to_host_async()
    del result
    gc.collect()
    assert len(reads.dropped) == 1
    # Not over yet: its memory is not used again.
    other = call(replay, floats([2] * 4))
    other.copy_to_host_async()
    assert len(reads.dropped) == 1
    np.testing.assert_array_equal(other, [4] * 4)
    np.testing.assert_array_equal(call(replay, floats([3] * 4)), [6] * 4)
    assert not reads.dropped


def test_the_guard_of_jax_holds(late: CudaOnHost, defined: list[Any]) -> None:
    result = call(make_cuda_replay(late, DOUBLE), floats([1] * 4))
    with jax.transfer_guard_device_to_host("log"):
        np.testing.assert_array_equal(result, [2] * 4)
    # JAX itself has read it, and said so.
    assert len(defined) == 1


def test_what_is_large_is_read_by_jax(late: CudaOnHost, defined: list[Any]) -> None:
    for nbytes in (context.LARGEST_READ_BYTES, context.LARGEST_READ_BYTES + 4):
        value = np.arange(nbytes // 4, dtype=np.int32)
        result = call(make_cuda_replay(late, make_pass(value)), value)
        np.testing.assert_array_equal(result, value)
        assert len(defined) == (nbytes > context.LARGEST_READ_BYTES)


def test_an_array_without_elements_is_read_by_jax(device: CudaOnHost) -> None:
    value = np.zeros((0, 3), np.float32)
    result = call(make_cuda_replay(device, make_pass(value)), value)
    assert np.asarray(result).shape == (0, 3)
    with pytest.raises(ValueError, match="empty"):
        bool(result)


def test_a_deleted_array_is_not_read(device: CudaOnHost) -> None:
    result = call(make_cuda_replay(device, DOUBLE), floats([1] * 4))
    np.testing.assert_array_equal(result, [2] * 4)
    result.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(result)
    plain = call(make_cuda_replay(device, DOUBLE), floats([1] * 4))
    np.testing.assert_array_equal(plain, [2] * 4)
    plain.jax().delete()
    with pytest.raises(RuntimeError, match="deleted"):
        plain.tolist()


def test_a_static_output_shows_the_latest_replay_or_is_stale(late: CudaOnHost) -> None:
    replay = make_cuda_replay(late, DOUBLE, ArrayState.STATIC)
    first = call(replay, floats([1] * 4))
    np.testing.assert_array_equal(first, [2] * 4)
    first.copy_(floats([7] * 4))
    np.testing.assert_array_equal(first, [7] * 4)
    replay.clock.generation += 1
    with pytest.raises(ReplayError, match="replay"):
        np.asarray(first)


def test_a_failed_copy_leaves_the_array_readable(device: CudaOnHost) -> None:
    result = call(make_cuda_replay(device, DOUBLE), floats([1] * 4))
    for name in ("record_event", "copy_async"):
        device.driver.fail_on = name
        with pytest.raises(CudaError, match=name):
            np.asarray(result)
    np.testing.assert_array_equal(result, [2] * 4)


def test_threads_read_one_array(late: CudaOnHost) -> None:
    result = call(make_cuda_replay(late, DOUBLE), floats([1] * 4))
    result.copy_to_host_async()
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(np.asarray(result).tolist())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[2] * 4] * 8
