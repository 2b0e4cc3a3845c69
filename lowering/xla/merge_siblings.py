"""Merge siblings: small kernels of an iteration that wait for the same step become one.

Note [Merged siblings]
The backward pass of a `scan` adds what an iteration contributes to each gradient by a kernel of its
own, often a slice of one matmul's result each: eight for the weights of an LSTM. A kernel takes
time even where nothing waits for it. Those that add pieces of arrays, see `PieceLoop`, become one,
which computes the same bits.

Kernels are siblings where the last step that must be done before them is the same. They are ready
at one time, and none of them waits for another, so one kernel in the place of the first begins no
later. It ends later than the smallest of them would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tracegraph.lowering.device_program import DeviceStep, GraphStep, list_uses
from tracegraph.lowering.kernels.loops.piece_loops import (
    SYMBOL,
    THREADS,
    PieceLoop,
    write_piece_loops,
)
from tracegraph.lowering.xla.piece_fusions import read_piece_fusion
from tracegraph.runtime.definition.nodes import BufferUse, KernelCode, KernelNode, LaunchShape

# Two kernels take about as long as one that has to find its arrays.
MIN_STEPS = 3
# Above it a kernel of its own keeps most of a GPU busy.
MAX_ELEMENTS = 1 << 16
# A kernel takes 4096 bytes of parameters.
MAX_STEPS, MAX_ARGUMENTS = 32, 15

# Returns what a step's kernel computes; None where it is of another form.
ReadPieces: TypeAlias = Callable[[GraphStep], PieceLoop | None]
# Returns the kernel of a symbol in an image.
InternCode: TypeAlias = Callable[[str, bytes], KernelCode]


def merge_siblings(
    iterations: Sequence[Sequence[GraphStep]], read: ReadPieces, intern_code: InternCode
) -> list[list[GraphStep]]:
    """Returns the steps of each iteration with siblings merged, see Note [Merged siblings].

    Args:
        iterations: the steps of each, in program order; all have the same instructions.
        read: says what a step's kernel computes.
        intern_code: returns the same kernel for equal code.
    """
    found = [list(steps) for steps in iterations]
    if not found or sum(read(step) is not None for step in found[0]) < MIN_STEPS:
        return found
    return [_merge_steps(steps, read, intern_code) for steps in found]


def _merge_steps(
    steps: list[GraphStep], read: ReadPieces, intern_code: InternCode
) -> list[GraphStep]:
    loops = {index: loop for index, step in enumerate(steps) if (loop := read(step)) is not None}
    siblings: dict[int, list[int]] = defaultdict(list)
    for index in loops:
        siblings[_find_last_before(steps, index)].append(index)
    merged = list(steps)
    left_out: set[int] = set()
    for group in siblings.values():
        for first in range(0, len(group), MAX_STEPS):
            members = group[first : first + MAX_STEPS]
            if len(members) >= MIN_STEPS:
                parts = [(steps[each], loops[each]) for each in members]
                merged[members[0]] = _merge(parts, intern_code)
                left_out.update(members[1:])
    return [step for index, step in enumerate(merged) if index not in left_out]


def _find_last_before(steps: Sequence[GraphStep], index: int) -> int:
    """Returns the last step that must be done before another one; -1 where there is none."""
    step = steps[index]
    for before in reversed(range(index)):
        written = steps[before].writes
        if any(use.overlaps(each) for use in step.reads for each in written):
            return before
        touched = list_uses(steps[before])
        if any(use.overlaps(each) for use in step.writes for each in touched):
            return before
    return -1


def _merge(parts: Sequence[tuple[GraphStep, PieceLoop]], intern_code: InternCode) -> DeviceStep:
    """Returns one step for several."""
    steps, loops = zip(*parts, strict=True)
    parameters: dict[BufferUse, bool] = {}
    arguments: list[list[BufferUse]] = []
    for step in steps:
        assert isinstance(step, DeviceStep)
        assert isinstance(step.node, KernelNode)
        arguments.append(list(step.node.ranges))
        for use, is_written in step.node.uses:
            parameters[use] = parameters.get(use, False) or is_written
    numbers = {use: number for number, use in enumerate(parameters)}
    places = [[numbers[use] for use in uses] for uses in arguments]
    blocks = -(-max(loop.count for loop in loops) // THREADS)
    node = KernelNode(
        steps[0].name,
        intern_code(SYMBOL, write_piece_loops(loops, places)),
        LaunchShape((blocks, len(steps), 1), (THREADS, 1, 1)),
        tuple(parameters),
        tuple(parameters.values()),
    )
    reads = dict.fromkeys(use for step in steps for use in step.reads)
    writes = dict.fromkeys(use for step in steps for use in step.writes)
    return DeviceStep(node, tuple(reads), tuple(writes))


def read_pieces(
    instructions: Mapping[str, Any], computations: Mapping[int, Mapping[str, Any]]
) -> ReadPieces:
    """Returns what says of a step which pieces of arrays its kernel adds.

    Args:
        instructions: that steps are of, by name.
        computations: the instructions of every computation, by its number.
    """
    known: dict[str, PieceLoop | None] = {}

    def read(step: GraphStep) -> PieceLoop | None:
        node = step.node if isinstance(step, DeviceStep) else None
        if not isinstance(node, KernelNode):
            return None
        name = node.name.partition("@")[0]
        if name not in known:
            known[name] = read_piece_fusion(instructions.get(name), computations)
        loop = known[name]
        return loop if loop is not None and _is_of(node, loop) else None

    return read


def _is_of(node: KernelNode, loop: PieceLoop) -> bool:
    """True for a kernel whose arguments are those of a loop that is small enough."""
    uses, results = node.uses, {argument for _, argument in loop.results}
    if loop.count > MAX_ELEMENTS or not len(node.parameters) == len(uses) <= MAX_ARGUMENTS:
        return False
    if len(uses) != max(results) + 1 or any(
        4 * piece.find_end(loop.count) > uses[piece.argument][0].nbytes for piece in loop.pieces
    ):
        return False
    written = {use for use, is_written in uses if is_written}
    return written == {uses[each][0] for each in results} and all(
        use.nbytes == 4 * loop.count for use in written
    )
