"""Definitions with every kind of part and edge, and their records."""

from __future__ import annotations

from tests.fakes.cuda_on_host import SHAPE, kernel
from tests.fakes.definitions import make_definition, make_stage
from tracegraph.graph_pictures.graph_data import GraphData
from tracegraph.graph_pictures.read_graph import read_graph
from tracegraph.runtime.definition.graph import GraphDefinition, Stage
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Construct
from tracegraph.runtime.definition.library_nodes import FfiCallNode
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    ConditionHandle,
    CopyNode,
    FillNode,
    KernelCode,
    KernelNode,
)
from tracegraph.runtime.ffi.call import FfiCall


def use(name: str, offset: int = 0, nbytes: int = 16) -> BufferUse:
    return BufferUse(name, offset, nbytes)


def make_setter() -> KernelNode:
    parameters = (use("flag", 0, 1), ConditionHandle.OWN)
    return KernelNode("set", KernelCode("set_flag", b"s"), SHAPE, parameters, (False, False))


def make_handler(name: str, source: str, target: str) -> FfiCallNode:
    return FfiCallNode(name, FfiCall("user", (), ()), (use(source),), (use(target),))


def make_branch() -> ConditionalNode:
    bodies = (
        Body((kernel("yes", "a", "b"), CopyNode("keep", use("b"), use("c"))), ((0, 1),)),
        Body((FillNode("no", use("c")),), ()),
    )
    return ConditionalNode("choose", Construct.IF, bodies, make_setter())


def make_mixed() -> GraphDefinition:
    """A fork and a join with an early edge, a branch, two calls of handlers, an eager part."""
    nodes = (
        kernel("first", "x", "a"),
        kernel("left<&>", "a", "flag"),
        kernel("right", "a", "d"),
        make_branch(),
        make_handler("one", "d", "e"),
        make_handler("two", "a", "f"),
    )
    edges = ((0, 1), (0, 2), (1, 3), (2, 3), (2, 4))
    graph = Stage(nodes, edges, programmatic=frozenset({(0, 1)}))
    eager = make_stage(CopyNode("by hand", use("f"), use("y")), is_captured=False)
    return make_definition(graph, eager)


def read(definition: GraphDefinition) -> GraphData:
    """Returns the records of a definition, with lines that name what they are of."""
    return read_graph(definition, lambda node: f"line of {node.name}", {"a": "line of a"})
