"""What tests of `tg.random` share: exact draws, and what eager runs would draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import tracegraph as tg

X = np.zeros(8, np.float32)


def sample(key: Any, shape: tuple[int, ...] = (8,)) -> Any:
    """Returns small integers as floats: sums and products of them are exact, however fused."""
    return jax.random.randint(key, shape, 0, 99).astype(np.float32)


def draw(gen: tg.random.Generator) -> Any:
    """Draws from a generator."""
    return sample(gen.next_key())


def list_eager(
    seed: int, count: int, function: Callable[[tg.random.Generator], Any] = draw
) -> list[Any]:
    """Returns what so many eager draws give after a seed."""
    gen = tg.random.Generator(seed)
    return [np.asarray(function(gen)) for _ in range(count)]


def assert_same(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Compares arrays bit for bit."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)


def read_words(error: BaseException) -> list[str]:
    """Returns the first words of the lines of an error after its first line."""
    return [line.strip().split(":")[0] for line in str(error).splitlines()[1:]]
