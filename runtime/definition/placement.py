"""Placement: the definition of a graph over several GPUs → the graph of one of them.

All GPUs have the same nodes at the same offsets. What differs is the number of a GPU, and where the
others have their arrays: a collective becomes a kernel with a table of these addresses.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence

from tracegraph.runtime.definition.collective_nodes import (
    MAX_MEMBERS,
    CollectiveNode,
    Exchange,
    JointCollectiveNode,
    NumberNode,
)
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.graph_nodes import (
    Body,
    ConditionalNode,
    GraphNode,
    Node,
    list_nested,
)
from tracegraph.runtime.definition.nodes import BufferUse, FillNode, KernelNode
from tracegraph.runtime.errors import InternalError

VECTOR_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Peers:
    """Where a GPU finds the others.

    Attributes:
        number: of the GPU itself.
        locate: the address of a byte range on a GPU, by its number.
        find_signals: for the GPUs of a group the address of the memory through which they meet.
    """

    number: int
    locate: Callable[[int, BufferUse], int]
    find_signals: Callable[[tuple[int, ...]], Sequence[int]]


def place_definition(definition: GraphDefinition, peers: Peers) -> GraphDefinition:
    """Returns what one GPU does.

    Args:
        definition: of all.
        peers: of the GPU.
    """
    stages = tuple(
        dataclasses.replace(stage, nodes=tuple(_place(node, peers) for node in stage.nodes))
        for stage in definition.stages
    )
    return dataclasses.replace(definition, stages=stages)


def list_exchanged(definition: GraphDefinition) -> frozenset[str]:
    """Returns the buffers that are exchanged with other GPUs: these stay where they are."""
    nodes = _list_nodes(definition)
    exchanges = [n for n in nodes if isinstance(n, CollectiveNode | JointCollectiveNode)]
    return frozenset(use.buffer for node in exchanges for use in node.ranges)


def list_joint(definition: GraphDefinition) -> list[JointCollectiveNode]:
    """Returns what GPUs of several processes exchange between the graphs, in order."""
    return [node for node in _list_nodes(definition) if isinstance(node, JointCollectiveNode)]


def list_groups(definition: GraphDefinition) -> list[tuple[int, ...]]:
    """Returns the groups of GPUs whose kernels exchange something, each once."""
    exchanges = [node for node in _list_nodes(definition) if isinstance(node, CollectiveNode)]
    found = [group for node in exchanges for group in node.exchange.groups]
    return list(dict.fromkeys(found))


def pack_table(
    exchange: Exchange,
    number: int,
    sources: Sequence[int],
    targets: Sequence[int],
    signals: Sequence[int],
) -> bytes:
    """Returns the ``Table`` of a collective's kernel.

    Args:
        exchange: what it does.
        number: of the GPU that it runs on.
        sources: address of each member's source, in the order of its group.
        targets: the same of the targets.
        signals: the same of the memory through which they meet.
    """
    group = exchange.find_group(number)
    sender = exchange.find_sender(number)
    is_aligned = all(address % VECTOR_BYTES == 0 for address in (*sources, *targets))
    empty = [0] * (MAX_MEMBERS - len(group))
    return struct.pack(
        f"<{3 * MAX_MEMBERS}Qq4i",
        *(address for column in (sources, targets, signals) for address in (*column, *empty)),
        exchange.count,
        group.index(number),
        -1 if sender is None else group.index(sender),
        is_aligned,
        0,
    )


def _place(node: Node, peers: Peers) -> Node:
    if isinstance(node, CollectiveNode):
        return _place_collective(node, peers)
    if isinstance(node, NumberNode):
        return FillNode(node.name, node.target, peers.number, 4)
    if isinstance(node, ConditionalNode):
        bodies = tuple(_place_body(body, peers) for body in node.bodies)
        return dataclasses.replace(node, bodies=bodies)
    return node


def _place_body(body: Body, peers: Peers) -> Body:
    nodes = tuple(_place(node, peers) for node in body.nodes)
    placed: tuple[GraphNode, ...] = nodes  # pyright: ignore[reportAssignmentType]
    return dataclasses.replace(body, nodes=placed)


def _place_collective(node: CollectiveNode, peers: Peers) -> KernelNode:
    if node.code is None or node.shape is None:
        raise InternalError(
            f"the collective `{node.name}` has no kernel",
            where=f"{node.kind} {node.name}",
            why="kernels of our own are compiled when XLA's program has been read",
        )
    group = node.exchange.find_group(peers.number)
    sources, targets = (
        [peers.locate(member, use) for member in group] for use in (node.source, node.target)
    )
    signals = peers.find_signals(group)
    table = pack_table(node.exchange, peers.number, sources, targets, signals)
    parameters = (table, node.source, node.target)
    return KernelNode(
        node.name, node.code, node.shape, parameters, (False, False, True), begins_with_wait=True
    )


def _list_nodes(definition: GraphDefinition) -> list[Node]:
    return [*list_nested(node for stage in definition.stages for node in stage.nodes)]
