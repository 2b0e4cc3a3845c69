"""Programs of the corpus, each compiled and lowered once in a process."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests.deviceless import coverage, pipeline
from tests.deviceless.coverage import Outcome
from tests.deviceless.programs import PROGRAMS, Program
from tracegraph.lowering.lower import Lowered


def find_program(name: str) -> Program:
    """Returns the program of that name."""
    return next(program for program in PROGRAMS if program.name == name)


@functools.cache
def lower(program: Program, device: Any) -> Lowered:
    """Captures a program and lowers it for a device, which may be one that is only described."""
    with pipeline.setting_for(program):
        arguments = program.make_arguments(np.random.default_rng(0))
        figures, lowered = coverage.measure(
            program.name, program.function, arguments, device, program.donate_argnums
        )
    assert figures.outcome is Outcome.BUILT, figures
    assert lowered is not None
    return lowered


def serialize(program: Program, device: Any) -> bytes:
    """Returns what XLA wrote for the one region of a program, which is lowered first."""
    (region,) = lower(program, device).regions
    executable: Any = region.executable
    return executable.runtime_executable().serialize()
