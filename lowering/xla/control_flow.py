"""Control flow: XLA's ``while`` and ``conditional`` thunks become branches and loops of the graph.

XLA runs both from the host: it copies a condition to it, waits, and decides. A graph decides on the
device. What that costs was measured on an H200 with CUDA 13, in microseconds:

* a kernel in a straight chain 1.0,
* a turn of a WHILE node 4.5 beyond its kernels, one turn alone about 7,
* an IF node 3.2 when it is not taken, 7 when it is.

A node that chooses among branches came with CUDA 12.8: with an older driver each branch is an IF
node of its own.

Note [Unrolled loops]
A loop whose trip count XLA knows is unrolled into the graph up to `UNROLLED_NODES` nodes, or twice
as many where the rest copies pieces of stacks: at known places most of those go, see Note
[Forwarded copies] in `lowering/planning/forward_copies.py`. A longer one becomes a WHILE node whose
body has as many iterations as `TURN_NODES` nodes allow, so that the cost of a turn is shared by
them, and what is left of the trip count follows it. Iterations are changed by Note [Gathered
slices] in `lowering/xla/gather_slices.py`, Note [Counted ahead] in `lowering/xla/count_ahead.py`,
Note [Merged siblings] in `lowering/xla/merge_siblings.py`, and Note [Values of a turn] in
`lowering/planning/rename_turn.py`. A loop whose trip count is unknown is decoded with one iteration
per turn; Note [Guarded iterations] in `lowering/xla/guard_loops.py` says when it gets more. Of
those that it has in any case, see Note [Certain iterations] in `lowering/xla/trip_counts.py`, up to
`TURN_NODES` nodes come ahead of it: 6 or 7 iterations are 6 and a branch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tracegraph.lowering.device_program import (
    ConditionalStep,
    DeviceStep,
    GraphStep,
    list_device_steps,
)
from tracegraph.lowering.kernels.loops.conditions import (
    COUNTER_BYTES,
    count_turn,
    set_branch,
    set_flag,
    set_index,
    start_turns,
)
from tracegraph.lowering.planning.rename_turn import rename_turn
from tracegraph.lowering.xla.count_ahead import count_ahead, find_counters, read_additions
from tracegraph.lowering.xla.gather_slices import gather_slices
from tracegraph.lowering.xla.merge_siblings import merge_siblings, read_pieces
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.scope import DecodeSequence, Iteration, Scope
from tracegraph.lowering.xla.trip_counts import find_trip_counts
from tracegraph.runtime.definition.graph_nodes import Construct, Turn
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode

# Nodes are 0.2 KB of device memory each and take some microseconds to instantiate.
UNROLLED_NODES = 1024
TURN_NODES = 256


def decode_while(message: Any, name: str, scope: Scope, decode: DecodeSequence) -> list[GraphStep]:
    """Returns the steps of a ``WhileThunkProto``. See Note [Unrolled loops].

    Args:
        message: the thunk.
        name: of its instruction.
        scope: what it refers to.
        decode: returns the steps of the sequences inside.
    """
    if message.HasField("trip_count"):
        return _decode_counted(message, name, scope, decode)
    flag = scope.find_use(message.condition_result_buffer_index)
    if flag.nbytes != 1:
        raise Refusal(f"loops on a condition of {flag.nbytes} bytes")
    inner = scope.open_loop(name, None)
    condition = decode(message.condition_thunk_sequence.thunks, inner)
    body = decode(message.body_thunk_sequence.thunks, inner)
    trips = find_trip_counts(name, scope.computations)
    certain = trips.least if trips.least * count_nodes(body) <= TURN_NODES else 0
    iterations = [rename_steps(body, str(index)) for index in range(certain)]
    ahead = _join(_simplify(name, iterations, inner))
    if trips.most == certain:
        return ahead
    setter = set_flag(f"{name}@condition", flag)
    if trips.most == certain + 1:
        loop = ConditionalStep(name, Construct.IF, (tuple(body),), setter)
    else:
        bodies = ((*body, *rename_steps(condition, "again"), setter),)
        loop = ConditionalStep(name, Construct.WHILE, bodies, setter, turn=Turn(1))
    return [*ahead, *condition, loop]


def _decode_counted(
    message: Any, name: str, scope: Scope, decode: DecodeSequence
) -> list[GraphStep]:
    trip_count = message.trip_count
    if trip_count < 0:
        raise Refusal(f"loops {trip_count} times")

    # All iterations have the same instructions; what none of them moves is decoded once.
    opened = scope.open_branch(name)
    thunks, known = list(message.body_thunk_sequence.thunks), dict[int, list[GraphStep]]()

    def decode_iteration(index: int, *turn: Any) -> list[GraphStep]:
        # The first iteration comes first.
        inner = dataclasses.replace(opened, is_checked=opened.is_checked or index > 0)
        inner = inner.enter_iteration(Iteration(index, *turn))
        return rename_steps(decode(thunks, inner, known=known), str(index))

    def decode_range(first: int, end: int) -> list[list[GraphStep]]:
        return [decode_iteration(index) for index in range(first, end)]

    read = read_additions(opened.instructions, scope.computations)
    first = decode_range(0, min(trip_count, 1))
    size = sum(count_nodes(steps) - len(find_counters(steps, read)) for steps in first)
    copies = sum(_is_copy(step) for steps in first for step in steps)
    per_turn = choose_per_turn(trip_count, max(size, 1), copies)
    if per_turn == trip_count:
        return _join(_simplify(name, [*first, *decode_range(1, trip_count)], opened))
    turns, rest = divmod(trip_count, per_turn)
    counter = scope.add_temporary(COUNTER_BYTES)
    iterations = [decode_iteration(index, per_turn, counter) for index in range(per_turn)]
    gathered = gather_slices(iterations, turns, scope.add_temporary)
    body = rename_turn(_simplify(name, gathered, opened), scope.add_temporary)
    body.append(count_turn(f"{name}@turn", counter, turns))
    start = start_turns(f"{name}@start", counter)
    turn = Turn(per_turn)
    loop = ConditionalStep(name, Construct.WHILE, (tuple(body),), start, turn=turn)
    return [loop, *_join(_simplify(name, decode_range(trip_count - rest, trip_count), opened))]


def _simplify(
    name: str, iterations: Sequence[Sequence[GraphStep]], scope: Scope
) -> list[list[GraphStep]]:
    """Returns the iterations of a loop with less to do and less to wait for.

    Args:
        name: of the loop's instruction.
        iterations: the steps of each, in program order.
        scope: of its body.
    """
    read = read_additions(scope.instructions, scope.computations)
    counted = count_ahead(name, iterations, read, scope.add_temporary)
    if not scope.has_ieee_sums:
        return counted
    pieces = read_pieces(scope.instructions, scope.computations)
    return merge_siblings(counted, pieces, scope.intern_code)


def _is_copy(step: GraphStep) -> bool:
    return isinstance(step, DeviceStep) and isinstance(step.node, CopyNode)


def _join(iterations: Sequence[Sequence[GraphStep]]) -> list[GraphStep]:
    return [step for steps in iterations for step in steps]


def choose_per_turn(trip_count: int, size: int, copies: int = 0) -> int:
    """Returns how many iterations one turn of a loop has; all of them where it is unrolled.

    A number that divides the trip count is preferred: then nothing is left behind the loop.

    Args:
        trip_count: iterations of the loop.
        size: nodes of one.
        copies: how many of them are memcpys.

    Example:
        >>> choose_per_turn(100, 3), choose_per_turn(1000, 3), choose_per_turn(1009, 3)
        (100, 20, 21)
    """
    # Of copies up to one half of all nodes is not counted.
    if trip_count * max(size - copies, (size + 1) // 2) <= UNROLLED_NODES:
        return trip_count
    most = min(max(TURN_NODES // size, 1), trip_count)
    whole = (each for each in range(most, most // 2, -1) if trip_count % each == 0)
    return next(whole, most)


def decode_conditional(
    message: Any, name: str, scope: Scope, decode: DecodeSequence
) -> list[GraphStep]:
    """Returns the step of a ``ConditionalThunkProto``: none where no branch does anything.

    Args:
        message: the thunk; a condition of one byte takes the first of two branches if it is set.
        name: of its instruction.
        scope: what it refers to.
        decode: returns the steps of the sequences inside.
    """
    index = scope.find_shaped_use(message.branch_index_buffer)
    inner = scope.open_branch(name)
    branches = [tuple(decode(each.thunks, inner)) for each in message.branch_thunks]
    if index.nbytes not in (1, 4) or (index.nbytes == 1 and len(branches) != 2) or not branches:
        raise Refusal(f"chooses among {len(branches)} branches by {index.nbytes} bytes")
    if not any(branches):
        return []
    bodies = branches if index.nbytes == 4 or branches[1] else branches[:1]
    if len(bodies) > 1 and not scope.has_choices:
        return _decode_one_by_one(name, index, branches, scope)
    label = f"{name}@condition"
    if index.nbytes == 4:
        setter = set_index(label, index, len(branches))
        return [ConditionalStep(name, Construct.SWITCH, tuple(bodies), setter)]
    return [ConditionalStep(name, Construct.IF, tuple(bodies), set_flag(label, index))]


def _decode_one_by_one(
    name: str, index: BufferUse, branches: Sequence[tuple[GraphStep, ...]], scope: Scope
) -> list[GraphStep]:
    """Returns an IF node for each branch: older drivers have no node that chooses."""
    # A branch may write where the index is.
    kept = scope.add_temporary(index.nbytes)
    keep = DeviceStep(CopyNode(f"{name}@index", index, kept), (index,), (kept,))
    chosen: list[GraphStep] = [
        ConditionalStep(
            f"{name}@{place}",
            Construct.IF,
            (branch,),
            set_branch(f"{name}@condition.{place}", kept, place, len(branches)),
        )
        for place, branch in enumerate(branches)
        if branch
    ]
    return [keep, *chosen]


def count_nodes(steps: Sequence[GraphStep]) -> int:
    """Returns how many nodes steps become, those inside of branches and loops included."""
    inner = sum(1 for _ in list_device_steps(steps))
    return inner + sum(isinstance(step, ConditionalStep) for step in steps)


def rename_steps(steps: Sequence[GraphStep], label: str) -> list[GraphStep]:
    """Returns the steps under names of their own: two of one name are parts of one instruction."""
    return [_rename_step(step, label) for step in steps]


def _rename_step(step: GraphStep, label: str) -> GraphStep:
    if isinstance(step, DeviceStep):
        return step.rename(f"{step.name}@{label}")
    return dataclasses.replace(step, name=f"{step.name}@{label}")
