"""The kernel that counts ahead: its text is run here, and in Python, on the same memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tests.fakes.condition_kernels import make_kernels
from tests.fakes.ptx_runner import run_node
from tracegraph.lowering.kernels.counters import MOST_VALUES, count_values
from tracegraph.lowering.planning.memory_plan import ALIGNMENT
from tracegraph.runtime.nodes import BufferUse

COUNT = 40


def count(dtype: str, start: int, step: int, number: int, *, is_text: bool) -> tuple[int, bytes]:
    """Returns the counter and the memory of the values afterwards."""
    nbytes = np.dtype(dtype).itemsize
    counter = np.array([start], dtype)
    memory = np.full(ALIGNMENT * (number + 1), 7, np.uint8)
    values = BufferUse("values", 0, ALIGNMENT * (number - 1) + nbytes)
    node: Any = count_values("count", BufferUse("counter", 0, nbytes), values, step).node
    addresses = {"counter": counter.ctypes.data, "values": memory.ctypes.data}
    parameters = tuple(
        addresses[each.buffer].to_bytes(8, "little") if isinstance(each, BufferUse) else each
        for each in node.parameters
    )
    if is_text:
        run_node(node, {}, parameters)
    else:
        make_kernels({})[node.code.symbol](parameters)
    return int(counter[0]), memory.tobytes()


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize(
    ("dtype", "start", "step"),
    [("int32", 5, 1), ("int32", 3, -2), ("int64", 1 << 40, 3), ("uint32", (1 << 32) - 2, 1)],
)
@pytest.mark.parametrize("number", [1, COUNT, MOST_VALUES])
def test_each_value_has_a_place(
    dtype: str, start: int, step: int, number: int, is_text: bool
) -> None:
    after, memory = count(dtype, start, step, number, is_text=is_text)
    # As XLA adds: numbers that do not fit begin anew.
    wanted = (start + step * np.arange(number + 1, dtype=np.int64)).astype(dtype)
    assert after == wanted[-1]
    nbytes = wanted.itemsize
    for index in range(number):
        place = memory[index * ALIGNMENT :][:ALIGNMENT]
        assert place[:nbytes] == wanted[index].tobytes()
        # What is between is left alone.
        assert place[nbytes:] == b"\7" * (ALIGNMENT - nbytes)
    assert memory[number * ALIGNMENT :] == b"\7" * ALIGNMENT


def test_a_block_has_a_thread_for_each_value() -> None:
    values = BufferUse("values", 0, ALIGNMENT * (MOST_VALUES - 1) + 4)
    node: Any = count_values("count", BufferUse("counter", 0, 4), values, 1).node
    assert node.shape.block == (MOST_VALUES, 1, 1)
    assert ctypes.c_int64(int.from_bytes(node.parameters[3], "little")).value == MOST_VALUES
