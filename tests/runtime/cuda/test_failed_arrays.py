"""Arrays that hold an error: no graph gets their address, Note [Arrays that were never made]."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost, make_cuda_replay, place
from tests.fakes.failed_arrays import make_failed_array
from tests.runtime.cuda.test_buffer import DOUBLE, TWICE, call, run
from tracegraph.runtime.cuda import buffer as buffer_module


def test_an_array_that_was_never_made_is_not_copied(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DOUBLE)
    copies = device.driver.count_calls("copy_async")
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
            replay.load([(0, make_failed_array())])
    assert device.driver.count_calls("copy_async") == copies
    np.testing.assert_array_equal(call(replay, place([3] * 4)), [6] * 4)


@pytest.mark.parametrize("definition", [DOUBLE, TWICE])
def test_no_graph_is_pointed_at_an_array_that_was_never_made(
    device: CudaOnHost, definition: Any
) -> None:
    replay, factor = make_cuda_replay(device, definition), 2 if definition is DOUBLE else 3
    take = replay.inputs[0].make_writer()
    good, failed = place([3] * 4), make_failed_array()
    take(good)
    allowed = (good.unsafe_buffer_pointer(), replay.inputs[0].address)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
            take(failed)
        assert replay.inputs[0]._bound in allowed
    take(good)
    np.testing.assert_array_equal(run(replay), [3 * factor] * 4)


def test_an_array_is_looked_at_once(device: CudaOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(buffer_module, "_wait", asked.append)
    replay = make_cuda_replay(device, DOUBLE)
    take = replay.inputs[0].make_writer()
    first, second = place([1] * 4), place([2] * 4)
    for value in (first, first, second, second, first):
        take(value)
    assert [value is first for value in asked] == [True, False]
    # It is not kept alive, and one that is deleted is refused.
    reference = weakref.ref(second)
    asked.clear()
    del value, second
    gc.collect()
    assert reference() is None
    first.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        take(first)


def test_another_array_at_the_same_address_is_looked_at(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(buffer_module, "_wait", asked.append)
    take = make_cuda_replay(device, DOUBLE).inputs[0].make_writer()
    values = [place([number] * 4) for number in range(3)]
    address = values[0].unsafe_buffer_pointer()
    monkeypatch.setattr(buffer_module, "_get_pointer", lambda _: address)
    for value in (*values, *values):
        take(value)
    assert list(map(id, asked)) == list(map(id, (*values, *values)))


def test_so_many_arrays_are_remembered(device: CudaOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(buffer_module, "_wait", asked.append)
    monkeypatch.setattr(buffer_module, "MAX_KNOWN", 2)
    take = make_cuda_replay(device, DOUBLE).inputs[0].make_writer()
    first, second, third = (place([number] * 4) for number in range(3))
    for value in (first, second, first, second, third, third, first):
        take(value)
    assert list(map(id, asked)) == list(map(id, (first, second, third, first)))
