"""The user's lines behind nodes and buffers: of regions, of values, of XLA's instructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tracegraph.capturing.partition import list_region_ops
from tracegraph.ir.graph import Op
from tracegraph.ir.origins import locate_origin
from tracegraph.lowering.compiled_region import CompiledRegion
from tracegraph.lowering.late_executable import find_compiled
from tracegraph.lowering.lower import Lowered
from tracegraph.runtime.definition.event_nodes import EventNode
from tracegraph.runtime.definition.graph_nodes import Node
from tracegraph.runtime.definition.nodes import CallNode
from tracegraph.runtime.errors import shorten_list
from tracegraph.runtime.late_import import import_late
from tracegraph.tracing.checked_graph import CheckedGraph

if TYPE_CHECKING:
    from tracegraph.lowering.xla.origins import Origins

# Note [Late imports].
read_origins: Callable[[Any], Origins] = import_late(
    "tracegraph.lowering.xla.decode", "read_origins"
)
_MOST_LINES = 3


def find_buffer_lines(checked: CheckedGraph) -> dict[str, str]:
    """Returns the user's line that makes each value of the traced graph, by its buffer's name."""
    return {
        f"%{value.number}": locate_origin(op.origin)
        for op in checked.graph.ops
        for value in op.results
    }


class NodeLines:
    """Finds the user's lines of nodes.

    Args:
        checked: the traced graph.
        lowered: its lowering.
        buffer_lines: see `find_buffer_lines`.
    """

    def __init__(
        self, checked: CheckedGraph, lowered: Lowered, buffer_lines: Mapping[str, str]
    ) -> None:
        ops = checked.graph.ops
        self._buffers = buffer_lines
        regions = list_region_ops(checked.graph, checked.uncapturable)
        self._scopes = {name: _join_scopes([ops[i] for i in of]) for name, of in regions.items()}
        self._streams = {name: ops[of[0]].origin.stream for name, of in regions.items() if of}
        self._regions = {
            name: "; ".join(
                shorten_list(
                    list(dict.fromkeys(locate_origin(ops[index].origin) for index in indices)),
                    _MOST_LINES,
                )
            )
            for name, indices in regions.items()
        }
        # Read now and not at the capture, which would pay for it.
        self._origins = _read_all_origins(lowered) if lowered.takes_kernels else []

    def find(self, node: Node) -> str:
        """Returns the lines of a node; an empty text where nothing tells."""
        if isinstance(node, CallNode | EventNode):
            return self._regions.get(node.name, "")
        # The copies of a loop that is unrolled are numbered.
        name = node.name.partition("@")[0]
        touched = {*node.results, *node.arguments}
        # Instructions of two regions may have one name.
        order = sorted(self._origins, key=lambda pair: not _touches(pair[0], touched))
        lines = [origins.find_line(name) for _, origins in order]
        made = [self._buffers[each] for each in node.results if each in self._buffers]
        return next((line for line in (*lines, *made) if line), "")

    def find_place(self, node: Node) -> tuple[str, int]:
        """Returns the scope of a node, or an empty text, and the number of its stream."""
        if isinstance(node, CallNode | EventNode):
            return self._scopes.get(node.name, ""), self._streams.get(node.name, 0)
        name = node.name.partition("@")[0]
        touched = {*node.results, *node.arguments}
        order = sorted(self._origins, key=lambda pair: not _touches(pair[0], touched))
        scopes = (origins.find_path(name) for _, origins in order)
        owner = next((region.name for region, _ in order if _touches(region, touched)), "")
        scope = _leave_streams_out(next(filter(None, scopes), ""))
        return scope, self._streams.get(owner, 0)


def _join_scopes(ops: Sequence[Op]) -> str:
    scopes = dict.fromkeys(_leave_streams_out(op.origin.scope) for op in ops)
    return "; ".join(shorten_list([scope for scope in scopes if scope], _MOST_LINES))


def _leave_streams_out(scope: str) -> str:
    """Returns a scope without what marks the stream that an op was traced on."""
    return "/".join(part for part in scope.split("/") if not part.startswith("tg_stream_"))


def _read_all_origins(lowered: Lowered) -> list[tuple[CompiledRegion, Origins]]:
    found = ((region, find_compiled(region.executable)) for region in lowered.regions)
    return [(region, read_origins(each)) for region, each in found if each is not None]


def _touches(region: CompiledRegion, buffers: set[str]) -> bool:
    own = f"{region.name}."
    return any(name in region.outputs or name.startswith(own) for name in buffers)
