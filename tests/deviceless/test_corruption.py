"""Faults planted into what XLA really wrote: each ends in an UnsupportedError that names it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.deviceless import pipeline
from tests.deviceless.programs import PROGRAMS
from tracegraph.lowering.xla.container import read_executable
from tracegraph.lowering.xla.decode import decode_executable, read_program
from tracegraph.lowering.xla.program import XlaProgram
from tracegraph.lowering.xla.schema import COMPUTATION, load_schema
from tracegraph.runtime.errors import UnsupportedError

FLIPS = 300
CUTS = 60


@functools.cache
def compile_program(name: str, device: Any) -> bytes:
    program = next(p for p in PROGRAMS if p.name == name)
    return pipeline.compile_whole(program, device)


@functools.cache
def compile_for_host() -> bytes:
    compiled = jax.jit(lambda x: x * 2).lower(jnp.ones(5)).compile()
    executable: Any = compiled.runtime_executable()
    return executable.serialize()


def test_intact_program_is_read(h200: Any) -> None:
    assert read_program(compile_program("scatter_add", h200), name="f").steps


@pytest.mark.parametrize("name", ["scatter_add", "literals"])
def test_every_flipped_byte_is_refused_or_harmless(name: str, h200: Any) -> None:
    intact = compile_program(name, h200)
    rng = random.Random(0)
    refusals: list[UnsupportedError] = []
    for _ in range(FLIPS):
        corrupt = bytearray(intact)
        corrupt[rng.randrange(len(corrupt))] ^= rng.randrange(1, 256)
        try:
            assert isinstance(read_program(bytes(corrupt), name="f"), XlaProgram)
        except UnsupportedError as error:
            refusals.append(error)
    assert len(refusals) > FLIPS // 20
    assert all(len(str(error).splitlines()) >= 4 for error in refusals)


def test_every_cut_is_refused(h200: Any) -> None:
    intact = compile_program("scatter_add", h200)
    rng = random.Random(0)
    for end in sorted(rng.sample(range(len(intact)), CUTS)):
        with pytest.raises(UnsupportedError):
            read_program(intact[:end], name="f")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda intact, _: b"",
        lambda intact, _: bytes(len(intact)),
        lambda intact, _: intact[::-1],
        lambda intact, other: intact[: len(intact) // 2] + other[len(intact) // 2 :],
        lambda intact, _: compile_for_host(),
    ],
    ids=["empty", "zeros", "reversed", "halves", "host"],
)
def test_other_bytes_are_refused(spoil: Callable[..., bytes], h200: Any) -> None:
    intact, other = compile_program("scatter_add", h200), compile_program("literals", h200)
    with pytest.raises(UnsupportedError):
        read_program(spoil(intact, other), name="f")


def _kernels(executable: Any) -> list[Any]:
    return [t.custom_kernel_thunk for t in executable.thunks if t.HasField("custom_kernel_thunk")]


def _reach_beyond(executable: Any) -> None:
    _kernels(executable)[0].args[0].slice.size += 1 << 30


def _name_no_allocation(executable: Any) -> None:
    _kernels(executable)[0].args[0].slice.buffer_allocation_index = 99


def _start_below_zero(executable: Any) -> None:
    _kernels(executable)[0].args[0].slice.offset = -4


def _drop_written_flag(executable: Any) -> None:
    del _kernels(executable)[0].written[-1]


def _write_a_parameter(executable: Any) -> None:
    kernel = _kernels(executable)[0]
    kernel.written[:] = [True] * len(kernel.written)


def _use_other_memory(executable: Any) -> None:
    executable.buffer_allocations.values[0].color = 5


def _launch_no_thread(executable: Any) -> None:
    _kernels(executable)[0].custom_kernel.thread_dims.coordinates.x = 0


def _lose_the_code(executable: Any) -> None:
    _kernels(executable)[0].custom_kernel.kernel_spec.ClearField("cubin")


def _lose_the_results(executable: Any) -> None:
    del executable.output_info_map[:]


def _loop(executable: Any) -> None:
    executable.thunks[-1].while_thunk.trip_count = -1


def _do_nothing_known(executable: Any) -> None:
    executable.thunks[-1].ClearField("custom_kernel_thunk")


def _copy_too_much(executable: Any) -> None:
    next(
        t.device_to_device_copy_thunk.copy_thunk
        for t in executable.thunks
        if t.HasField("device_to_device_copy_thunk")
    ).mem_size += 4096


@pytest.mark.parametrize(
    "plant",
    [
        _reach_beyond,
        _name_no_allocation,
        _start_below_zero,
        _drop_written_flag,
        _write_a_parameter,
        _use_other_memory,
        _launch_no_thread,
        _lose_the_code,
        _lose_the_results,
        _loop,
        _do_nothing_known,
        _copy_too_much,
    ],
)
def test_planted_contradiction_is_refused(plant: Callable[[Any], None], h200: Any) -> None:
    executable = read_executable(compile_program("scatter_add", h200), load_schema())
    assert decode_executable(executable, name="f").steps
    plant(executable)
    with pytest.raises(UnsupportedError) as caught:
        decode_executable(executable, name="f")
    assert "`f`" in str(caught.value)
    assert caught.value.anchor == "unsupported"


def test_constant_without_its_bytes_is_refused(h200: Any) -> None:
    executable: Any = read_executable(compile_program("literals", h200), load_schema())
    computations = executable.hlo_module_with_config.hlo_module.computations
    kind = load_schema().message_class(COMPUTATION)
    for place, encoded in enumerate(computations):
        computation: Any = kind.FromString(encoded)
        for instruction in computation.instructions:
            instruction.ClearField("literal")
        computations[place] = computation.SerializeToString()
    with pytest.raises(UnsupportedError, match="constant"):
        decode_executable(executable, name="f")
