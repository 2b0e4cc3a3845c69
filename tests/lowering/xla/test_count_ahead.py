"""Counters of loops: one kernel counts ahead, every iteration reads what it would have read."""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
from google.protobuf import text_format

from tests.fakes.gpu_programs import kernel
from tests.fakes.xla_programs import ADDITION, message_class, read_computation
from tracegraph.lowering.device_program import ConditionalStep, GraphStep
from tracegraph.lowering.kernels.loops.conditions import set_flag
from tracegraph.lowering.planning.memory_plan import ALIGNMENT
from tracegraph.lowering.xla import count_ahead as module
from tracegraph.lowering.xla.count_ahead import (
    ReadAddition,
    count_ahead,
    find_counters,
    read_additions,
)
from tracegraph.lowering.xla.scope import Scope
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.nodes import BufferUse, KernelNode

COUNTER, STEP, TURNS, COUNT = BufferUse("state", 68, 4), 3, 2, 5
PLACE = "state[68:72]"
ADD = ADDITION.replace("s32s: 1", f"s32s: {STEP}")


def make_scope(text: str = ADD, opcode: str = "fusion") -> Scope:
    """Returns the scope of a loop's body whose ``add`` computes a text."""
    head = f'name: "add" opcode: "{opcode}" called_computation_ids: 7'
    fusion = text_format.Parse(head, message_class("xla.HloInstructionProto")())
    return Scope((), instructions={"add": fusion}, computations={7: read_computation(text)})


def make_body(index: int) -> list[GraphStep]:
    return [
        kernel("early", f"x {PLACE}", "x"),
        kernel(f"add@{index}", PLACE, PLACE),
        kernel("late", f"y {PLACE} x", "y"),
    ]


def read(scope: Scope) -> ReadAddition:
    return read_additions(scope.instructions, scope.computations)


def count(
    iterations: Sequence[Sequence[GraphStep]], scope: Scope, *fixed: BufferUse
) -> list[list[GraphStep]]:
    return count_ahead("loop", iterations, read(scope), scope.add_temporary, fixed)


def find_sizes(scope: Scope) -> list[int]:
    return [each.nbytes for each in scope.added]


def run(iterations: Sequence[Sequence[GraphStep]]) -> list[dict[str, bytes]]:
    """Returns all memory after each turn; a kernel writes what its name and its inputs tell."""
    memory: dict[str, bytearray] = defaultdict(lambda: bytearray(4096 + 70_000))
    memory["state"][:] = random.Random(0).randbytes(len(memory["state"]))
    after = []
    for _ in range(TURNS):
        for step in (step for steps in iterations for step in steps):
            run_step(step, memory)
        after.append({k: bytes(v) for k, v in memory.items() if not k.startswith("#added")})
    return after


def run_step(step: GraphStep, memory: dict[str, bytearray]) -> None:
    if isinstance(step, ConditionalStep):
        for each in step.bodies[0]:
            run_step(each, memory)
        return
    assert isinstance(step.node, KernelNode)

    def read(use: BufferUse) -> bytes:
        return bytes(memory[use.buffer][use.offset : use.offset + use.nbytes])

    def write(use: BufferUse, value: bytes) -> None:
        memory[use.buffer][use.offset : use.offset + use.nbytes] = value

    def add(number: int) -> bytes:
        value = int.from_bytes(read(step.reads[0]), "little") + number
        return (value % (1 << 32)).to_bytes(4, "little")

    if step.node.code.symbol == "count_ahead_4":
        source, values, *numbers = step.node.parameters
        assert isinstance(source, BufferUse)
        assert isinstance(values, BufferUse)
        first, number, count = (int.from_bytes(each, "little") for each in numbers)  # type: ignore[arg-type]
        for index, value in enumerate([add(first + number * i) for i in range(count)]):
            offset = values.offset + index * ALIGNMENT
            assert offset + 4 <= values.offset + values.nbytes
            write(BufferUse(values.buffer, offset, 4), value)
    elif step.name.startswith("add@"):
        write(step.writes[0], add(STEP))
    else:
        digest = zlib.crc32(step.name.encode() + b"".join(map(read, step.reads)))
        for use in step.writes:
            write(use, random.Random(digest).randbytes(use.nbytes))


def list_names(iterations: Sequence[Sequence[GraphStep]]) -> list[list[str]]:
    return [[step.name for step in steps] for steps in iterations]


def test_one_kernel_counts_all_iterations() -> None:
    scope = make_scope()
    before = [make_body(index) for index in range(COUNT)]
    after = count(before, scope)
    work = ["early", "late"]
    assert list_names(after) == [["loop@count", *work, "loop@counted"], *[work] * (COUNT - 1)]
    assert run(after) == run(before)
    # The remainder of the address is the counter's own.
    assert {each.reads[1].offset % ALIGNMENT for steps in after[1:] for each in steps} == {68}
    assert find_sizes(scope) == [68 + (COUNT - 2) * ALIGNMENT + 4]


def test_no_step_waits_for_a_count() -> None:
    scope = make_scope()
    first, *others = count([make_body(i) for i in range(COUNT)], scope)
    written = [use for steps in others for step in steps for use in step.writes]
    assert {use.buffer for use in written} == {"x", "y"}
    # Only what the first iteration reads is written after it.
    assert COUNTER in first[-1].writes
    assert all(COUNTER not in steps[0].reads for steps in others)


def test_many_iterations_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_VALUES", 2)
    scope = make_scope()
    before = [make_body(index) for index in range(COUNT)]
    after = count(before, scope)
    assert ["loop@count" in names for names in list_names(after)] == [True, False] * 2 + [False]
    assert run(after) == run(before)


def test_what_is_inside_of_a_branch_reads_its_count_too() -> None:
    def make(index: int) -> list[GraphStep]:
        flag = set_flag("flag", BufferUse("flag", 0, 1))
        branch = ConditionalStep("if", Construct.IF, ((make_body(index)[0],),), flag)
        return [branch, *make_body(index)]

    scope = make_scope()
    before = [make(index) for index in range(COUNT)]
    after = count(before, scope)
    assert len(after[1]) == 3
    assert run(after) == run(before)


STAYS: dict[str, Callable[[int], list[GraphStep]]] = {
    "another step writes it": lambda i: [*make_body(i), kernel("w", "x", PLACE)],
    "another step writes a part": lambda i: [*make_body(i), kernel("w", "x", "state[70:71]")],
    "more than it is read": lambda i: [*make_body(i), kernel("r", "state[64:72]", "x")],
    "a part is read": lambda i: [*make_body(i), kernel("r", "state[68:70]", "x")],
    "it moves": lambda i: [kernel(f"add@{i}", PLACE, "state[72:76]")],
    "it is counted twice": lambda i: [*make_body(i), *make_body(i)],
    "it is counted once only": lambda i: make_body(i) if not i else make_body(i)[::2],
    "the step does more": lambda i: [kernel(f"add@{i}", f"{PLACE} x", f"{PLACE} x")],
    "the step is another": lambda i: [kernel(f"other@{i}", PLACE, PLACE)],
}


@pytest.mark.parametrize("make", STAYS.values(), ids=STAYS)
def test_what_stays(make: Callable[[int], list[GraphStep]]) -> None:
    scope = make_scope()
    before = [make(index) for index in range(COUNT)]
    assert count(before, scope) == before
    assert find_sizes(scope) == []


OTHERS = {
    "no addition": (ADD.replace('"add"', '"multiply"'), "fusion"),
    "floats": (ADD.replace("S32", "F32").replace("s32s", "f32s"), "fusion"),
    "an array": (ADD.replace("element_type: S32", "element_type: S32 dimensions: 1"), "fusion"),
    "two kinds": (ADD.replace("S32", "U32", 1), "fusion"),
    "twice the counter": (ADD.replace("operand_ids: 2", "operand_ids: 1"), "fusion"),
    "more of it": (ADD + 'instructions { name: "m" opcode: "negate" id: 4 }', "fusion"),
    "another order": (ADD.replace('"constant" id: 2', '"add" id: 2', 1), "fusion"),
    "no fusion": (ADD, "custom-call"),
}


@pytest.mark.parametrize(("text", "opcode"), OTHERS.values(), ids=OTHERS)
def test_what_is_no_counter(text: str, opcode: str) -> None:
    scope = make_scope(text, opcode)
    assert find_counters(make_body(0), read(scope)) == {}
    assert find_counters(make_body(0), read(make_scope())) == {COUNTER: STEP}


def test_what_is_kept_is_not_counted_ahead() -> None:
    before = [make_body(index) for index in range(COUNT)]
    assert count(before, make_scope(), BufferUse("state", 70, 100)) == before
    assert count(before, make_scope(), BufferUse("state", 72, 100)) != before


def test_one_iteration_stays() -> None:
    scope = make_scope()
    assert count([make_body(0)], scope) == [make_body(0)]


def test_a_fault_in_the_places_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    move = module._move

    def shift(step: GraphStep, counter: BufferUse, place: BufferUse) -> GraphStep:
        return move(step, counter, place._replace(offset=max(place.offset - ALIGNMENT, 68)))

    monkeypatch.setattr(module, "_move", shift)
    scope = make_scope()
    before = [make_body(index) for index in range(COUNT)]
    assert run(count(before, scope)) != run(before)
