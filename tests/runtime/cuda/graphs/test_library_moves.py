"""Where a library's kernels have addresses, and replays that read arguments through one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.fakes.cuda_on_host import (
    CudaOnHost,
    kernel,
    make_cuda_replay,
    on_floats,
    place,
)
from tests.fakes.cuda_stages import MATMUL
from tests.fakes.definitions import make_definition, make_stage, take_results
from tests.runtime.cuda.test_lent_buffers import count_blocks, lend
from tracegraph.runtime.cuda.driver.calls import FillRange, KernelLaunch
from tracegraph.runtime.cuda.driver.captured_nodes import CapturedNode
from tracegraph.runtime.cuda.graphs.library_moves import DISTANCE_BYTES, find_moves
from tracegraph.runtime.definition.library_nodes import MatmulNode
from tracegraph.runtime.definition.nodes import BufferUse, LaunchShape
from tracegraph.runtime.errors import CudaError
from tracegraph.runtime.replay import Replay

SHAPE = LaunchShape((4, 1, 1), (128, 1, 1))
STARTS = {"a": 0x10000, "b": 0x20000}
DISTANCES = {"a": DISTANCE_BYTES, "b": 2 * DISTANCE_BYTES}
SCALE = b"\x07\0\0\0"


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


def launch(*parameters: bytes, function: int = 5) -> CapturedNode:
    return CapturedNode(77, "KERNEL", KernelLaunch(function, SHAPE, parameters))


def fill(address: int, value: int = 0) -> CapturedNode:
    return CapturedNode(78, "MEMSET", FillRange(address, value, 4, 16))


def find(before: Any, after: Any) -> dict[str, list[tuple[int | None, int, int]]]:
    found = find_moves([before], [after], STARTS, DISTANCES)
    return {
        name: [(move.parameter, move.word, move.offset) for move in moves]
        for name, moves in found.items()
    }


def test_words_that_grow_by_a_distance_are_pointers() -> None:
    before = launch(word(3) + word(0x10040) + word(0x20000), SCALE, word(0x10000))
    after = launch(
        word(3) + word(0x10040 + DISTANCES["a"]) + word(0x20000 + DISTANCES["b"]),
        SCALE,
        word(0x10000 + DISTANCES["a"]),
    )
    assert find(before, after) == {"a": [(0, 1, 0x40), (2, 0, 0)], "b": [(0, 2, 0)]}


def test_the_target_of_a_memset_moves() -> None:
    assert find(fill(0x10100), fill(0x10100 + DISTANCES["a"])) == {"a": [(None, 0, 0x100)]}


MOVED = launch(word(0x10000 + DISTANCES["a"]), SCALE)
CHANGES = {
    "another amount": launch(word(0x10000 + DISTANCES["a"] + 1), SCALE),
    "bytes that are no word": launch(word(0x10000 + DISTANCES["a"]), b"\x08\0\0\0"),
    "another kernel": launch(word(0x10000 + DISTANCES["a"]), SCALE, function=6),
    "a memset": fill(0x10000 + DISTANCES["a"]),
    "a call on the host": CapturedNode(79, "HOST", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_moves_where_anything_else_changes(name: str) -> None:
    before = launch(word(0x10000), SCALE)
    assert find(before, MOVED) == {"a": [(0, 0, 0)]}
    assert find(before, CHANGES[name]) == {}


def test_another_number_of_nodes_moves_nothing() -> None:
    before = launch(word(0x10000), SCALE)
    assert find_moves([before], [MOVED, MOVED], STARTS, DISTANCES) == {}
    other = fill(0x20000, 1)
    assert find_moves([before, fill(0x20000)], [MOVED, other], STARTS, DISTANCES) == {}


def use(name: str) -> BufferUse:
    return BufferUse(name, 0, 16)


ADD = dataclasses.replace(
    MATMUL, operands=(("a", use("x")), ("b", use("w")), ("c", use("y")), ("d", use("y")))
)


class TwoNodes:
    """A library that adds two vectors: a memset of the sum, and a kernel that adds.

    Args:
        device: whose driver captures.
        hides: the second input is read by work that has no parameters.
    """

    stream = 0

    def __init__(self, device: CudaOnHost, *, hides: bool = False) -> None:
        self._device, self._hides = device, hides
        device.driver.kernels["sum"] = on_floats(np.add)

    def prepare(self, node: Any, locate: Any = None) -> None:
        del node, locate

    def enqueue(self, node: Any, locate: Callable[[BufferUse], int], stream: int) -> None:
        driver = self._device.driver
        first, second, target, _ = (locate(each) for each in node.ranges)
        driver.add_captured(stream, FillRange(target, 0, 4, 4))
        function = next((f for f, s in driver.functions.items() if s == "sum"), None)
        if function is None:
            function = driver.get_function(driver.load_library(b"sum"), "sum")
        action = KernelLaunch(function, SHAPE, (word(first), word(second), word(target)))
        if self._hides:
            driver.add_captured(stream, lambda: driver._run(action))
            return
        driver.add_captured(stream, action)


def add(device: CudaOnHost, *, hides: bool = False, lends: bool = False) -> Replay:
    """Returns a graph that adds x and w by a library, behind a kernel that doubles w."""
    device._libraries[MatmulNode.kind] = TwoNodes(device, hides=hides)  # type: ignore[assignment]
    stage = make_stage(kernel("double", "w", "z"), ADD)
    definition = make_definition(stage, inputs="x w", outputs="y z")
    return make_cuda_replay(device, lend(definition) if lends else definition)


def call(replay: Replay, x: Any, w: Any) -> list[Any]:
    replay.settle()
    for index, value in enumerate((x, w)):
        replay.inputs[index].make_writer()(value)
    replay.launch()
    return take_results(replay)


def test_a_library_reads_arguments_where_they_are(device: CudaOnHost) -> None:
    replay = add(device)
    copies, kept = device.driver.count_calls("copy_async"), []
    for value in range(1, 5):
        y, z = call(replay, place([value] * 4), place([10 * value] * 4))
        assert device.driver.count_calls("copy_async") == copies
        kept.append((value, y.jax(), z.jax()))
    for value, y, z in kept:
        np.testing.assert_array_equal(y, [11 * value] * 4)
        np.testing.assert_array_equal(z, [20 * value] * 4)
    # The sum went to memory of its own each time.
    assert len({y.unsafe_buffer_pointer() for _, y, _ in kept}) == len(kept)


def test_a_library_with_hidden_addresses_gets_copies(device: CudaOnHost) -> None:
    replay = add(device, hides=True)
    for value in range(1, 4):
        copies = device.driver.count_calls("copy_async")
        y, _ = call(replay, place([value] * 4), place([5] * 4))
        assert device.driver.count_calls("copy_async") == copies + 2
        np.testing.assert_array_equal(y, [value + 5] * 4)


def test_a_lent_input_is_read_by_a_library(device: CudaOnHost) -> None:
    replay = add(device, lends=True)
    blocks = count_blocks(replay)
    for value in range(1, 4):
        y, _ = call(replay, place([value] * 4), place([5] * 4))
        np.testing.assert_array_equal(y, [value + 5] * 4)
    assert count_blocks(replay) == blocks


def test_a_lent_input_of_a_library_with_hidden_addresses_has_memory(device: CudaOnHost) -> None:
    replay = add(device, hides=True, lends=True)
    for value in range(1, 4):
        y, _ = call(replay, place([value] * 4), place([5] * 4))
        np.testing.assert_array_equal(y, [value + 5] * 4)
    address = replay.inputs[0].address
    assert address
    assert any(block.address == address for block in replay.arena._blocks)


def test_a_patch_that_fails_leaves_the_next_call_right(device: CudaOnHost) -> None:
    replay = add(device)
    w = place([5] * 4)
    held = call(replay, place([1] * 4), w)
    for name in ("send", "set_fill_node"):
        device.driver.fail_on = name
        with pytest.raises(CudaError, match=name):
            call(replay, place([2] * 4), place([3] * 4))
    y, _ = call(replay, place([7] * 4), w)
    np.testing.assert_array_equal(y, [12] * 4)
    np.testing.assert_array_equal(held[0], [6] * 4)
