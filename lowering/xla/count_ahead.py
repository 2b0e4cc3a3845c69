"""Count ahead: the values of a loop's counter in all iterations of a turn come from one kernel.

Note [Counted ahead]
XLA counts a loop's iterations in memory: a kernel of one thread adds to the counter, in place. It
waits for all kernels of its iteration that read the counter, a dozen in a train step of an LSTM,
and those of the next iteration wait for it. So iterations that could overlap follow one another,
and the graph has a node and two dozen edges more for each.

Where a turn of a loop has several iterations, or all are unrolled, the values that they will find
are known at its beginning. One kernel writes those of all iterations but the first side by side,
and another, behind the first iteration, sets the counter to what the last one leaves. Each
iteration reads its own value, and none waits for the one before.

That is right where each iteration adds the same number by one step that does nothing else, and no
other step writes the counter or reads it together with bytes around it. A turn that may go past the
end of its loop leaves the counter too high: there, nothing after the loop may read it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tracegraph.lowering.device_program import DeviceStep, GraphStep
from tracegraph.lowering.kernels.loops.counters import MOST_VALUES, count_values
from tracegraph.lowering.planning.memory_plan import ALIGNMENT
from tracegraph.lowering.xla.constants import read_literal
from tracegraph.lowering.xla.enums import read_name
from tracegraph.lowering.xla.loop_fusions import list_fused
from tracegraph.runtime.definition.nodes import BufferUse

_INTEGERS = frozenset(["S32", "U32", "S64", "U64"])


# Returns the number that a step adds to an integer in place; None where it does otherwise.
ReadAddition: TypeAlias = Callable[[GraphStep], int | None]


def count_ahead(
    name: str,
    iterations: Sequence[Sequence[GraphStep]],
    read: ReadAddition,
    add_temporary: Callable[[int], BufferUse],
    fixed: Sequence[BufferUse] = (),
) -> list[list[GraphStep]]:
    """Returns the steps of each iteration, without those that count it.

    See Note [Counted ahead].

    Args:
        name: of the loop's instruction.
        iterations: the steps of each, in program order.
        read: says what a step adds.
        add_temporary: returns so many new bytes.
        fixed: bytes in which nothing is counted ahead.
    """
    found = [list(steps) for steps in iterations]
    if len(found) < 2:
        return found
    counters = find_counters(found[0], read, fixed)
    for steps in found[1:]:
        writing = [step for step in steps if not counters.keys().isdisjoint(step.writes)]
        own = {step.writes[0]: read(step) for step in writing}
        counters = {
            use: number
            for use, number in counters.items()
            if own.get(use) == number and _is_counter(use, steps)
        }
    for counter, number in sorted(counters.items()):
        for first in range(0, len(found) - 1, MOST_VALUES):
            part = slice(first, first + MOST_VALUES)
            found[part] = _count(name, found[part], counter, number, add_temporary)
    return found


def find_counters(
    steps: Sequence[GraphStep], read: ReadAddition, fixed: Sequence[BufferUse] = ()
) -> dict[BufferUse, int]:
    """Returns what an iteration adds to each counter that other steps only read.

    Args:
        steps: of the iteration.
        read: says what a step adds.
        fixed: bytes in which no counter is looked for.
    """
    numbers = {step.writes[0]: read(step) for step in steps if step.writes}
    return {
        use: number
        for use, number in numbers.items()
        if number is not None and not any(map(use.overlaps, fixed)) and _is_counter(use, steps)
    }


def _is_counter(counter: BufferUse, steps: Sequence[GraphStep]) -> bool:
    """True where one step writes the counter, and none names a part of it."""
    writing = [step for step in steps if any(map(counter.overlaps, step.writes))]
    # Most ranges are in other buffers: asked first, and not by a call, it takes a third.
    near = [
        use for step in steps for use in step.ranges if use.nbytes and use.buffer == counter.buffer
    ]
    return len(writing) == 1 and all(use == counter for use in near if use.overlaps(counter))


def _count(
    name: str,
    iterations: Sequence[Sequence[GraphStep]],
    counter: BufferUse,
    number: int,
    add_temporary: Callable[[int], BufferUse],
) -> list[list[GraphStep]]:
    """Returns the iterations, each of which reads a value of its own."""
    # An address keeps its remainder, which kernels may rely on.
    rest, count = counter.offset % ALIGNMENT, len(iterations)
    added = add_temporary(rest + (count - 2) * ALIGNMENT + counter.nbytes)
    values = BufferUse(added.buffer, added.offset + rest, added.nbytes - rest)
    places = [
        counter,
        *(
            BufferUse(values.buffer, values.offset + index * ALIGNMENT, counter.nbytes)
            for index in range(count - 1)
        ),
        counter,
    ]
    counted: list[list[GraphStep]] = []
    for (place, after), steps in zip(itertools.pairwise(places), iterations, strict=True):
        index = next(i for i, step in enumerate(steps) if counter in step.writes)
        before = [_move(step, counter, place) for step in steps[:index]]
        counted.append([*before, *(_move(step, counter, after) for step in steps[index + 1 :])])
    counted[0].insert(0, count_values(f"{name}@count", counter, values, number, number))
    counted[0].append(count_values(f"{name}@counted", counter, counter, count * number, 0))
    return counted


def _move(step: GraphStep, counter: BufferUse, place: BufferUse) -> GraphStep:
    if counter not in step.reads:
        return step
    return step.move(lambda use: place if use == counter else use)


def read_additions(
    instructions: Mapping[str, Any], computations: Mapping[int, Mapping[str, Any]]
) -> ReadAddition:
    """Returns what says of a step which number it adds to an integer in place.

    Args:
        instructions: that steps are of, by name.
        computations: the instructions of every computation, by its number.
    """
    return functools.partial(_read_addition, instructions, computations)


def _read_addition(
    instructions: Mapping[str, Any],
    computations: Mapping[int, Mapping[str, Any]],
    step: GraphStep,
) -> int | None:
    if not isinstance(step, DeviceStep) or step.reads != step.writes or len(step.writes) != 1:
        return None
    inner = list_fused(instructions.get(step.name.partition("@")[0]), computations)
    by_opcode = {each.opcode: each for each in inner}
    if len(inner) != 3 or {*by_opcode} != {"parameter", "constant", "add"}:
        return None
    addition, constant = by_opcode["add"], by_opcode["constant"]
    operands = {by_opcode["parameter"].id, constant.id}
    kinds = {read_name(each.shape, "element_type") for each in inner}
    is_single = not any(each.shape.dimensions for each in inner)
    if {*addition.operand_ids} != operands or not is_single or len(kinds) != 1:
        return None
    if not kinds <= _INTEGERS or inner[-1] is not addition:
        return None
    return int.from_bytes(read_literal(constant), "little", signed=True)
