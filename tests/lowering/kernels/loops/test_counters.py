"""The kernel that counts ahead: its text is run here, and in Python, on the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.fakes.condition_kernels import make_kernels
from tests.fakes.ptx_runner import run_node
from tracegraph.lowering.kernels.loops.counters import MOST_VALUES, count_values
from tracegraph.lowering.planning.memory_plan import ALIGNMENT
from tracegraph.runtime.definition.nodes import BufferUse

FIRST = 7
KINDS = [("int32", 5, 1), ("int32", 3, -2), ("int64", 1 << 40, 3), ("uint32", (1 << 32) - 2, 1)]


def launch(node: Any, is_text: bool, **memory: np.ndarray[Any, Any]) -> None:
    parameters = tuple(
        memory[each.buffer].ctypes.data.to_bytes(8, "little")
        if isinstance(each, BufferUse)
        else each
        for each in node.parameters
    )
    if is_text:
        run_node(node, {}, parameters)
    else:
        make_kernels({})[node.code.symbol](parameters)


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize(("dtype", "start", "step"), KINDS)
@pytest.mark.parametrize("count", [1, 40, MOST_VALUES])
def test_each_value_has_a_place(
    dtype: str, start: int, step: int, count: int, is_text: bool
) -> None:
    counter = np.array([start], dtype)
    nbytes = counter.itemsize
    memory = np.full(ALIGNMENT * (count + 1), 7, np.uint8)
    values = BufferUse("values", 0, ALIGNMENT * (count - 1) + nbytes)
    made = count_values("count", BufferUse("counter", 0, nbytes), values, FIRST, step)
    launch(made.node, is_text, counter=counter, values=memory)
    # As XLA adds: numbers that do not fit begin anew.
    wanted = (start + FIRST + step * np.arange(count, dtype=np.int64)).astype(dtype)
    places = memory.reshape(count + 1, ALIGNMENT)
    np.testing.assert_array_equal(places[:count, :nbytes].copy().view(dtype)[:, 0], wanted)
    # What is between and behind is left alone, and so is the counter.
    assert (places[:, nbytes:] == 7).all()
    assert (places[count] == 7).all()
    assert counter[0] == start


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize(("dtype", "start", "step"), KINDS)
def test_a_counter_is_set(dtype: str, start: int, step: int, is_text: bool) -> None:
    counter = np.array([start], dtype)
    use = BufferUse("counter", 0, counter.itemsize)
    launch(count_values("counted", use, use, step, 0).node, is_text, counter=counter)
    assert counter[0] == np.array([start + step], np.int64).astype(dtype)[0]


def test_a_block_has_a_thread_for_each_value() -> None:
    values = BufferUse("values", 0, ALIGNMENT * (MOST_VALUES - 1) + 4)
    node: Any = count_values("count", BufferUse("counter", 0, 4), values, 1, 1).node
    assert node.shape.block == (MOST_VALUES, 1, 1)
    assert int.from_bytes(node.parameters[-1], "little") == MOST_VALUES
