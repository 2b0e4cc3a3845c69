"""SavedExecutable: what XLA compiled for the CPU, as plain values that a file can hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class ArrayAval:
    """The type of one parameter or result.

    Attributes:
        shape: static shape.
        dtype: NumPy dtype.
        weak_type: JAX's weak type.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak_type: bool = False


@dataclasses.dataclass(frozen=True)
class SavedExecutable:
    """A compiled function of arrays.

    More than six fields because it is all that a `jax.stages.Compiled` is made of again.

    Attributes:
        name: of the function, for profilers and errors.
        code: what XLA serialised: machine code for one kind of CPU, and its schedule.
        inputs: one per parameter that the code has.
        outputs: one per result.
        kept: which of the arguments are parameters; XLA dropped the others.
        arguments: how many a call takes.
        is_bare: True when the one result is returned as it is, not in a tuple.
        is_committed: True when results stay on their device.
    """

    name: str
    code: bytes = dataclasses.field(repr=False)
    inputs: tuple[ArrayAval, ...]
    outputs: tuple[ArrayAval, ...]
    kept: tuple[int, ...]
    arguments: int
    is_bare: bool = False
    is_committed: bool = False
