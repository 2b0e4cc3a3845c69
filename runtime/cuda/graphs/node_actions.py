"""What a node does once its byte ranges have addresses: the parameters that the driver takes."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from tracegraph.runtime.cuda.driver.calls import CopyRange, FillRange, KernelLaunch
from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.events import make_event
from tracegraph.runtime.definition.event_nodes import EventNode
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, Node
from tracegraph.runtime.definition.library_nodes import (
    CudnnNode,
    FfiCallNode,
    LibraryCallNode,
    MatmulNode,
)
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    ConditionHandle,
    CopyNode,
    FillNode,
    KernelNode,
    KernelParameter,
    Locate,
)
from tracegraph.runtime.errors import InternalError

# What is captured while a library enqueues it.
LibraryNode: TypeAlias = MatmulNode | FfiCallNode | LibraryCallNode | CudnnNode


@dataclasses.dataclass(frozen=True)
class Child:
    """A library call, a branch or a loop on these addresses."""

    addresses: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Empty:
    """Nothing, because no byte would change; the node only keeps others in order."""


@dataclasses.dataclass(frozen=True)
class EventPass:
    """A record of an event of the driver's, or a wait for it."""

    handle: int
    is_wait: bool


Action: TypeAlias = KernelLaunch | CopyRange | FillRange | Child | EventPass | Empty


def make_action(driver: CudaDriver, node: Node, function: int, locate: Locate) -> Action:
    """Returns what a node does at the addresses of its byte ranges.

    Args:
        driver: encodes tensor maps.
        node: of a captured stage.
        function: handle of the kernel of a kernel node.
        locate: returns the address of a byte range.

    Raises:
        InternalError: the node is of a kind that no graph can hold.

    Example:
        >>> from tracegraph.runtime.definition.nodes import BufferUse, FillNode
        >>> make_action(None, FillNode("zero", BufferUse("a", 0, 8)), 0, lambda use: 4096)
        FillRange(target_address=4096, value=0, element_bytes=4, count=2)
    """
    if isinstance(node, KernelNode):
        return make_launch(driver, node, function, locate)
    if isinstance(node, CopyNode):
        return _make_copy(node, locate)
    if isinstance(node, FillNode):
        return _make_fill(node, locate(node.target))
    if isinstance(node, EventNode):
        return EventPass(make_event(driver, node.event), node.is_wait)
    if isinstance(node, LibraryNode | ConditionalNode):
        return Child(tuple(locate(use) for use in node.ranges))
    raise InternalError(
        f"a node of kind `{node.kind}` cannot stand in a CUDA graph",
        where=f"{node.kind} {node.name}",
        why="a CUDA graph holds kernels, copies, fills, library calls, events, branches and loops",
    )


def make_launch(
    driver: CudaDriver, node: KernelNode, function: int, locate: Locate
) -> KernelLaunch:
    """Returns the launch of a kernel at the addresses of its byte ranges.

    Args:
        driver: encodes tensor maps.
        node: which kernel, on what; bound to the handle of its conditional node, if it has one.
        function: handle of the kernel.
        locate: returns the address of a byte range.
    """
    parameters = tuple(_make_parameter(driver, each, locate) for each in node.parameters)
    return KernelLaunch(function, node.shape, parameters)


def is_patchable(node: Node, action: Action) -> bool:
    """True when a node can be given other addresses while its graph is executable."""
    if isinstance(action, Empty):
        # With bytes to copy it is empty only because source and target were the same.
        return not isinstance(node, CopyNode) or not node.source.nbytes
    return not isinstance(action, Child)


def move_action(node: Node, action: Action, buffer: str, address: int) -> Action:
    """Returns what a memcpy or a memset does once one buffer has another address.

    Args:
        node: the memcpy or memset.
        action: what it does now.
        buffer: name of the buffer that moves.
        address: of its first byte.
    """
    if isinstance(node, CopyNode) and isinstance(action, CopyRange):
        source, target = action.source_address, action.target_address
        if node.source.buffer == buffer:
            source = address + node.source.offset
        if node.target.buffer == buffer:
            target = address + node.target.offset
        return CopyRange(target, source, action.nbytes)
    if isinstance(node, FillNode) and isinstance(action, FillRange):
        return _make_fill(node, address + node.target.offset)
    return action


def _make_parameter(driver: CudaDriver, parameter: KernelParameter, locate: Locate) -> bytes:
    if isinstance(parameter, BufferUse):
        return locate(parameter).to_bytes(8, "little")
    if isinstance(parameter, bytes):
        return parameter
    if isinstance(parameter, ConditionHandle):
        raise InternalError(
            "a kernel sets a condition and belongs to no conditional node",
            where="parameters of a kernel",
            why="only a branch or a loop has a condition to set",
        )
    return driver.encode_tensor_map(parameter, locate(parameter.use))


def _make_copy(node: CopyNode, locate: Locate) -> Action:
    source, target = locate(node.source), locate(node.target)
    nbytes = node.source.nbytes
    return CopyRange(target, source, nbytes) if nbytes and source != target else Empty()


def _make_fill(node: FillNode, address: int) -> Action:
    nbytes = node.target.nbytes
    if not nbytes:
        return Empty()
    count = nbytes // node.element_bytes
    if node.element_bytes == 4 or nbytes % 4 or address % 4:
        return FillRange(address, node.value, node.element_bytes, count)
    # The same bytes in elements of four are set faster.
    repeated = node.value.to_bytes(node.element_bytes, "little") * (4 // node.element_bytes)
    return FillRange(address, int.from_bytes(repeated, "little"), 4, nbytes // 4)
