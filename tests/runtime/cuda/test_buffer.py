"""CudaBuffer: what is rebound, what is copied, and what the stream waits for."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from tests.fakes.cuda_on_host import (
    STREAM,
    CudaOnHost,
    floats,
    kernel,
    make_cuda_replay,
    place,
    view_floats,
)
from tests.fakes.definitions import make_copy, make_definition, make_stage, take_results
from tests.processes import run_program
from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.cuda import buffer as buffer_module
from tracegraph.runtime.cuda import jax_order
from tracegraph.runtime.errors import CudaError
from tracegraph.runtime.replay import Replay

DOUBLE = make_definition(make_stage(kernel("double", "x", "y")))
# Two stages read x, so that two graphs have to be pointed at it.
TWICE = make_definition(
    make_stage(kernel("double", "x", "y")),
    make_stage(kernel("add", "x y", "z")),
    outputs="z",
)


def call(replay: Replay, value: Any) -> Any:
    """Replays on a plain array, as a call does."""
    replay.settle()
    replay.inputs[0].make_writer()(value)
    return run(replay)


def run(replay: Replay) -> Any:
    replay.launch()
    return take_results(replay)[0]


def count(device: CudaOnHost, name: str) -> int:
    return device.driver.count_calls(name)


def test_a_plain_array_is_not_copied(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DOUBLE)
    copies = count(device, "copy_async")
    for value in ([1, 2, 3, 4], [5, 6, 7, 8]):
        result = call(replay, place(value))
        assert count(device, "copy_async") == copies
        np.testing.assert_array_equal(result.jax(), 2 * floats(value))


def test_the_same_array_again_changes_no_node(device: CudaOnHost) -> None:
    replay, x = make_cuda_replay(device, DOUBLE), place([1, 2, 3, 4])
    first = call(replay, x)
    sends = count(device, "send")
    second = call(replay, x)
    # One for the result, whose memory is taken.
    assert count(device, "send") == sends + 1
    np.testing.assert_array_equal(first, second)


def test_a_copy_points_the_nodes_back_to_the_arena(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DOUBLE)
    x = place([1, 2, 3, 4])
    call(replay, x)
    replay.load([(0, floats([9, 9, 9, 9]))])
    np.testing.assert_array_equal(run(replay), [18] * 4)
    np.testing.assert_array_equal(x, [1, 2, 3, 4])
    np.testing.assert_array_equal(call(replay, x), [2, 4, 6, 8])


@pytest.mark.parametrize(("definition", "factor"), [(DOUBLE, 2), (TWICE, 3)])
def test_a_misaligned_array_is_copied(device: CudaOnHost, definition: Any, factor: int) -> None:
    replay = make_cuda_replay(device, definition)
    copies = count(device, "copy_async")
    x = place([1, 2, 3, 4], skip=64)
    np.testing.assert_array_equal(call(replay, x).jax(), factor * floats([1, 2, 3, 4]))
    assert count(device, "copy_async") == copies + 1
    np.testing.assert_array_equal(call(replay, place([5] * 4)).jax(), [5 * factor] * 4)
    assert count(device, "copy_async") == copies + 1


def test_every_graph_that_reads_an_input_is_rebound(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, TWICE)
    for value in (1, 5):
        np.testing.assert_array_equal(call(replay, place([value] * 4)), [3 * value] * 4)
    replay.load([(0, floats([2] * 4))])
    np.testing.assert_array_equal(run(replay), [6] * 4)


@pytest.mark.parametrize(
    ("definition", "factor", "failing"), [(DOUBLE, 2, 1), (TWICE, 3, 1), (TWICE, 3, 2)]
)
def test_a_failed_rebinding_is_not_taken_for_done(
    device: CudaOnHost, definition: Any, factor: int, failing: int
) -> None:
    replay, first, second = make_cuda_replay(device, definition), place([1] * 4), place([7] * 4)
    call(replay, first)
    driver: Any = device.driver
    original = driver._set
    # With two nodes, the first may be changed when the second is refused.
    sends: list[Any] = []

    def fail(*arguments: Any) -> None:
        sends.append(arguments)
        if len(sends) == failing:
            raise CudaError("planted", where="w", why="y", fix="f", anchor="internal")
        original(*arguments)

    driver._set = fail
    with pytest.raises(CudaError, match="planted"):
        replay.inputs[0].make_writer()(second)
    driver._set = original
    np.testing.assert_array_equal(call(replay, first), [factor] * 4)
    np.testing.assert_array_equal(call(replay, second), [7 * factor] * 4)


@pytest.mark.parametrize("definition", [DOUBLE, TWICE])
def test_the_stream_waits_for_an_array_on_its_way(
    device: CudaOnHost, definition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited: list[tuple[Any, int]] = []
    pending = place([1] * 4)
    for module in (jax_order, buffer_module):
        monkeypatch.setattr(module, "_is_ready", lambda array: array is not pending)
    monkeypatch.setattr(
        jax_order.JaxOrder, "await_array", lambda self, array: awaited.append(array)
    )
    replay = make_cuda_replay(device, definition)
    call(replay, pending)
    assert [array is pending for array in awaited] == [True]
    # Again: it is bound already, and still on its way.
    call(replay, pending)
    assert len(awaited) == 2


def test_waiting_asks_by_the_dlpack_protocol(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pending:
        def __init__(self) -> None:
            self.streams: list[int] = []

        def __dlpack__(self, *, stream: int) -> None:
            self.streams.append(stream)

        def block_until_ready(self) -> None:
            assert self is ready, "the host waits"

    pending, ready = Pending(), Pending()
    monkeypatch.setattr(jax_order, "_is_ready", lambda array: array is ready)
    device.context.order.await_array(pending)
    device.context.order.await_array(ready)
    assert (pending.streams, ready.streams) == ([STREAM], [])


def test_an_input_that_nothing_reads_is_ignored(device: CudaOnHost) -> None:
    definition = make_definition(make_stage(kernel("double", "x", "y")), inputs="x unread")
    replay = make_cuda_replay(device, definition)
    copies = count(device, "copy_async")
    replay.inputs[1].make_writer()(place([1] * 4))
    assert count(device, "copy_async") == copies
    np.testing.assert_array_equal(call(replay, place([1] * 4)), [2] * 4)


def test_many_small_patches_give_way_to_one_copy(device: CudaOnHost) -> None:
    nodes = [kernel("double", "x", f"y{index}") for index in range(9)]
    replay = make_cuda_replay(device, make_definition(make_stage(*nodes), outputs="y0"))
    copies = count(device, "copy_async")
    np.testing.assert_array_equal(call(replay, place([3] * 4)).jax(), [6] * 4)
    assert count(device, "copy_async") == copies + 1


def test_an_array_in_the_pool_and_a_scalar(device: CudaOnHost) -> None:
    types = {"x": jax.ShapeDtypeStruct((), np.float32), "y": jax.ShapeDtypeStruct((), np.float32)}
    definition = make_definition(make_stage(make_copy("x", "y", 4)), types=types)
    replay = make_cuda_replay(device, definition)
    for value in (2.5, np.float32(2.5), place(2.5), np.float64(2.5)):
        replay.load([(0, value)])
        assert float(run(replay)) == 2.5
    other = run(replay)
    replay.load([(0, 1.0)])
    replay.settle()
    replay.load([(0, other)])
    assert float(run(replay)) == 2.5


def test_a_thread_without_a_context_can_load_and_read(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DOUBLE, ArrayState.STATIC)
    found: list[Any] = []

    def work() -> None:
        replay.load([(0, floats([1, 2, 3, 4]))])
        replay.load([(0, place([5, 6, 7, 8]))])
        found.append(np.asarray(run(replay)))
        found.append(device.driver.get_current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(found[0], [10, 12, 14, 16])
    assert found[1] == device.context.order.primary


def test_copies_leave_the_context_of_a_thread_as_it_was(device: CudaOnHost) -> None:
    replay, driver = make_cuda_replay(device, DOUBLE), device.driver
    other = driver.retain_primary_context(1)
    driver.set_current(other)
    replay.load([(0, floats([1, 2, 3, 4]))])
    replay.inputs[0].snapshot()
    assert driver.get_current() == other


def test_resident_state_is_read_as_a_copy(late: CudaOnHost) -> None:
    definition = make_definition(
        make_stage(kernel("increment", "s", "s")), inputs="s", outputs="s", residents="s"
    )
    replay = make_cuda_replay(late, definition)
    replay.load([(0, floats([0, 1, 2, 3]))])
    leaf = run(replay)
    assert leaf.state is ArrayState.RESIDENT
    before = leaf.jax()
    assert before is leaf.jax()
    new = run(replay)
    assert leaf.is_deleted()
    assert new.data_ptr() == replay.inputs[0].address
    np.testing.assert_array_equal(before, [1, 2, 3, 4])
    np.testing.assert_array_equal(new, [2, 3, 4, 5])
    # Another value takes the place; the leaf keeps what it had, read or not.
    leaf = run(replay)
    replay.load([(0, floats([10] * 4))])
    assert leaf.state is ArrayState.SETTLED
    assert not leaf.is_ready()
    np.testing.assert_array_equal(run(replay), [11] * 4)
    np.testing.assert_array_equal(leaf, [3, 4, 5, 6])


def test_a_deleted_leaf_is_counted(device: CudaOnHost) -> None:
    definition = make_definition(
        make_stage(kernel("increment", "s", "s")), inputs="s", outputs="s", residents="s"
    )
    replay = make_cuda_replay(device, definition)
    run(replay).delete()
    assert replay.clock.dropped_leaves == 1
    assert replay.restore(is_state_lost=False) is None


def test_waiting_in_every_state(late: CudaOnHost) -> None:
    replay = make_cuda_replay(late, DOUBLE, ArrayState.STATIC)
    static = call(replay, place([1] * 4))
    assert not static.is_ready()
    static.block_until_ready()
    assert static.is_ready()
    assert view_floats(static.data_ptr()).tolist() == [2] * 4
    replay.launch()
    resident = Array(replay.buffers["y"], replay.clock.generation, ArrayState.RESIDENT)
    assert not resident.is_ready()
    resident.detach()
    assert not resident.is_ready()
    resident.block_until_ready()
    assert resident.is_ready()
    np.testing.assert_array_equal(resident, [2] * 4)
    assert resident.is_ready()
    resident.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        resident.is_ready()


def test_a_wait_for_the_gpu_holds_no_lock(
    late: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback in the work that is waited for may read an array of the graph."""
    replay = make_cuda_replay(late, DOUBLE, ArrayState.STATIC)
    static = call(replay, place([1] * 4))
    seen: list[list[float]] = []

    def read() -> None:
        with replay.clock.lock:
            seen.append(view_floats(static.data_ptr()).tolist())

    synchronize = jax_order.JaxOrder.synchronize

    def synchronize_beside(order: jax_order.JaxOrder) -> None:
        synchronize(order)
        assert not replay.clock.lock._is_owned(), "the lock is held"  # type: ignore[attr-defined]
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(timeout=600)

    monkeypatch.setattr(jax_order.JaxOrder, "synchronize", synchronize_beside)
    static.block_until_ready()
    assert seen == [[2] * 4]


@pytest.mark.parametrize("is_twice", [False, True])
def test_an_array_of_another_layout_is_copied_in_order(
    device: CudaOnHost, is_twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_order.JaxOrder, "await_array", lambda _, a: jax.block_until_ready(a))
    kind = jax.ShapeDtypeStruct((2, 2), np.float32)
    stages = [make_stage(kernel("double", "x", "y"))]
    stages += [make_stage(kernel("double", "x", "z"))] * is_twice
    types = dict.fromkeys("xyz", kind)
    replay = make_cuda_replay(device, make_definition(*stages, types=types))
    plain = place([[1, 2], [3, 4]])
    other = jax.device_put(plain, Format(Layout((1, 0)), plain.sharding))
    assert view_floats(other.unsafe_buffer_pointer()).tolist() == [1, 3, 2, 4]
    for x in (other, plain, other):
        np.testing.assert_array_equal(call(replay, x), [[2, 4], [6, 8]])
    replay.load([(0, other)])
    np.testing.assert_array_equal(run(replay), [[2, 4], [6, 8]])


ELSEWHERE = """
import jax, numpy as np, pytest
from tests.fakes.cuda_on_host import make_device
from tests.fakes.regions_as_kernels import capture_for_gpu
import tracegraph as tg

capture_for_gpu(pytest.MonkeyPatch())
first, second = jax.devices()
captured = tg.capture(lambda x: x * 2, verify=False)
here = jax.numpy.arange(3.0)
assert np.array_equal(captured(here), here * 2)
# Uncommitted: JAX would move it, so it is copied. Committed: refused, and the graph stays usable.
with jax.default_device(second):
    loose = jax.numpy.arange(3.0) + 5
assert loose.devices() == {second} and not loose.committed
assert np.array_equal(captured(loose), np.arange(3.0) * 2 + 10)
try:
    captured(jax.device_put(loose, second))
except tg.CaptureError as error:
    assert error.anchor == "other-device", error
else:
    raise SystemExit("accepted")
assert np.array_equal(captured(here), here * 2)
assert captured.cache_info().captures == 1, captured.cache_info()
print("ok")
"""


def test_an_array_on_another_device_is_moved_or_refused() -> None:
    flags = "--xla_force_host_platform_device_count=2"
    assert run_program(ELSEWHERE, XLA_FLAGS=flags) == "ok\n"
