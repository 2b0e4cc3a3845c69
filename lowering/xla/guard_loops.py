"""Guard loops: several iterations per turn of a loop whose end only its data tells.

Note [Guarded iterations]
A turn of a WHILE node takes 4.5 microseconds on an H200, a kernel in a chain 1. So a turn has
several iterations, each with the condition that follows it. The first of a turn is certain. The
others may come after the loop's end. Their results are thrown away: they are computed from values
that the loop itself has made, and must leave nothing behind. So what an iteration writes and a step
after the loop may read, the loop's *state*, is kept as it was after each iteration but the last:

* a piece that a step of the iteration writes anew is written to a place of the iteration's own, and
  the next iteration reads it there: this costs nothing. If that step is a memcpy, as XLA adds them
  at the end of a body, it is left out: what it copies is written to that place,
* every other piece, as an array that is updated in place, is copied, all by one kernel, which runs
  beside the condition.

The last kernel of a turn reads the flags of all iterations. Without a 0 the loop goes on, and the
state is where XLA wants it, since the last iteration of a turn computes in XLA's places. If a flag
before the last is 0, the kernel copies back the state as it was then. What nothing after the loop
reads needs no copy: its next value is written before it is read, or never.

The rule of cost, in microseconds. An iteration takes 1 for each node and 1 for each 4 MB that its
nodes name, the copy of the state 1, a turn 4.5, and a loop is taken to have a dozen iterations, of
which half a turn is too many. The number of iterations per turn is the one that costs least, as
long as a loop that ends after its first iteration loses no more than what XLA takes for one, 20. A
loop that often ends so early, as one inside of another may, loses by this rule, up to these 20 each
time; a long one of one kernel needs half the time by it.

A loop is guarded only if its iterations consist of kernels that XLA has written, memcpys, memsets
and what counts inner loops ahead. They end whatever they compute, and stay within their arrays: XLA
moves indices inside. Kernels of users, calls of libraries, branches and inner loops may do neither.
And its state has at most 64 KiB in 16 pieces.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tracegraph.lowering.device_program import ConditionalStep, DeviceStep, GraphStep
from tracegraph.lowering.kernels.loops.counters import COUNT_AHEAD
from tracegraph.lowering.kernels.loops.guards import end_turn, keep_state
from tracegraph.lowering.planning.first_reads import ByteSet, find_needed, follow_back
from tracegraph.lowering.planning.memory_plan import ALIGNMENT, align
from tracegraph.lowering.xla.control_flow import rename_steps
from tracegraph.lowering.xla.count_ahead import count_ahead, find_counters, read_additions
from tracegraph.lowering.xla.loop_state import Loop, move_iteration, read_loop
from tracegraph.runtime.definition.graph_nodes import Construct, Turn
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode, KernelNode

# In microseconds, on an H200; see `docs/design/control_flow.md`.
TURN, NODE, COPY = 4.5, 1.0, 1.0
BYTES_PER_MICROSECOND = 4_000_000
# What a loop is taken to have, and the most that one may lose which ends after the first.
EXPECTED_ITERATIONS, LONGEST_WASTE = 12, 20.0

MOST_PER_TURN = 8
# What all copies of a loop together may add; a node takes some microseconds to instantiate.
ADDED_NODES = 1024

# Instructions whose kernels XLA writes, and which do nothing but write their results.
_TAME = {"fusion", "copy", "sort", "scatter", "select-and-scatter", "reduce", "broadcast", "iota"}
_TAME |= {"transpose", "concatenate", "dynamic-slice", "dynamic-update-slice"}
_TAME_NODES = (KernelNode, CopyNode, FillNode)
# What makes a fusion of them do more.
_WILD = {"custom-call", "rng", "rng-get-and-update-state"}


@dataclasses.dataclass(frozen=True)
class _Program:
    """What loops are guarded for.

    Attributes:
        instructions: of every computation, by name.
        computations: the instructions of every computation, by its number.
        copies: how many loops of one instruction there are, by its name.
        add_temporary: returns so many new bytes.
        added: those that it has returned, by instruction and size.
    """

    instructions: Mapping[str, Any]
    computations: Mapping[int, Mapping[str, Any]]
    copies: Mapping[str, int]
    add_temporary: Callable[[int], BufferUse]
    added: dict[tuple[str, int], BufferUse] = dataclasses.field(default_factory=dict)

    def find_place(self, name: str, nbytes: int) -> BufferUse:
        """Returns new bytes for a loop; copies of a loop run one after another and share them."""
        key = _find_instruction(name), nbytes
        if key not in self.added:
            self.added[key] = self.add_temporary(nbytes)
        return self.added[key]

    def read_addition(self, step: GraphStep) -> int | None:
        """Returns what a step adds to an integer in place; None where it does otherwise."""
        return read_additions(self.instructions, self.computations)(step)


def guard_loops(
    steps: Sequence[GraphStep],
    results: Iterable[BufferUse],
    computations: Mapping[int, Mapping[str, Any]],
    add_temporary: Callable[[int], BufferUse],
) -> tuple[GraphStep, ...]:
    """Returns the steps, with several iterations per turn of a loop where that is right.

    See Note [Guarded iterations].

    Args:
        steps: in program order.
        results: the byte ranges that are read after the last step.
        computations: the instructions of every computation, by its number.
        add_temporary: returns so many new bytes.
    """
    copies = Counter(_find_instruction(each.name) for each in _list_open_loops(steps))
    if not copies:
        return tuple(steps)
    instructions = {name: each for found in computations.values() for name, each in found.items()}
    program = _Program(instructions, computations, copies, add_temporary)
    return _guard_steps(steps, ByteSet(results), program)


def choose_guarded(size: float, copy: float, most: int = MOST_PER_TURN) -> int:
    """Returns how many iterations a turn of a loop of unknown length has.

    Args:
        size: microseconds that an iteration takes.
        copy: microseconds that keeping the state takes after it.
        most: the result is no more than this.

    Example:
        >>> [choose_guarded(size, 1.0) for size in (1, 2, 8, 12, 40)]
        [6, 5, 3, 2, 1]
    """
    whole = size + copy
    costs = {
        count: EXPECTED_ITERATIONS * (TURN + copy * (count - 1)) / count + (count - 1) / 2 * whole
        for count in range(1, max(most, 1) + 1)
        if (count - 1) * whole <= LONGEST_WASTE
    }
    return min(costs, key=costs.__getitem__)


def _list_open_loops(steps: Iterable[GraphStep]) -> list[ConditionalStep]:
    """Returns the loops whose end is not known, those inside of others included."""
    found: list[ConditionalStep] = []
    for step in steps:
        if isinstance(step, ConditionalStep):
            found += [step] * _is_open_loop(step)
            found += [each for body in step.bodies for each in _list_open_loops(body)]
    return found


def _is_open_loop(step: ConditionalStep) -> bool:
    # What sets the handle of a loop of known length writes its counter.
    return step.construct is Construct.WHILE and not step.setter.writes


def _guard_steps(
    steps: Sequence[GraphStep], live: ByteSet, program: _Program
) -> tuple[GraphStep, ...]:
    """Returns the steps with their loops guarded.

    Args:
        steps: in program order.
        live: the bytes that may be read after them.
        program: what they belong to.
    """
    guarded, end = list(steps), len(steps)
    for index in reversed(range(len(steps))):
        step = steps[index]
        if isinstance(step, ConditionalStep):
            # The bytes that are live with one iteration per turn are those that count.
            _, live = follow_back(steps[index + 1 : end], live)
            guarded[index] = _guard_inside(step, live, program)
            end = index + 1
    return tuple(guarded)


def _guard_inside(step: ConditionalStep, live: ByteSet, program: _Program) -> ConditionalStep:
    inner = live
    if step.construct is Construct.WHILE:
        # After an iteration comes the end of the loop, or another iteration.
        inner = live.copy()
        inner.add(find_needed(step.bodies[0]))
    bodies = tuple(_guard_steps(body, inner, program) for body in step.bodies)
    step = dataclasses.replace(step, bodies=bodies)
    if not _is_open_loop(step) or not all(_is_tame(each, program) for each in step.bodies[0][:-1]):
        return step
    loop = read_loop(step, live)
    if loop is None:
        return step
    steps = loop.iteration
    counters = find_counters(steps, program.read_addition, loop.state)
    nbytes = sum(use.nbytes for each in steps for use in {*each.reads, *each.writes})
    count = len(steps) - len(loop.left_out) - len(counters)
    added = count + bool(loop.copied)
    most = ADDED_NODES // (added * program.copies[_find_instruction(step.name)]) + 1
    per_turn = choose_guarded(
        count * NODE + nbytes / BYTES_PER_MICROSECOND,
        COPY if loop.copied else 0.0,
        min(most, MOST_PER_TURN),
    )
    return _guard_loop(loop, per_turn, program) if per_turn > 1 else step


def _is_tame(step: GraphStep, program: _Program) -> bool:
    """True for a step that ends for any values, and does nothing but write what it says."""
    node = step.node if isinstance(step, DeviceStep) else None
    if not isinstance(node, _TAME_NODES):
        return False
    # Of an inner loop that is unrolled.
    if isinstance(node, KernelNode) and node.code.cubin is COUNT_AHEAD:
        return True
    instruction = program.instructions.get(_find_instruction(step.name))
    if instruction is None or instruction.opcode not in _TAME:
        return False
    inner = (
        each
        for number in instruction.called_computation_ids
        for each in program.computations.get(number, {}).values()
    )
    return not any(each.opcode in _WILD for each in inner)


def _find_instruction(name: str) -> str:
    """Returns the name of the instruction that a step is of."""
    return name.partition("@")[0]


def _guard_loop(loop: Loop, per_turn: int, program: _Program) -> ConditionalStep:
    """Returns the loop with several iterations per turn."""
    own = {piece: piece for piece in loop.state}
    kept = _place_state(loop, per_turn - 1, program)
    # Where the state is before the first iteration, and after each.
    places = [own, *kept, own]
    name = loop.step.name
    iterations: list[list[GraphStep]] = []
    for number, (before, after) in enumerate(itertools.pairwise(places), start=1):
        moved = move_iteration(loop, before, after)
        iterations.append(rename_steps(moved, f"guarded.{number}"))
        if number < per_turn and loop.copied:
            pairs = [(piece, after[piece]) for piece in loop.copied]
            iterations[-1].append(keep_state(f"{name}@keep.{number}", pairs))
    numbers = itertools.count()

    def add_temporary(nbytes: int) -> BufferUse:
        return program.find_place(f"counter {next(numbers)} of {name}", nbytes)

    counted = count_ahead(name, iterations, program.read_addition, add_temporary, loop.state)
    body = [step for steps in counted for step in steps]
    flags = [place[loop.flag] for place in places[1:]]
    pieces = [(piece, [place[piece] for place in kept]) for piece in loop.restored]
    body.append(end_turn(f"{name}@turn", flags, pieces))
    turn = Turn(per_turn, is_guarded=True)
    return dataclasses.replace(loop.step, bodies=(tuple(body),), turn=turn)


def _place_state(loop: Loop, count: int, program: _Program) -> list[dict[BufferUse, BufferUse]]:
    """Returns for each iteration but the last where each piece of the state is after it."""
    offsets: dict[BufferUse, int] = {}
    end = 0
    for piece in loop.state:
        # An address keeps its remainder, which kernels may rely on.
        offsets[piece] = end + piece.offset % ALIGNMENT
        end = align(offsets[piece] + piece.nbytes)
    buffer = program.find_place(loop.step.name, end * count).buffer
    return [
        {
            piece: BufferUse(buffer, index * end + offset, piece.nbytes)
            for piece, offset in offsets.items()
        }
        for index in range(count)
    ]
