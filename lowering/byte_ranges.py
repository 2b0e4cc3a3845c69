"""Byte ranges: each that a node names lies within its buffer, before and after assembly.

XLA's program is read from bytes, and says by itself which ranges its steps touch. So they are held
against the buffers twice: what XLA says against its allocations and the captured function's arrays,
and what the nodes of the finished graph say against the arena, where a range that is too long is
another buffer's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tracegraph.lowering.device_program import list_device_steps
from tracegraph.lowering.request import Region
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.graph_nodes import Node, list_nested
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode
from tracegraph.runtime.errors import InternalError, UnsupportedError

if TYPE_CHECKING:
    from tracegraph.lowering.xla.program import XlaProgram


def check_ranges(region: Region, program: XlaProgram) -> None:
    """Holds the byte ranges of XLA's program against its allocations and the region's arrays.

    Args:
        region: its inputs are the parameters of ``program``, its outputs the results.
        program: names only allocations that it has, and parameters that the region has.

    Raises:
        UnsupportedError: a step or a result reaches beyond its allocation or its array, or the
            two ranges of a memcpy differ in size.
    """
    sizes = {allocation.name: allocation.nbytes for allocation in program.allocations}
    for allocation in program.allocations:
        if allocation.parameter is not None:
            # What XLA may have added to an argument is not in our buffer of it.
            nbytes = region.inputs[allocation.parameter].nbytes
            sizes[allocation.name] = min(allocation.nbytes, nbytes)
    for step in list_device_steps(program.steps):
        problem = _find_outside(step.ranges, sizes) or _find_unequal(step.node)
        if problem is not None:
            place = f"{step.kind} `{step.name}` of `{region.name}`"
            raise _make_reader_error(problem, place)
    for spec, name in zip(region.outputs, program.outputs, strict=True):
        if (problem := _find_outside([BufferUse(name, 0, spec.nbytes)], sizes)) is not None:
            place = f"result `{spec.name}` of `{region.name}`"
            raise _make_reader_error(problem, place)


def verify_ranges(definition: GraphDefinition) -> None:
    """Verifies that nodes stay within their slots, and slots with their content in the arena.

    Raises:
        InternalError: one does not.
    """
    sizes = {slot.name: slot.nbytes for slot in definition.slots}
    arena = {"arena": definition.arena_bytes}
    for slot in definition.slots:
        within = [] if slot.is_outside else [BufferUse("arena", slot.offset, slot.nbytes)]
        problem = _find_outside(within, arena)
        if slot.content is not None and len(slot.content) != slot.nbytes:
            problem = f"its content has {len(slot.content):,} bytes, not {slot.nbytes:,}"
        if problem is not None:
            raise _make_build_error(problem, f"slot `{slot.name}`", definition)
    for stage in definition.stages:
        for index, outer in enumerate(stage.nodes):
            for node in list_nested([outer]):
                problem = _find_outside(node.ranges, sizes) or _find_unequal(node)
                if problem is not None:
                    place = f"node {index}, {node.kind} `{node.name}`"
                    raise _make_build_error(problem, place, definition)


def _find_outside(ranges: Iterable[BufferUse], sizes: Mapping[str, int]) -> str | None:
    """Returns what the first range that is not within its buffer names."""
    for use in ranges:
        if not use.fits(sizes[use.buffer]):
            end = use.offset + use.nbytes
            size = sizes[use.buffer]
            return f"bytes {use.offset:,} to {end:,} of `{use.buffer}`, which has {size:,}"
    return None


def _find_unequal(node: Node) -> str | None:
    """Returns the sizes of a memcpy whose two ranges differ."""
    if not isinstance(node, CopyNode) or node.source.nbytes == node.target.nbytes:
        return None
    return f"a memcpy from {node.source.nbytes:,} to {node.target.nbytes:,} bytes"


def _make_reader_error(problem: str, place: str) -> UnsupportedError:
    return UnsupportedError(
        f"the program that XLA compiled reaches out of a buffer: {problem}",
        where=place,
        why="the bytes behind a buffer are another one's, and a replay would read or write them",
        fix="use jax.jit for this function, and report this text",
        anchor="unsupported",
    )


def _make_build_error(problem: str, place: str, definition: GraphDefinition) -> InternalError:
    return InternalError(
        f"a node or a slot reaches out of its memory: {problem}",
        where=f"{place} of graph `{definition.name}`",
        why="what lies behind a buffer in the arena belongs to another one",
    )
