"""Our reader of XLA's compiled programs against JAX's own (JAX 0.12 and later)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import pytest

from tests.deviceless import pipeline, thunky_reader
from tests.deviceless.corpus import find_program, serialize
from tests.deviceless.programs import PROGRAMS, Program
from tracegraph.lowering.device_program import list_device_steps
from tracegraph.lowering.xla.decode import read_program
from tracegraph.lowering.xla.program import XlaProgram
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, KernelNode

COMPARED = [p for p in PROGRAMS if p.name not in ("gpt_12x128", "all_passed_through")]
# Before lowering takes constants and copied arguments out of the region.
KEPT_WHOLE = ("chain_of_powers", "closed_over", "literals", "passthrough")
FIRST_JAX = (0, 12)
pytestmark = pytest.mark.skipif(
    tuple(int(part) for part in jax.__version__.split(".")[:2]) < FIRST_JAX,
    reason=f"jax {jax.__version__} has no reader of its own; the one to compare with is in 0.12",
)


@functools.cache
def compile_program(name: str, h200: Any) -> bytes:
    program = find_program(name)
    with pipeline.setting_for(program):
        return pipeline.compile_whole(program, h200)


@pytest.mark.parametrize("program", COMPARED, ids=lambda program: program.name)
def test_both_readers_agree(program: Program, h200: Any) -> None:
    serialized = serialize(program, h200)
    theirs = thunky_reader.read_operations(serialized)
    ours = read_program(serialized, name=program.name)
    assert theirs or program.name == "empty_arrays"
    assert thunky_reader.find_differences(ours, theirs) == []


@pytest.mark.parametrize("name", KEPT_WHOLE)
def test_both_readers_agree_on_constants_and_copies(name: str, h200: Any) -> None:
    serialized = compile_program(name, h200)
    ours, theirs = read_program(serialized, name=name), thunky_reader.read_operations(serialized)
    has_constants = any(each.content is not None for each in ours.allocations)
    assert has_constants or any(isinstance(s.node, CopyNode) for s in list_device_steps(ours.steps))
    assert thunky_reader.find_differences(ours, theirs) == []


def _exchange_results(program: XlaProgram) -> XlaProgram:
    return dataclasses.replace(program, outputs=program.outputs[::-1])


def _exchange_parameters(program: XlaProgram) -> XlaProgram:
    count = sum(a.parameter is not None for a in program.allocations)
    turned = tuple(
        a if a.parameter is None else dataclasses.replace(a, parameter=count - 1 - a.parameter)
        for a in program.allocations
    )
    return dataclasses.replace(program, allocations=turned)


def _exchange_steps(program: XlaProgram) -> XlaProgram:
    return dataclasses.replace(program, steps=program.steps[::-1])


def _drop_last_step(program: XlaProgram) -> XlaProgram:
    return dataclasses.replace(program, steps=program.steps[:-1])


def _shift_ranges(program: XlaProgram) -> XlaProgram:
    def shift(use: BufferUse) -> BufferUse:
        return use._replace(offset=use.offset + 4)

    return dataclasses.replace(program, steps=tuple(s.move(shift) for s in program.steps))


def _change_constants(program: XlaProgram) -> XlaProgram:
    changed = tuple(
        a if a.content is None else dataclasses.replace(a, content=bytes(a.nbytes))
        for a in program.allocations
    )
    return dataclasses.replace(program, allocations=changed)


def _change_code(program: XlaProgram) -> XlaProgram:
    steps = []
    for step in list_device_steps(program.steps):
        node = step.node
        if isinstance(node, KernelNode):
            code = dataclasses.replace(node.code, cubin=node.code.cubin[:-1])
            step = dataclasses.replace(step, node=dataclasses.replace(node, code=code))
        steps.append(step)
    return dataclasses.replace(program, steps=tuple(steps))


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("reductions", _exchange_results),
        ("scatter_add", _exchange_parameters),
        ("scatter_add", _exchange_steps),
        ("mlp", _drop_last_step),
        ("mlp", _shift_ranges),
        ("literals", _change_constants),
        ("double", _change_code),
    ],
)
def test_planted_difference_is_found(name: str, plant: Any, h200: Any) -> None:
    is_whole = name in KEPT_WHOLE
    serialized = compile_program(name, h200) if is_whole else serialize(find_program(name), h200)
    theirs = thunky_reader.read_operations(serialized)
    ours = read_program(serialized, name=name)
    assert thunky_reader.find_differences(ours, theirs) == []
    assert thunky_reader.find_differences(plant(ours), theirs)
