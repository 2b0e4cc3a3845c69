"""The text of what a loaded function is: its signatures, one after another."""

from __future__ import annotations

from collections.abc import Iterable

from tracegraph.constraints.mismatch import print_leaf_type
from tracegraph.lowering.planning.short_names import shorten
from tracegraph.lowering.request import Role
from tracegraph.reports.differences import print_value
from tracegraph.reports.explain_gpu import count_nodes, list_turns
from tracegraph.reports.summary import MAX_COLUMNS
from tracegraph.runtime.errors import shorten_list
from tracegraph.saving.loaded_graphs import LoadedEntry, LoadedParts

MAX_ARGUMENTS = 4


def describe_parts(parts: LoadedParts) -> str:
    """Returns a text with a paragraph for each signature.

    Args:
        parts: what is known of a loaded function.
    """
    lines = [f"`{parts.name}`, loaded from {parts.source}", f"saved with {parts.origin}"]
    for number, entry in enumerate(parts.entries):
        lines += ["", f"signature {number}", *_describe_entry(entry)]
    return "\n".join(shorten(line, MAX_COLUMNS) for line in lines)


def _describe_entry(entry: LoadedEntry) -> Iterable[str]:
    call, results, program = entry.call, entry.results, entry.lowered.program
    leaves = [
        f"{name}: {print_leaf_type(leaf.shape, leaf.dtype, leaf.weak_type)}"
        + (", donated" if index in call.donated else "")
        for index, (name, leaf) in enumerate(zip(call.names, call.signature.leaves, strict=True))
    ]
    leaves += [f"{name}: {print_value(value)}" for name, value in call.statics]
    yield f"arguments: {len(call.arguments)}, leaves: {len(call.names)}"
    yield from (f"  {line}" for line in shorten_list(leaves, MAX_ARGUMENTS))
    probes = f", probes: {len(results.probes)}" if results.probes else ""
    yield f"results: {results.tree.num_leaves}, {results.outputs}{probes}"
    yield f"nodes: {count_nodes(entry.lowered)}"
    yield from list_turns(entry.lowered)
    constants = sum(s.buffer.nbytes for s in program.inputs if s.role is Role.CONSTANT)
    size = entry.lowered.definition.arena_size
    yield f"memory: {size.reserved_bytes:,} bytes, {constants:,} of them closed-over arrays"
    yield f"verification: {entry.verification or 'still to be done'}"
