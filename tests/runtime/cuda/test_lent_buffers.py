"""Buffers of inputs that are lent: no memory unless something must be copied there."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost, floats, make_cuda_replay, place
from tests.runtime.cuda.test_buffer import DOUBLE, TWICE, call, run
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.replay import Replay


def lend(definition: Any) -> Any:
    """Returns a definition whose input x has no memory of its own."""
    slots = tuple(
        dataclasses.replace(slot, offset=definition.arena_bytes, is_lent=True)
        if slot.name == "x"
        else slot
        for slot in definition.slots
    )
    return dataclasses.replace(definition, slots=slots)


def count_blocks(replay: Replay) -> int:
    return len(replay.arena._blocks)


@pytest.mark.parametrize(("definition", "factor"), [(DOUBLE, 2), (TWICE, 3)])
def test_a_lent_input_has_no_memory(device: CudaOnHost, definition: Any, factor: int) -> None:
    replay = make_cuda_replay(device, lend(definition))
    blocks = count_blocks(replay)
    for value in ([1, 2, 3, 4], [5, 6, 7, 8]):
        np.testing.assert_array_equal(call(replay, place(value)), factor * floats(value))
    assert replay.is_lent == [True]
    assert count_blocks(replay) == blocks


def test_a_lent_input_gets_memory_where_it_must_be_copied(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, lend(TWICE))
    blocks = count_blocks(replay)
    for value in (floats([1, 2, 3, 4]), floats([5, 6, 7, 8])):
        replay.load([(0, value)])
        np.testing.assert_array_equal(run(replay), 3 * value)
    np.testing.assert_array_equal(call(replay, place([9] * 4, skip=64)), [27] * 4)
    assert count_blocks(replay) == blocks + 1
    # Then in its own memory again.
    np.testing.assert_array_equal(call(replay, place([2] * 4)), [6] * 4)
    assert count_blocks(replay) == blocks + 1


def test_without_memory_for_a_lent_input_the_next_call_works(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, lend(DOUBLE))
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*_: Any) -> Any:
            raise OutOfMemoryError("no memory", where="", why="", fix="", anchor="out-of-memory")

        patch.setattr(replay.arena, "allocate_beside", refuse)
        with pytest.raises(OutOfMemoryError):
            replay.load([(0, floats([1] * 4))])
        np.testing.assert_array_equal(call(replay, place([3] * 4)), [6] * 4)
    replay.load([(0, floats([1] * 4))])
    np.testing.assert_array_equal(run(replay), [2] * 4)
