"""Estimated times: what is known of a launch decides; the same program gives the same ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.fakes.gpu_programs import copy, kernel
from tracegraph.lowering.device_program import ConditionalStep, DeviceStep
from tracegraph.lowering.planning.step_times import estimate_microseconds
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.library_nodes import Matmul, MatmulNode, MatrixLayout
from tracegraph.runtime.definition.nodes import BufferUse, LaunchShape

MATRIX = MatrixLayout("float32", 4, 4, 4)


def launch(nbytes: int, blocks: int, shared_bytes: int = 0) -> DeviceStep:
    """Returns a kernel that reads so many bytes."""
    step = kernel("k", "x", "")
    shape = LaunchShape((blocks, 1, 1), (128, 1, 1), shared_bytes=shared_bytes)
    node: Any = dataclasses.replace(step.node, shape=shape)
    return dataclasses.replace(step, node=node, reads=(BufferUse("x", 0, nbytes),))


@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        (launch(1 << 10, 64), launch(1 << 26, 64)),
        (launch(1 << 22, 1024), launch(1 << 22, 4)),
        (launch(1 << 10, 64), launch(1 << 10, 64, shared_bytes=49152)),
        (copy("c", "x", "y"), launch(1 << 26, 64)),
    ],
    ids=["bytes", "blocks", "staged operands", "copy"],
)
def test_what_takes_longer(faster, slower):
    assert 0 < estimate_microseconds(faster) < estimate_microseconds(slower)


def test_library_calls_and_branches_take_longer_than_a_small_kernel():
    small = kernel("k", "x", "y")
    uses = tuple((role, BufferUse(role, 0, 64)) for role in "abcd")
    node = MatmulNode("m", Matmul(MATRIX, MATRIX, MATRIX, MATRIX, 1.0, 0.0, "32F", "float32"), uses)
    matmul = DeviceStep(node, (uses[0][1], uses[1][1]), (uses[3][1],))
    loop = ConditionalStep("w", Construct.WHILE, ((small, matmul),), kernel("set", "x", ""))
    times = [estimate_microseconds(each) for each in (small, matmul, loop)]
    assert times == sorted(times)
    assert times[2] > sum(times[:2])
