"""Rebinding: which buffers the nodes of graphs can be pointed at elsewhere, and what does so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from tracegraph.runtime.cuda.buffer import CudaBuffer
from tracegraph.runtime.cuda.graphs.graph import CudaGraph
from tracegraph.runtime.definition.graph import MAX_PATCHED_NODES, GraphDefinition

# A buffer of this size is worth any number of patched nodes.
LARGE_BYTES = 1 << 20


def list_rebindable(definition: GraphDefinition, reached: Collection[str]) -> list[str]:
    """Returns the inputs that hold nothing from one replay to the next.

    Args:
        definition: of the capture.
        reached: buffers that other GPUs reach, which stay where they are.
    """
    kept = {slot.name for slot in definition.slots if slot.is_resident} | set(definition.outputs)
    return [name for name in definition.inputs if name not in kept and name not in reached]


def find_patchers(
    users: Sequence[Mapping[str, Sequence[int]]],
    graphs: Mapping[int, CudaGraph],
    kernels_only: bool,
    buffer: CudaBuffer,
) -> tuple[Callable[[int], None], ...] | None:
    """Returns what points every graph at another address of a buffer, None if one cannot.

    Args:
        users: of each stage, see `Stage.users`.
        graphs: by the index of their stage.
        kernels_only: see `CudaGraph.can_rebind`.
        buffer: the buffer.
    """
    patchers = []
    count = 0
    for index, nodes in enumerate(users):
        if buffer.name not in nodes:
            continue
        if index not in graphs:
            return None
        if not graphs[index].can_rebind(buffer.name, kernels_only=kernels_only):
            return None
        count += len(nodes[buffer.name])
        patchers.append(graphs[index].make_patcher(buffer.name))
    if count > MAX_PATCHED_NODES and buffer.nbytes < LARGE_BYTES:
        return None
    return tuple(patchers)
