"""Alternating iterations: what a second set of temporaries holds, and loops that do the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.fakes.gpu_programs import allocation, kernel, run_steps, use
from tracegraph.lowering.device_program import ConditionalStep, GraphStep, list_uses
from tracegraph.lowering.planning import alternate_iterations as module
from tracegraph.lowering.planning.alternate_iterations import alternate_iterations, join_ranges
from tracegraph.lowering.planning.byte_edges import find_edges
from tracegraph.lowering.xla.program import Allocation, AllocationKind
from tracegraph.runtime.graph_nodes import Construct
from tracegraph.runtime.nodes import BufferUse

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


def alternate(*iterations: Any) -> tuple[list[GraphStep], list[Allocation]]:
    temporaries = Temporaries()
    return alternate_iterations(iterations, temporaries.add), temporaries.added


def list_buffers(steps: Any) -> list[set[str]]:
    return [{use.buffer for use in list_uses(step)} for step in steps]


def test_every_second_iteration_has_its_own_temporaries() -> None:
    steps, (added,) = alternate(BODY, BODY, BODY)
    own, second = list_buffers(BODY), [{"state", "added0"}] * 2 + [{"saved", "added0"}]
    # The last iteration computes in the places of XLA.
    assert list_buffers(steps) == [*own, *second, *own]
    assert added.nbytes == 512


def test_the_readers_of_one_iteration_do_not_hold_up_the_next() -> None:
    def find(steps: Any) -> set[tuple[int, int]]:
        names = sorted({use.buffer for step in steps for use in list_uses(step)})
        return set(find_edges(steps, {name: 1024 * place for place, name in enumerate(names)}))

    save, first = 2, 3
    assert (save, first) in find((*BODY, *BODY))
    assert (save, first) not in find(alternate(BODY, BODY)[0])


@pytest.mark.parametrize(
    "body",
    [
        (kernel("k", "t", "t"),),
        (kernel("k", "t[0:8]", "u"), kernel("l", "u", "t")),
        # A branch may write nothing, so that the value of an earlier iteration stays.
        (ConditionalStep("if", Construct.IF, ((kernel("k", "x", "t"),),), kernel("s", "x", "")),),
    ],
    ids=["updated", "passed on", "written by a branch"],
)
def test_what_passes_from_one_iteration_to_the_next_keeps_its_place(body: Any) -> None:
    steps, _ = alternate(body, body)
    assert all("t" in buffers for buffers in list_buffers(steps))


def test_what_only_some_iterations_write_keeps_its_place() -> None:
    one, other = (kernel("k", "x", "t[0:8]"),), (kernel("k", "x", "t[32:40]"),)
    assert alternate(one, other) == ([*one, *other], [])


def test_an_address_keeps_its_remainder() -> None:
    body = (kernel("k", "x", "t[300:308]"), kernel("l", "t[300:308]", "y"))
    steps, _ = alternate(body, body)
    (written,) = steps[0].writes
    assert (written.buffer, written.offset % 256) == ("added0", 300 % 256)


def test_large_temporaries_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    body = (kernel("k", "x", "t[0:8] u[0:2000]"), kernel("l", "t[0:8] u[0:2000]", "y"))
    monkeypatch.setattr(module, "SECOND_SET_BYTES", 1024)
    steps, _ = alternate(body, body)
    assert list_buffers(steps)[0] == {"x", "added0", "u"}


def test_one_iteration_is_left_as_it_is() -> None:
    assert alternate(BODY) == (list(BODY), [])


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
        steps, added = alternate(*[body] * count)
        moved += bool(added)
        wanted, got = ({(n, i): f"{n}{i}" for n in "xtuv" for i in range(7)} for _ in range(2))
        got |= {(each.name, i): "?" for each in added for i in range(each.nbytes)}
        run_steps([step for _ in range(count) for step in body], wanted, None)
        run_steps(steps, got, None)
        assert {key: got[key] for key in wanted} == wanted, seed
    assert moved > 50
