"""Parts of arrays: which rows they are, and how both devices copy them in and out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost, make_cuda_replay, make_device, place
from tests.fakes.definitions import make_copy, make_definition, make_replay, make_stage
from tests.fakes.fake_state import MisuseError
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.array_parts import MAX_PITCH_BYTES, PartRows, find_part_rows
from tracegraph.runtime.arrays.static_buffer import PartBuffer
from tracegraph.runtime.cuda.driver.calls import CopyRows
from tracegraph.runtime.device import Device
from tracegraph.runtime.host.device import HostDevice
from tracegraph.runtime.replay import Replay

FLOAT = np.dtype(np.float32)
WHOLE = (4, 3, 5)
VALUES = np.arange(60, dtype=FLOAT).reshape(WHOLE)
TYPE = jax.ShapeDtypeStruct(WHOLE, FLOAT)
COPY = make_definition(make_stage(make_copy("x", "y", 240)), types={"x": TYPE, "y": TYPE})
SHAPES = [*itertools.product(*(range(1, n + 1) for n in WHOLE))]
# Along two inner axes they are rows of rows.
COPIED = [each for each in SHAPES if each[1] == 3 or each[2] == 5]


def cut(array: Any, shape: tuple[int, ...]) -> Any:
    return array[tuple(map(slice, shape))]


def test_the_rows_are_those_of_numpy() -> None:
    content = VALUES.tobytes()
    for shape in COPIED:
        rows = find_part_rows(shape, WHOLE, FLOAT)
        assert rows is not None
        starts = range(0, rows.count * rows.pitch_bytes, rows.pitch_bytes)
        found = b"".join(content[start : start + rows.nbytes] for start in starts)
        assert found == cut(VALUES, shape).tobytes()


def test_other_parts_have_no_rows() -> None:
    assert not any(find_part_rows(each, WHOLE, FLOAT) for each in {*SHAPES} - {*COPIED})
    assert find_part_rows((3,), (4,), np.dtype(jnp.int4)) is None
    assert find_part_rows((3, 1), (3, MAX_PITCH_BYTES // 4 + 1), FLOAT) is None
    assert find_part_rows((3, 0), (4, 0), FLOAT) == PartRows(1, 0, 0)


@pytest.fixture(params=["host", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "gpu":
        return make_device(monkeypatch)
    return HostDevice(jax.devices("cpu")[0])


def make_copying(device: Device) -> Replay:
    if isinstance(device, CudaOnHost):
        return make_cuda_replay(device, COPY)
    return make_replay(COPY)


def get_input(replay: Replay) -> PartBuffer:
    return cast(PartBuffer, replay.inputs[0])


@pytest.mark.parametrize("make", [place, np.asarray])
def test_a_part_is_written_and_what_is_behind_it_stays(
    device: Any, make: Callable[[Any], Any]
) -> None:
    replay = make_copying(device)
    for shape in COPIED:
        if make is np.asarray and shape[1:] != WHOLE[1:]:
            continue
        replay.settle()
        replay.load([(0, np.full(WHOLE, -1, FLOAT))])
        get_input(replay).write_part(make(cut(VALUES, shape)))
        replay.launch()
        expected = np.full(WHOLE, -1, FLOAT)
        cut(expected, shape)[...] = cut(VALUES, shape)
        np.testing.assert_array_equal(replay.copy_outputs()[0], expected)


def test_parts_of_results_keep_their_values(device: Any) -> None:
    replay = make_copying(device)
    replay.load([(0, VALUES)])
    replay.launch()
    take = replay.make_taker(0)
    whole = [take() for _ in COPIED]
    parts = device.cut_arrays(whole, COPIED)
    replay.settle()
    replay.load([(0, -VALUES)])
    replay.launch()
    for shape, part in zip(COPIED, parts, strict=True):
        assert (part.shape, part.dtype, part.aval.weak_type) == (shape, FLOAT, False)
        np.testing.assert_array_equal(part, cut(VALUES, shape))
        np.testing.assert_array_equal(jnp.negative(part), -cut(VALUES, shape))


def test_parts_of_plain_arrays_and_of_read_results(device: Any) -> None:
    replay = make_copying(device)
    replay.load([(0, VALUES)])
    replay.launch()
    read = replay.make_taker(0)()
    assert float(jnp.sum(read)) == VALUES.sum()
    weak = jnp.broadcast_to(2.0, WHOLE)
    parts = device.cut_arrays([read, place(VALUES), weak], [(2, 3, 5), (4, 3, 2), (1, 3, 5)])
    for part, expected in zip(parts, (VALUES[:2], VALUES[:, :, :2], weak[:1]), strict=True):
        np.testing.assert_array_equal(part, expected)
    assert [part.aval.weak_type for part in parts] == [False, False, weak.weak_type]


def test_a_gpu_copies_each_part_once_and_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = make_device(monkeypatch)
    replay, x = make_cuda_replay(device, COPY), place(VALUES[:, :2])
    calls = device.driver.calls
    get_input(replay).write_part(x)
    first = len(calls)
    get_input(replay).write_part(x)
    assert [call.name for call in calls[first:]] == ["copy_rows_async"]
    replay.launch()
    take = replay.make_taker(0)
    whole = [take(), take()]
    first = len(calls)
    parts = device.cut_arrays(whole, [(3, 3, 5), (4, 3, 2)])
    assert [call.name for call in calls[first:]] == ["copy_async", "copy_rows_async"]
    assert all(type(part) is Array for part in parts)


def test_the_fake_driver_refuses_rows_that_lie_in_one_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = make_device(monkeypatch)
    order = device.context.order
    with order.use_context(), pytest.raises(MisuseError, match="lie in one another"):
        device.driver.copy_rows_async(CopyRows(0x1000, 4, 0x2000, 20, 8, 2), order.stream)
