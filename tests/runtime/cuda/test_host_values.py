"""What a graph keeps in host memory: page-locked, and freed behind the last launch."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import numpy as np

from tests.fakes.cuda_on_host import CudaOnHost, floats, make_cuda_replay
from tests.runtime.cuda.test_buffer import run
from tracegraph.runtime.definition.graph import ArenaSize, BufferSlot, GraphDefinition, Stage
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode

F32 = np.dtype(np.float32)


def use(name: str, nbytes: int = 16) -> BufferUse:
    return BufferUse(name, 0, nbytes)


# The value of x goes through two places of host memory.
DEFINITION = GraphDefinition(
    "offload",
    ArenaSize(512, 256),
    (
        BufferSlot("x", 0, (4,), F32),
        BufferSlot("y", 256, (4,), F32),
        BufferSlot("t", 512, (4,), F32),
        BufferSlot("h", 768, (4,), F32, is_host=True),
        BufferSlot("i", 1024, (4,), F32, is_host=True),
    ),
    (
        Stage(
            tuple(
                CopyNode(f"{one}{other}", use(one), use(other))
                for one, other in ("xh", "ht", "ti", "iy")
            ),
            ((0, 1), (1, 2), (2, 3)),
        ),
    ),
    ("x",),
    ("y",),
)


def count_active(device: CudaOnHost) -> int:
    return device.context.pinned.statistics.active_bytes.current


def test_values_pass_through_host_memory(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DEFINITION)
    for value in (floats([1, 2, 3, 4]), floats([5, 6, 7, 8])):
        replay.load([(0, value)])
        np.testing.assert_array_equal(run(replay), value)
    # From the first byte of the one to the last of the other, in whole pages.
    assert count_active(device) == 4096


def test_places_are_apart_and_not_in_the_arena(device: CudaOnHost) -> None:
    replay = make_cuda_replay(device, DEFINITION)
    buffers: Any = replay.buffers
    first, second = (buffers[name].address for name in "hi")
    assert second - first == 256
    inside = [range(start, start + nbytes) for start, nbytes in replay.arena.ranges]
    assert not any(first in each or second in each for each in inside)


def test_it_is_nan_before_the_first_launch(device: CudaOnHost) -> None:
    nodes = DEFINITION.stages[0].nodes[3:]
    stage = Stage(nodes, ())
    replay = make_cuda_replay(device, dataclasses.replace(DEFINITION, stages=(stage,)))
    replay.load([(0, floats([1, 2, 3, 4]))])
    assert np.isnan(run(replay)).all()


def test_without_host_memory_nothing_is_page_locked(device: CudaOnHost) -> None:
    nodes = (CopyNode("xy", use("x"), use("y")),)
    definition = dataclasses.replace(
        DEFINITION, slots=DEFINITION.slots[:3], stages=(Stage(nodes, ()),)
    )
    replay = make_cuda_replay(device, definition)
    replay.load([(0, floats([1, 2, 3, 4]))])
    np.testing.assert_array_equal(run(replay), [1, 2, 3, 4])
    assert count_active(device) == 0


def test_it_is_free_for_others_only_behind_the_last_launch(late: CudaOnHost) -> None:
    replay = make_cuda_replay(late, DEFINITION)
    buffers: Any = replay.buffers
    address = buffers["h"].address
    gone = weakref.ref(buffers["h"].host_values)
    replay.load([(0, floats([1, 2, 3, 4]))])
    replay.launch()
    del replay, buffers
    gc.collect()
    assert gone() is None
    pinned = late.context.pinned
    other = pinned.allocate(400, is_exact=True)
    assert other.address != address
    late.context.synchronize()
    assert pinned.allocate(400, is_exact=True).address == address
