"""What is wrong with a graph definition that comes from a file.

A definition that lowering has made holds these rules by construction. One that was read names any
bytes and any order: nothing outside of its arena may be reached by a node, whatever the file says.
What its kernels do with the pointers that they get is theirs: a file holds machine code, see
`docs/saved_graphs.md`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from tracegraph.runtime.definition.early_loads import CompletedNodes, find_writers
from tracegraph.runtime.definition.graph import BufferSlot, GraphDefinition, Stage
from tracegraph.runtime.definition.graph_nodes import (
    Body,
    ConditionalNode,
    Construct,
    Node,
    list_nested,
)
from tracegraph.runtime.definition.launch_limits import find_shape_problem, find_tile_problem
from tracegraph.runtime.definition.library_nodes import CudnnNode, MatmulNode
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    CallNode,
    ConditionHandle,
    CopyNode,
    FillNode,
    KernelNode,
    TensorMap,
)

# More than any program of XLA has; rows of a file may share parts, so that few bytes make many.
MAX_NODES = 1 << 20
# CUDA's own limit of nested conditional nodes is below.
MAX_DEPTH = 16
MAX_ARENA_BYTES = 1 << 48
_BODY_COUNTS = {Construct.IF: (1, 2), Construct.WHILE: (1, 1), Construct.SWITCH: (1, 1 << 16)}


def find_definition_problem(definition: GraphDefinition) -> str:
    """Returns the first thing that is wrong with a definition, or an empty text.

    Args:
        definition: of any origin; its fields have the types of their annotations.

    Example:
        >>> from tracegraph.runtime.definition.graph import ArenaSize
        >>> bare = GraphDefinition("f", ArenaSize(0), (), (), ("x",), ())
        >>> find_definition_problem(bare)
        'the static input x has no place in the arena'
    """
    return next(_find_problems(definition), "")


def _find_problems(definition: GraphDefinition) -> Iterator[str]:
    sizes = (definition.arena_size.kept_bytes, definition.arena_size.scratch_bytes)
    if min(sizes) < 0 or sum(sizes) > MAX_ARENA_BYTES:
        yield f"the arena has {sizes[0]} and {sizes[1]} bytes"
    slots = {slot.name: slot for slot in definition.slots}
    if len(slots) != len(definition.slots):
        yield "two buffers have one name"
    for slot in definition.slots:
        yield from _check_slot(slot, definition)
    named = {*definition.inputs, *definition.outputs}
    yield from (
        f"{slot.name} is in host memory, and no temporary"
        for slot in definition.slots
        if slot.is_host and (slot.name in named or slot.is_lent or slot.is_resident)
    )
    for what, names in (("static input", definition.inputs), ("result", definition.outputs)):
        yield from (f"the {what} {n} has no place in the arena" for n in names if n not in slots)
    yield from _check_lent(definition)
    nodes = _Nodes(slots)
    for stage in definition.stages:
        yield from nodes.check(stage, depth=0)
    yield from _check_early_loads(definition)


def _check_lent(definition: GraphDefinition) -> Iterator[str]:
    """Yields the buffers without memory that are more than inputs that only kernels read."""
    lent = {slot.name for slot in definition.slots if slot.is_lent}
    if not lent:
        return
    fixed = {slot.name for slot in definition.slots if slot.is_resident} | {*definition.outputs}
    yield from (f"{n} is lent, and no input" for n in sorted(lent - {*definition.inputs}))
    yield from (f"{n} is lent, and keeps a value" for n in sorted(lent & fixed))
    for stage in definition.stages:
        for node in stage.nodes:
            is_movable = stage.is_captured and isinstance(node, KernelNode | MatmulNode | CudnnNode)
            named = {*node.results} if is_movable else {*node.arguments, *node.results}
            yield from (f"{node.name} uses {n}, which is lent" for n in sorted(lent & named))


def _check_early_loads(definition: GraphDefinition) -> Iterator[str]:
    """Yields the kernels that are started early and load what another node writes."""
    nodes = list(list_nested(node for stage in definition.stages for node in stage.nodes))
    kernels = [node for node in nodes if isinstance(node, KernelNode)]
    if not any(node.early_loads for node in kernels):
        return
    places = {slot.name: range(slot.offset, slot.offset + slot.nbytes) for slot in definition.slots}
    order = [node for stage in definition.stages for node in stage.nodes]
    writes = [(node, name) for node in order for name in node.results]
    writers = find_writers(kernels, order, writes, places)
    bodies = [body for node in nodes if isinstance(node, ConditionalNode) for body in node.bodies]
    for part in [*definition.stages, *bodies]:
        for second in _list_unsettled(part, writers):
            yield f"{second.name} is started early and loads what a node ahead of it writes"


def _list_unsettled(part: Stage | Body, writers: Mapping[int, Collection[int]]) -> Iterator[Node]:
    """Yields the nodes that are started before all that writes what they load has completed."""
    places = {id(node): place for place, node in enumerate(part.nodes)}
    completed = CompletedNodes(part.edges)
    for place, node in enumerate(part.nodes):
        early = [p for p in completed.list_ahead(place) if (p, place) in part.programmatic]
        completed.add(place, early)
        found = completed.find(place, early)
        ahead = writers.get(id(node), ()) if early else ()
        if not all(each in places and found >> places[each] & 1 for each in ahead):
            yield node


def _check_slot(slot: BufferSlot, definition: GraphDefinition) -> Iterator[str]:
    if any(size < 0 for size in slot.shape) or slot.dtype.hasobject or not slot.dtype.itemsize:
        yield f"the buffer {slot.name} has shape {slot.shape} and dtype {slot.dtype}"
        return
    start, end = 0, definition.arena_bytes
    if slot.is_resident:
        end = definition.arena_size.kept_bytes
    elif slot.is_outside:
        start, end = end, MAX_ARENA_BYTES
    if slot.offset < start or slot.offset + slot.nbytes > end:
        yield f"the buffer {slot.name} is outside of its part of the arena"
    if slot.content is not None and len(slot.content) != slot.nbytes:
        yield f"the constant {slot.name} has {len(slot.content)} of {slot.nbytes} bytes"


class _Nodes:
    """Checks nodes, and counts them."""

    def __init__(self, slots: Mapping[str, BufferSlot]) -> None:
        self._nbytes = {name: slot.nbytes for name, slot in slots.items()}
        self._count = 0

    def check(self, part: Stage | Body, depth: int) -> Iterator[str]:
        """Yields what is wrong with the nodes of a stage or a body, and with their order."""
        self._count += len(part.nodes)
        if depth > MAX_DEPTH or self._count > MAX_NODES:
            yield f"there are more than {MAX_NODES} nodes, or they are nested {MAX_DEPTH} deep"
            return
        yield from _check_edges(part)
        for node in part.nodes:
            yield from self._check_node(node, depth)

    def _check_node(self, node: Node, depth: int) -> Iterator[str]:
        if isinstance(node, ConditionalNode):
            yield from self._check_conditional(node, depth)
            return
        # In this order: a kernel's ranges are told by its marks.
        problem = _find_own_problem(node, has_handle=depth > 0) or self._find_outside(node.ranges)
        if not problem and isinstance(node, CallNode):
            problem = self._find_call_problem(node)
        if problem:
            yield f"the {node.kind} {node.name} {problem}"

    def _check_conditional(self, node: ConditionalNode, depth: int) -> Iterator[str]:
        least, most = _BODY_COUNTS[node.construct]
        if not least <= len(node.bodies) <= most:
            yield f"the {node.kind} {node.name} has {len(node.bodies)} bodies"
        if node.turn is not None and node.turn.iterations < 1:
            yield f"the {node.kind} {node.name} has a turn of {node.turn.iterations} iterations"
        if ConditionHandle.OWN not in node.setter.parameters:
            yield f"the {node.kind} {node.name} has a kernel that does not set its handle"
        yield from self._check_node(node.setter, depth + 1)
        for body in node.bodies:
            yield from self.check(body, depth + 1)

    def _find_outside(self, ranges: Sequence[BufferUse]) -> str:
        for use in ranges:
            size = self._nbytes.get(use.buffer)
            if size is None:
                return f"names the buffer {use.buffer}, which has no place in the arena"
            if use.offset < 0 or use.nbytes < 0 or use.offset + use.nbytes > size:
                return f"names bytes {use.offset} to {use.offset + use.nbytes} of {use.buffer}"
        return ""

    def _find_call_problem(self, node: CallNode) -> str:
        for name in (*node.arguments, *node.results):
            if name not in self._nbytes:
                return f"names the buffer {name}, which has no place in the arena"
        if not 0 <= node.in_place <= min(len(node.arguments), len(node.results)):
            return f"updates {node.in_place} of its arguments in place"
        return ""


def _check_edges(part: Stage | Body) -> Iterator[str]:
    count = len(part.nodes)
    for first, second in part.edges:
        if not 0 <= first < second < count:
            yield f"an edge goes from node {first} to node {second} of {count}"
    edges = frozenset(part.edges)
    for edge in part.programmatic:
        if edge not in edges:
            yield f"the early start {edge} is not an edge"
            continue
        first, second = (part.nodes[index] for index in edge)
        if not isinstance(first, KernelNode) or not isinstance(second, KernelNode):
            yield f"the early start {edge} is not between kernels"
        elif not second.begins_with_wait:
            yield f"{second.name} is started early and does not wait"


def _find_own_problem(node: Node, *, has_handle: bool) -> str:
    if isinstance(node, KernelNode):
        return _find_kernel_problem(node, has_handle=has_handle)
    if isinstance(node, CopyNode) and node.source.nbytes != node.target.nbytes:
        return f"copies {node.source.nbytes} bytes to {node.target.nbytes}"
    if isinstance(node, FillNode):
        size = node.element_bytes
        if size not in (1, 2, 4) or node.target.nbytes % size or not 0 <= node.value < 256**size:
            return f"sets {node.target.nbytes} bytes in elements of {size} to {node.value}"
    return ""


def _find_kernel_problem(node: KernelNode, *, has_handle: bool) -> str:
    if not node.code.symbol or not node.code.cubin:
        return "has no code"
    if len(node.written) != len(node.parameters):
        return f"has {len(node.parameters)} parameters and {len(node.written)} marks"
    if problem := find_shape_problem(node.shape):
        return problem
    if any(not 0 <= number < len(node.parameters) for number in node.code.early):
        return f"loads {node.code.early} of its {len(node.parameters)} parameters early"
    for parameter, is_written in zip(node.parameters, node.written, strict=True):
        if isinstance(parameter, bytes | ConditionHandle) and is_written:
            return "writes through a value"
        if parameter is ConditionHandle.OWN and not has_handle:
            return "takes the handle of a conditional node that it is not in"
        if isinstance(parameter, TensorMap) and (problem := find_tile_problem(parameter)):
            return problem
    return ""
