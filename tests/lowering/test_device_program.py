"""Steps: what they name, and how they move."""

from __future__ import annotations

import dataclasses

from tracegraph.lowering.device_program import DeviceStep
from tracegraph.runtime.definition.nodes import BufferUse, KernelCode, KernelNode, LaunchShape

HERE, THERE, EMPTY = BufferUse("a", 0, 8), BufferUse("b", 8, 8), BufferUse("c", 0, 0)
NODE = KernelNode(
    "k",
    KernelCode("k", b"code"),
    LaunchShape((1, 1, 1), (32, 1, 1)),
    (HERE, THERE, EMPTY),
    (False, True, False),
)
STEP = DeviceStep(NODE, (HERE,), (THERE,), stream=2)


def test_a_step_names_each_range_once() -> None:
    assert STEP.ranges == (HERE, THERE, EMPTY)


def test_a_step_moves_with_its_node() -> None:
    asked: list[BufferUse] = []

    def relocate(use: BufferUse) -> BufferUse:
        asked.append(use)
        return use._replace(buffer="d") if use == THERE else use

    moved = STEP.move(relocate)
    there = BufferUse("d", 8, 8)
    assert moved == DeviceStep(
        dataclasses.replace(NODE, parameters=(HERE, there, EMPTY)), (HERE,), (there,), stream=2
    )
    assert moved.ranges == (HERE, there, EMPTY)
    assert asked == [HERE, THERE, EMPTY]
    # What stays where it is needs no other step.
    assert STEP.move(lambda use: use) is STEP


def test_a_renamed_step_has_the_same_ranges() -> None:
    renamed = STEP.rename("k@1")
    assert renamed == DeviceStep(dataclasses.replace(NODE, name="k@1"), (HERE,), (THERE,), 2)
    assert renamed.ranges == STEP.ranges
