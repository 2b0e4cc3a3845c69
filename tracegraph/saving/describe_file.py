"""The text of what a file holds, on any machine: nothing of it is loaded."""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Iterable, Sequence

from tracegraph.constraints.mismatch import print_leaf_type
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.planning.short_names import shorten
from tracegraph.reports.explain_gpu import count_nodes, list_turns
from tracegraph.reports.summary import MAX_COLUMNS
from tracegraph.runtime.definition.graph_nodes import list_nested
from tracegraph.runtime.definition.nodes import KernelNode
from tracegraph.runtime.errors import shorten_list
from tracegraph.runtime.saving.record_codec import ContentProblem
from tracegraph.runtime.saving.saved_file import raise_damage, read_file
from tracegraph.saving.plain_values import unpack_dtype
from tracegraph.saving.saved_calls import SavedLeaf
from tracegraph.saving.saved_constants import SavedConstant
from tracegraph.saving.saved_function import Opened, SavedEntry, decode_entry, open_function

MAX_ARGUMENTS = 8


def describe_file(path: str | os.PathLike[str]) -> str:
    """Returns what a file holds: what it is for, its signatures, nodes, memory and proofs.

    Its kernels are not loaded, so a file for any machine can be described.

    Args:
        path: of the file.

    Raises:
        SavedFileError: the file cannot be read, is damaged, or has another format.
    """
    file = read_file(path)
    opened = open_function(file)
    digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    lines = [
        f"`{opened.function.name}`: {file.nbytes:,} bytes, sha256 {digest}",
        f"saved with {opened.origin}",
        *_describe_constants(opened),
    ]
    for number, entry in enumerate(opened.function.entries):
        try:
            lowered = decode_entry(opened, number, None)
            lines += ["", f"signature {number}", *_describe_entry(entry, lowered)]
        except ContentProblem as problem:
            raise_damage(opened.source, f"signature {number}, {problem.place}", problem.problem)
    # The sum is to be copied whole.
    return "\n".join([lines[0], *(shorten(line, MAX_COLUMNS) for line in lines[1:])])


def _describe_constants(opened: Opened) -> Iterable[str]:
    constants = opened.function.constants
    values = "with their values" if constants.has_data else "to be given to tg.load"
    if not constants.held and not constants.embedded:
        yield "closed-over arrays: none"
    if constants.held:
        yield f"closed-over arrays: {_count(constants.held)}, {values}"
        yield from (f"  {line}" for line in _list_types(constants.held))
    if constants.embedded:
        yield f"closed-over arrays in XLA's program: {_count(constants.embedded)}"
        yield from (f"  {line}" for line in _list_types(constants.embedded))


def _count(constants: Sequence[SavedConstant]) -> str:
    return f"{len(constants)}, {sum(each.nbytes for each in constants):,} bytes"


def _list_types(constants: Sequence[SavedConstant]) -> list[str]:
    return shorten_list(list(map(str, constants)), MAX_ARGUMENTS)


def _describe_entry(entry: SavedEntry, lowered: Lowered) -> Iterable[str]:
    call, results = entry.call, entry.results
    donated = _list_donated(entry)
    leaves = [
        f"{name}: {_print_leaf(leaf)}{', donated' if index in donated else ''}"
        for index, (name, leaf) in enumerate(zip(call.names, call.leaves, strict=True))
    ]
    statics = f", static: {len(call.static_values)}" if call.static_values else ""
    yield f"arguments: {len(call.arguments)}, leaves: {len(leaves)}{statics}"
    yield from (f"  {line}" for line in shorten_list(leaves, MAX_ARGUMENTS))
    probes = f", probes: {len(results.probes)}" if results.probes else ""
    yield f"results: {len(results.avals)}, {results.outputs}{probes}"
    yield f"nodes: {count_nodes(lowered)}"
    yield from list_turns(lowered)
    yield from _describe_code(lowered)
    yield f"memory: {lowered.definition.arena_size.reserved_bytes:,} bytes"
    yield f"verification: {entry.verification or 'still to be done'}"


def _describe_code(lowered: Lowered) -> Iterable[str]:
    nodes = [node for stage in lowered.definition.stages for node in list_nested(stage.nodes)]
    images = {node.code.cubin for node in nodes if isinstance(node, KernelNode)}
    if images:
        yield f"code: {len(images)} images, {sum(map(len, images)):,} bytes"


def _list_donated(entry: SavedEntry) -> set[int]:
    flags: list[bool] = []
    for each in entry.call.arguments:
        flags += [each.is_donated] * sum(node.kind == "leaf" for node in each.tree.nodes)
    return {index for index, is_donated in enumerate(flags) if is_donated}


def _print_leaf(leaf: SavedLeaf) -> str:
    return print_leaf_type(leaf.shape, unpack_dtype(leaf.dtype), leaf.weak_type)
