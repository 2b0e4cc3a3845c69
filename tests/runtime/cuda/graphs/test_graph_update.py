"""CudaGraph: nodes of an executable graph get other addresses."""

from __future__ import annotations

import gc

import pytest

from tests.fakes.cuda_stages import (
    FIVE,
    SHAPE,
    STREAM,
    build,
    kernel,
    locate,
    moved,
    read_actions,
    tensor_map,
    use,
    word,
)
from tests.fakes.fake_driver import FakeDriver
from tests.oracles import error_lines
from tracegraph.runtime.cuda.driver.calls import CopyRange, FillRange
from tracegraph.runtime.definition.graph import Stage
from tracegraph.runtime.definition.nodes import CopyNode, FillNode, KernelCode, KernelNode
from tracegraph.runtime.errors import CudaError, InternalError


def test_update_changes_only_nodes_that_moved() -> None:
    driver = FakeDriver()
    stage = Stage(
        nodes=(
            kernel("one", "x", "y"),
            kernel("two", "y", "z"),
            FillNode("zero", use("w")),
            CopyNode("out", use("y", 64), use("w")),
        ),
        edges=((0, 1), (1, 2), (2, 3)),
    )
    graph = build(driver, stage)
    graph.upload(STREAM)
    assert graph.update(locate) == 0
    assert graph.update(moved(x=0x90000)) == 1
    assert graph.update(moved(x=0x90000)) == 0
    assert graph.update(moved(x=0x90000, w=0x80000)) == 2
    one, two, zero, out = read_actions(driver, graph)
    assert one.parameters == (word(0x90000), word(0x20040), b"\x07\0\0\0")  # pyright: ignore
    assert two.parameters == (word(0x20000), word(0x30040), b"\x07\0\0\0")  # pyright: ignore
    assert zero == FillRange(0x80000, 0, 4, 16)
    assert out == CopyRange(0x80000, 0x20040, 64)
    assert graph.update(locate, ["x"]) == 1
    assert graph.update(locate, ["z", "nowhere"]) == 0
    assert graph.update(locate) == 2


def test_update_refuses_library_calls_before_it_changes_anything() -> None:
    driver = FakeDriver()
    graph = build(driver, FIVE)
    graph.upload(STREAM)
    before = read_actions(driver, graph)
    assert [graph.can_rebind(name) for name in "xyzw"] == [False, False, False, True]
    with pytest.raises(InternalError) as caught:
        graph.update(moved(x=0x90000))
    error_lines.match(
        caught.value,
        "a node cannot be given another address",
        "node 3 of graph `f`, matmul dot",
        "it is in a graph that a library captured",
        "internal error in tracegraph",
    )
    with pytest.raises(InternalError):
        graph.make_patcher("x")
    assert read_actions(driver, graph) == before
    assert graph.update(moved(w=0x90000)) == 1


def test_a_failed_update_is_taken_back() -> None:
    driver = FakeDriver()
    stage = Stage(
        (kernel("one", "x", "y"), kernel("two", "x", "z"), CopyNode("c", use("x"), use("w"))), ()
    )
    graph = build(driver, stage)
    graph.upload(STREAM)
    before = read_actions(driver, graph)
    driver.fail_on = "set_copy_node"
    with pytest.raises(CudaError, match="node 2 of graph `f`, memcpy c: set_copy_node"):
        graph.update(moved(x=0x90000))
    assert read_actions(driver, graph) == before
    assert graph.update(locate) == 0
    assert graph.update(moved(x=0x90000)) == 3


def test_tensor_maps_follow_their_buffer() -> None:
    driver = FakeDriver()
    node = KernelNode(
        "tma", KernelCode("tma", b"i"), SHAPE, (tensor_map("x"), use("y")), (False, True)
    )
    graph = build(driver, Stage((node,), ()))
    graph.upload(STREAM)
    (launch,) = read_actions(driver, graph)
    assert launch.parameters[0] == driver.encode_tensor_map(tensor_map("x"), 0x10100)  # pyright: ignore
    assert len(launch.parameters[0]) == 128  # pyright: ignore
    graph.update(moved(x=0x90000))
    (launch,) = read_actions(driver, graph)
    assert launch.parameters[0] == driver.encode_tensor_map(tensor_map("x"), 0x90100)  # pyright: ignore
    graph.make_patcher("x")(0xA0000)
    (launch,) = read_actions(driver, graph)
    expected = (driver.encode_tensor_map(tensor_map("x"), 0xA0100), word(0x20000))
    assert launch.parameters == expected  # pyright: ignore


def test_patchers_change_one_buffer_and_leave_the_others() -> None:
    driver = FakeDriver()
    stage = Stage(
        (
            kernel("one", "x", "y"),
            kernel("two", "x", "x"),
            FillNode("zero", use("x", 32)),
            CopyNode("in", use("x", 64), use("w")),
            CopyNode("none", use("x", 0, 0), use("w", 0, 0)),
        ),
        (),
    )
    graph = build(driver, stage)
    graph.upload(STREAM)
    patch_x, patch_y = graph.make_patcher("x"), graph.make_patcher("y")
    patch_x(0x90000)
    patch_y(0xA0000)
    patch_x(0xB0000)
    one, two, zero, copy, none = read_actions(driver, graph)
    assert one.parameters == (word(0xB0000), word(0xA0040), b"\x07\0\0\0")  # pyright: ignore
    assert two.parameters == (word(0xB0000), word(0xB0040), b"\x07\0\0\0")  # pyright: ignore
    assert (zero, none) == (FillRange(0xB0020, 0, 4, 16), None)
    assert copy == CopyRange(0x40000, 0xB0040, 64)
    # `update` knows what the patchers did.
    assert graph.update(moved(x=0xB0000, y=0xA0000)) == 0
    assert graph.update(locate) == 4
    patch_y(0xC0000)
    assert read_actions(driver, graph)[0].parameters[:2] == (word(0x10000), word(0xC0040))  # pyright: ignore
    graph.make_patcher("nowhere")(1)


def test_a_patcher_keeps_the_graph() -> None:
    driver = FakeDriver()
    graph = build(driver, Stage((kernel("one", "x", "y"),), ()))
    graph.upload(STREAM)
    patch, executable = graph.make_patcher("x"), graph.handles[1]
    del graph
    gc.collect()
    patch(0x90000)
    assert executable in driver.executables
    del patch
    gc.collect()
    assert executable not in driver.executables
