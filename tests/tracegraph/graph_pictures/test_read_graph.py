"""A definition as records: what is in them, and that the driver gets the same graph."""

from __future__ import annotations

import pytest

from tests.deviceless.building import build_graphs
from tests.fakes.cuda_on_host import SHAPE, kernel
from tests.fakes.definitions import make_definition, make_stage
from tests.fakes.fake_driver import FakeDriver
from tests.tracegraph.graph_pictures.graphs import make_mixed, read, use
from tracegraph.graph_pictures.graph_data import NODE_BYTES
from tracegraph.graph_pictures.records import (
    BufferData,
    EdgeData,
    KernelData,
    PartData,
)
from tracegraph.runtime.cuda.driver.calls import Port
from tracegraph.runtime.definition.nodes import CopyNode

MIXED = read(make_mixed())


def test_parts_and_nodes() -> None:
    assert MIXED.parts == (
        PartData(0, "graph"),
        PartData(1, "body", 4, 0),
        PartData(2, "body", 4, 1),
        PartData(3, "eager"),
    )
    assert [(node.index, node.part, node.kind, node.name) for node in MIXED.nodes] == [
        (0, 0, "kernel", "first"),
        (1, 0, "kernel", "left<&>"),
        (2, 0, "kernel", "right"),
        (3, 0, "kernel", "set"),
        (4, 0, "if", "choose"),
        (5, 0, "ffi_call", "one"),
        (6, 0, "ffi_call", "two"),
        (7, 1, "kernel", "yes"),
        (8, 1, "memcpy", "keep"),
        (9, 2, "memset", "no"),
        (10, 3, "memcpy", "by hand"),
    ]
    assert [node.index for node in MIXED.list_nodes(1)] == [7, 8]


def test_edges_have_ports() -> None:
    assert sorted((edge.first, edge.second, edge.port) for edge in MIXED.edges) == [
        (0, 1, "programmatic"),
        (0, 2, "complete"),
        (1, 3, "complete"),
        (2, 3, "complete"),
        (2, 5, "complete"),
        (3, 4, "complete"),
        # Calls of handlers follow one another.
        (5, 6, "complete"),
        (7, 8, "complete"),
    ]
    assert MIXED.dependencies(3) == (1, 2)
    assert MIXED.dependents(2) == (3, 5)
    assert MIXED.edges_into(1) == (EdgeData(0, 1, "programmatic"),)


def test_what_a_node_does() -> None:
    first, branch, call = MIXED.nodes[0], MIXED.nodes[4], MIXED.nodes[5]
    assert first.kernel == KernelData("first", SHAPE.grid, SHAPE.block, (1, 1, 1), 0)
    assert (first.reads, first.writes, first.nbytes) == ((use("x"),), (use("a"),), 32)
    assert first.where == "line of first"
    assert str(first) == "0: kernel first, 1 blocks of 32 threads, 32 bytes"
    assert str(MIXED.nodes[3]).startswith("3: kernel set (set_flag), ")
    assert branch.kernel is None
    assert branch.reads == (use("flag", 0, 1), use("a"))
    assert branch.writes == (use("b"), use("c"))
    assert (call.reads, call.writes) == ((use("d"),), (use("e"),))


def test_buffers_have_types_places_and_lines() -> None:
    assert BufferData("a", (4,), "float32", 16, 4096, "line of a") in MIXED.buffers
    assert [buffer.offset for buffer in MIXED.buffers] == sorted(
        buffer.offset for buffer in MIXED.buffers
    )


def test_compiled_calls_take_whole_buffers() -> None:
    from_host = read(make_definition(make_stage(CopyNode("c", use("x"), use("y", 4, 8)))))
    assert (from_host.nodes[0].reads, from_host.nodes[0].writes) == ((use("x"),), (use("y", 4, 8),))


def test_the_text() -> None:
    lines = str(MIXED).splitlines()
    assert lines[:3] == [
        "`f`: 11 nodes, 8 edges",
        "graph of `f`",
        "  0: kernel first, 1 blocks of 32 threads, 32 bytes  # line of first",
    ]
    assert "  after 0~  # line of left<&>" in lines[3]
    assert "body 1 of 4: if choose" in lines
    assert "eager of `f`" in lines


def test_the_driver_gets_the_same_graph() -> None:
    definition = make_mixed()
    driver = FakeDriver()
    (graph,) = build_graphs(definition, driver, driver.retain_primary_context(0))
    edges = {
        (edge.first, edge.second, edge.port == "programmatic")
        for edge in MIXED.edges
        if MIXED.nodes[edge.first].part == 0
    }
    found = driver.read_edges(graph.handles[0])
    assert {(a, b, port is not Port.COMPLETE) for a, b, port in found} == edges
    assert len(driver.graphs[graph.handles[0]]) == len(MIXED.list_nodes(0))


@pytest.mark.parametrize(("nbytes", "path"), [(16, (0, 1, 3)), (2 * NODE_BYTES, (0, 2))])
def test_the_critical_path_has_most_bytes(nbytes: int, path: tuple[int, ...]) -> None:
    """A chain of more nodes is longer, unless another one moves more bytes than they cost."""
    nodes = (
        kernel("a", "x", "s"),
        kernel("b", "s", "t"),
        CopyNode("large", use("s", 0, nbytes), use("u", 0, nbytes)),
        kernel("c", "t", "y"),
    )
    data = read(make_definition(make_stage(*nodes, edges=((0, 1), (0, 2), (1, 3)))))
    assert data.critical_path() == path


def test_a_graph_of_nothing() -> None:
    data = read(make_definition(make_stage()))
    assert (data.critical_path(), data.nodes, str(data)) == (
        (),
        (),
        "`f`: 0 nodes, 0 edges\ngraph of `f`",
    )
