"""Values of a turn: what gets a place of its own, what keeps it, and turns that do the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.fakes.gpu_programs import allocation, kernel, run_steps, use
from tracegraph.lowering.device_program import ConditionalStep, GraphStep, list_uses
from tracegraph.lowering.planning import rename_turn as module
from tracegraph.lowering.planning.byte_edges import find_edges
from tracegraph.lowering.planning.rename_turn import join_ranges, rename_turn
from tracegraph.lowering.xla.control_flow import rename_steps
from tracegraph.lowering.xla.program import Allocation, AllocationKind
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.nodes import BufferUse

# A step reads the state and writes a temporary; the next makes the new state of it; the last saves
# the temporary, which only the step after the loop reads.
BODY = (
    kernel("first", "state", "t"),
    kernel("second", "state t", "state"),
    kernel("save", "t saved", "saved"),
)


class Temporaries:
    """Adds temporaries and remembers them."""

    def __init__(self) -> None:
        self.added: list[Allocation] = []

    def add(self, nbytes: int) -> BufferUse:
        name = f"added{len(self.added)}"
        self.added.append(allocation(name, AllocationKind.TEMPORARY, nbytes))
        return BufferUse(name, 0, nbytes)


def repeat(*iterations: Any) -> list[list[GraphStep]]:
    """Returns iterations whose steps have names of their own, as those of a loop do."""
    return [rename_steps(steps, str(index)) for index, steps in enumerate(iterations)]


def rename(*iterations: Any) -> tuple[list[GraphStep], list[Allocation]]:
    temporaries = Temporaries()
    return rename_turn(repeat(*iterations), temporaries.add), temporaries.added


def list_buffers(steps: Any) -> list[set[str]]:
    return [{use.buffer for use in list_uses(step)} for step in steps]


def find_places(steps: Any) -> set[tuple[int, int]]:
    names = sorted({use.buffer for step in steps for use in list_uses(step)})
    return set(find_edges(steps, {name: 4096 * place for place, name in enumerate(names)}))


def test_what_the_next_turn_finds_keeps_its_place() -> None:
    steps, (added,) = rename(BODY, BODY, BODY)
    own, renamed = list_buffers(BODY), [{"state", "added0"}] * 2 + [{"saved", "added0"}]
    assert list_buffers(steps) == [*renamed, *renamed, *own]
    assert added.nbytes == 512


def test_the_readers_of_one_iteration_do_not_hold_up_the_next() -> None:
    save, first = 2, 3
    assert (save, first) in find_places((*BODY, *BODY))
    assert (save, first) not in find_places(rename(BODY, BODY)[0])


def test_values_of_one_iteration_do_not_hold_up_each_other() -> None:
    body = (
        kernel("matmul", "x", "t"),
        kernel("add", "t gradient", "gradient"),
        kernel("next", "x", "t"),
        kernel("use", "t x", "x"),
    )
    # By XLA's places, the third step waits for the second.
    assert (1, 2) in find_places((*body, *body))
    assert (1, 2) not in find_places(rename(body, body)[0])


def test_a_place_is_used_again_an_iteration_later() -> None:
    (added,) = rename(*[BODY] * 9)[1]
    assert added.nbytes == 512


@pytest.mark.parametrize(
    "body",
    [
        (kernel("k", "t", "t"),),
        (kernel("k", "t[0:8]", "u"), kernel("l", "u", "t")),
        # A branch may write nothing, so that the value of an earlier iteration stays.
        (ConditionalStep("if", Construct.IF, ((kernel("k", "x", "t"),),), kernel("s", "x", "")),),
    ],
    ids=["updated", "passed on to the first", "written by a branch"],
)
def test_what_a_turn_finds_keeps_its_place(body: Any) -> None:
    steps, _ = rename(body, body)
    assert "t" in list_buffers(steps)[0]


def test_what_a_turn_leaves_keeps_its_place() -> None:
    one, other = (kernel("k", "x", "t[0:8]"),), (kernel("k", "x", "t[32:40]"),)
    assert rename(one, other) == ([*repeat(one, other)[0], *repeat(one, other)[1]], [])


def test_an_address_keeps_its_remainder() -> None:
    body = (kernel("k", "x", "t[300:308]"), kernel("l", "t[300:308]", "y"))
    steps, _ = rename(body, body)
    (written,) = steps[0].writes
    assert (written.buffer, written.offset % 256) == ("added0", 300 % 256)


def test_large_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    body = (kernel("k", "x", "t[0:8] u[0:2000]"), kernel("l", "t[0:8] u[0:2000]", "y"))
    monkeypatch.setattr(module, "RENAMED_BYTES", 1024)
    steps, _ = rename(body, body)
    assert list_buffers(steps)[0] == {"x", "added0", "u"}


def test_one_iteration_is_left_as_it_is() -> None:
    assert rename(BODY) == (*repeat(BODY), [])


def test_ranges_are_joined_where_they_share_bytes() -> None:
    assert join_ranges(map(use, ["b[0:8]", "a[0:8]", "b[4:12]", "b[12:16]"])) == [
        use("a[0:8]"),
        use("b[0:12]"),
        use("b[12:16]"),
    ]


def draw_body(generator: random.Random) -> list[GraphStep]:
    def draw() -> str:
        start = generator.randrange(5)
        return f"{generator.choice('xtuv')}[{start}:{generator.randrange(start + 1, 7)}]"

    steps: list[GraphStep] = []
    for index in range(generator.randrange(1, 7)):
        step: GraphStep = kernel(f"k{index}", f"{draw()} {draw()}", draw())
        if generator.random() < 0.15:
            construct = generator.choice([Construct.IF, Construct.WHILE])
            setter = kernel(f"s{index}", draw(), "")
            step = ConditionalStep(f"n{index}", construct, ((step,),), setter)
        steps.append(step)
    return steps


def test_random_loops_leave_the_same_bytes() -> None:
    moved = 0
    for seed in range(400):
        body = draw_body(random.Random(seed))
        count = 2 + seed % 4
        steps, added = rename(*[body] * count)
        moved += bool(added)
        wanted, got = ({(n, i): f"{n}{i}" for n in "xtuv" for i in range(7)} for _ in range(2))
        got |= {(each.name, i): "?" for each in added for i in range(each.nbytes)}
        for _ in range(2):
            run_steps([step for steps in repeat(*[body] * count) for step in steps], wanted, None)
            run_steps(steps, got, None)
            assert {key: got[key] for key in wanted} == wanted, seed
    assert moved > 50
