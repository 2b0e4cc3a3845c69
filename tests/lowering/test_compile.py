"""Compile: declared order, in-place results of donated inputs, and the steps of a program."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

from tests.fakes.compilers import NotedPhases, make_compiler
from tracegraph.lowering.compile import compile_request, declared_edges, place_donated_results
from tracegraph.lowering.device_program import Copy, ExecutableCall
from tracegraph.lowering.lower import lower_request
from tracegraph.lowering.planning.step_order import reduce_edges
from tracegraph.lowering.request import (
    BufferSpec,
    CaptureRequest,
    InputSpec,
    OutputSpec,
    Place,
    Region,
    Role,
)
from tracegraph.runtime.errors import CaptureError

jax.config.update("jax_platforms", "cpu")


def spec(name: str) -> BufferSpec:
    return BufferSpec(name, (4,), np.dtype(np.float32))


def region(name: str, reads: str, writes: str, place: Place | None = None) -> Region:
    """Returns a region whose every result is the sum of what it reads, plus its position."""
    outputs = writes.split()

    def function(*arrays: Any) -> tuple[Any, ...]:
        total = sum(arrays, jnp.zeros(4, jnp.float32))
        return tuple(total + index for index in range(len(outputs)))

    return Region(
        name,
        function,
        tuple(map(spec, reads.split())),
        tuple(map(spec, outputs)),
        place if place is not None else Place(),
    )


def request(*regions: Region, donated: str = "s", outputs: Any = (("n", "s"),)) -> CaptureRequest:
    roles = [("x", Role.COPIED), *((name, Role.DONATED) for name in donated.split())]
    return CaptureRequest(
        "f",
        regions,
        tuple(InputSpec(spec(name), role) for name, role in roles),
        tuple(OutputSpec(spec(name), alias) for name, alias in outputs),
    )


def compile_it(wanted: CaptureRequest) -> Any:
    program, _ = compile_request(wanted, make_compiler())
    return program


EAGER = Place(is_captured=False)


@pytest.mark.parametrize(
    ("places", "edges"),
    [
        ([Place(), Place(), Place()], ((0, 1), (1, 2))),
        ([Place(0), Place(1), Place(2)], ()),
        ([Place(0), Place(1), Place(0)], ((0, 2),)),
        ([Place(0), Place(1, ("r0",)), Place(0, ("r1",))], ((0, 1), (0, 2), (1, 2))),
        ([Place(0), Place(1), Place(2, ("r0", "r1"))], ((0, 2), (1, 2))),
        # A wait for one's own stream says nothing new.
        ([Place(0), Place(0, ("r0",))], ((0, 1),)),
    ],
)
def test_declared_edges(places: list[Place], edges: Any):
    regions = [region(f"r{index}", "x", f"y{index}", place) for index, place in enumerate(places)]
    assert declared_edges(regions) == edges


def place_results(*regions: Region, **options: Any) -> tuple[dict[str, str], list[tuple[str, str]]]:
    renamed, copies = place_donated_results(request(*regions, **options))
    return (
        {name: target.name for name, target in renamed.items()},
        [(source.name, target.name) for source, target in copies],
    )


IN_PLACE, AT_THE_END = ({"n": "s"}, []), ({}, [("n", "s")])


@pytest.mark.parametrize(
    ("regions", "placed"),
    [
        ([region("a", "x s", "n")], IN_PLACE),
        ([region("a", "x s", "t"), region("b", "t", "n")], IN_PLACE),
        # The old value is read after the new one is written.
        ([region("a", "x s", "n"), region("b", "s", "t")], AT_THE_END),
        # It is read on another stream, which may be later or not.
        ([region("a", "s", "t", Place(1)), region("b", "x", "n")], AT_THE_END),
        ([region("a", "s", "t", Place(1)), region("b", "x", "n", Place(0, ("a",)))], IN_PLACE),
        # An eager region may raise; then the state must be as it was.
        ([region("a", "x s", "n"), region("e", "x", "t", EAGER)], AT_THE_END),
        ([region("e", "x", "t", EAGER), region("a", "t s", "n")], IN_PLACE),
        ([region("e", "x s", "n", EAGER)], IN_PLACE),
    ],
)
def test_a_result_is_written_in_place_only_when_the_old_value_is_dead(regions: Any, placed: Any):
    assert place_results(*regions) == placed


def test_two_inputs_may_be_updated_by_one_region():
    placed = place_results(
        region("a", "s r", "n m"), donated="s r", outputs=(("n", "s"), ("m", "r"))
    )
    assert placed == ({"n": "s", "m": "r"}, [])


def test_an_input_that_comes_back_as_it_is_moves_nothing():
    assert place_results(region("a", "x s", "t"), outputs=(("s", "s"),)) == ({}, [])


def test_program_names_steps_buffers_and_outputs():
    phases = NotedPhases()
    wanted = request(
        region("a", "x s", "t", Place(7)),
        region("b", "t", "n y", Place(0, ("a",))),
        outputs=(("n", "s"), ("y", None)),
    )
    program, compiled = compile_request(wanted, make_compiler(phases=phases))
    assert [(each.name, each.inputs, each.outputs) for each in compiled] == [
        ("a", ("x", "s"), ("t",)),
        ("b", ("t",), ("n", "y")),
    ]
    assert phases == [
        ("compile", "a of 2"),
        ("lower", "a of 2"),
        ("compile", "b of 2"),
        ("lower", "b of 2"),
    ]
    assert [buffer.name for buffer in program.buffers] == ["x", "s", "t", "y"]
    first, second = program.steps
    assert isinstance(first, ExecutableCall)
    assert [use.buffer for use in first.reads] == ["x", "s"]
    assert (first.stream, first.is_captured, first.reads[0].nbytes) == (7, True, 16)
    assert [use.buffer for use in second.writes] == ["s", "y"]
    assert program.edges == ((0, 1),)
    assert [(output.buffer.name, output.alias) for output in program.outputs] == [
        ("s", "s"),
        ("y", None),
    ]


def test_a_copy_at_the_end_comes_after_all_calls():
    program = compile_it(request(region("a", "x s", "n"), region("b", "s", "t", Place(3))))
    copy = program.steps[-1]
    assert isinstance(copy, Copy)
    assert (copy.name, copy.source.buffer, copy.target.buffer) == ("update_s", "n", "s")
    assert reduce_edges(3, program.edges) == ((0, 2), (1, 2))


def test_a_captured_region_is_compiled_and_an_eager_one_is_not():
    traced: list[bool] = []

    def look(x: Any) -> tuple[Any, ...]:
        traced.append(isinstance(x, Tracer))
        return (x + 1,)

    regions = [region("e", "x", "t", EAGER), region("a", "x", "n")]
    program = compile_it(request(*[dataclasses.replace(r, function=look) for r in regions]))
    assert traced == [True]
    for step in program.steps:
        np.testing.assert_array_equal(step.executable(jnp.ones(4)), np.full(4, 2, np.float32))
    assert traced == [True, False]


def test_one_result_comes_bare_and_several_as_a_tuple():
    program = compile_it(request(region("a", "x", "t"), region("b", "x s", "n m")))
    first, second = (step.executable for step in program.steps)
    np.testing.assert_array_equal(first(jnp.ones(4)), np.ones(4, np.float32))
    n, m = second(jnp.ones(4), jnp.ones(4))
    np.testing.assert_array_equal([n, m], [np.full(4, 2), np.full(4, 3)])


def test_unused_parameters_are_kept():
    unused = Region("a", lambda x, s: (x,), (spec("x"), spec("s")), (spec("n"),))
    program = compile_it(request(unused))
    values = {"x": jnp.ones(4), "s": jnp.zeros(4)}
    step = program.steps[0]
    result = step.executable(*[values[use.buffer] for use in step.reads])
    np.testing.assert_array_equal(result, np.ones(4, np.float32))


def test_an_error_while_compiling_passes_as_it_is():
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("in the region")

    broken = Region("a", fail, (spec("x"),), (spec("n"),))
    with pytest.raises(ZeroDivisionError, match="in the region"):
        compile_it(request(broken))


def test_a_missing_wait_is_found_before_memory_is_planned():
    wanted = request(region("a", "x", "t"), region("b", "t s", "n", Place(1)))
    with pytest.raises(CaptureError, match="`b` on stream 1 reads `t` without waiting for `a`"):
        lower_request(wanted, make_compiler())
