"""Nodes that are the same launch but for their addresses: one of them is timed for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from tracegraph.runtime.definition.graph_nodes import Node
from tracegraph.runtime.definition.library_nodes import CudnnNode, LibraryCallNode, MatmulNode
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    CopyNode,
    FillNode,
    KernelNode,
    KernelParameter,
    TensorMap,
)


def make_launch_key(node: Node) -> Hashable | None:
    """Returns what two nodes have in common that take the same time; None for one of its kind.

    That is the code, the shape of its launch, the sizes of the byte ranges and all other
    parameters. What the bytes hold is not compared.

    Args:
        node: of a graph.

    Example:
        >>> a, b = (FillNode(name, BufferUse(name, 0, 64)) for name in "ab")
        >>> make_launch_key(a) == make_launch_key(b)
        True
    """
    if isinstance(node, KernelNode):
        parameters = tuple(map(_forget_place, node.parameters))
        return node.code, node.shape, parameters, node.written, node.begins_with_wait
    if isinstance(node, CopyNode):
        return node.kind, node.source.nbytes
    if isinstance(node, FillNode):
        return node.kind, node.target.nbytes, node.element_bytes
    if isinstance(node, MatmulNode):
        return node.kind, node.matmul, _list_sizes(node.operands)
    if isinstance(node, LibraryCallNode | CudnnNode):
        return node.kind, node.call, _list_sizes(node.operands)
    return None


def _forget_place(parameter: KernelParameter) -> Hashable:
    if isinstance(parameter, BufferUse):
        return parameter.nbytes
    if isinstance(parameter, TensorMap):
        return dataclasses.replace(parameter, use=BufferUse("", 0, parameter.use.nbytes))
    return parameter


def _list_sizes(operands: tuple[tuple[object, BufferUse], ...]) -> tuple[Hashable, ...]:
    return tuple((role, use.nbytes) for role, use in operands)
