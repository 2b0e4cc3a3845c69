"""The kernels that tell a node which branch to take: their text is run here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.fakes.condition_kernels import make_kernels
from tests.fakes.ptx_runner import run_node
from tracegraph.lowering.device_program import DeviceStep
from tracegraph.lowering.kernels.loops.conditions import set_branch
from tracegraph.runtime.definition.nodes import BufferUse

HANDLE = 77


def launch(step: DeviceStep, memory: np.ndarray[Any, Any], *, is_text: bool) -> int:
    """Returns what the handle is set to; the index is all that the step reads."""
    node: Any = step.node
    rest = [each for each in node.bind(HANDLE).parameters if isinstance(each, bytes)]
    parameters = (rest[0], memory.ctypes.data.to_bytes(8, "little"), *rest[1:])
    values: dict[int, int] = {}
    if is_text:
        run_node(node, values, parameters)
    else:
        make_kernels(values)[node.code.symbol](parameters)
    return values[HANDLE]


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize(
    ("dtype", "index", "taken"),
    [
        *[("uint8", 1, 0), ("uint8", 0, 1), ("uint8", 255, 0)],
        *[("int32", 0, 0), ("int32", 2, 2), ("int32", 3, 2), ("int32", -1, 2), ("int32", 1, 1)],
    ],
)
def test_one_branch_of_all_is_taken(dtype: str, index: int, taken: int, is_text: bool) -> None:
    memory = np.array([index], dtype)
    use = BufferUse("index", 0, memory.itemsize)
    count = 2 if memory.itemsize == 1 else 3
    found = [
        launch(set_branch("set", use, place, count), memory, is_text=is_text)
        for place in range(count)
    ]
    assert found == [int(place == taken) for place in range(count)]
