"""What a program of the corpus is: a function, its state and what a call gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

WHOLE = ("whole",)
PARTIAL = ("partial",)
BOTH = ("whole", "partial")


@dataclasses.dataclass(frozen=True)
class Setup:
    """A function and how it is called.

    Attributes:
        function: ``(state, *batch)`` to ``(state, results)``, or without a state ``(*batch)`` to
            results.
        make_batch: gives the arguments of one call.
        state: before the first call, donated at each; None for none.
        options: of `tg.capture` and of the reference, besides donation.
        reference: what the captured function must equal, called as `jax.jit` is.
        adapt: makes what is called of the captured function; such a state is not donated.
    """

    function: Callable[..., Any]
    make_batch: Callable[[np.random.Generator], tuple[Any, ...]]
    state: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reference: Callable[..., Any] = jax.jit
    adapt: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        name: unique in its file.
        make: makes its function and its state.
        modes: of `tg.capture` that it is captured in.
    """

    name: str
    make: Callable[[], Setup]
    modes: tuple[str, ...]


def program(*modes: str) -> Callable[[Callable[[], Setup]], Program]:
    """Makes a program of a function that returns its setup; ``whole`` is the default mode."""

    def decorate(make: Callable[[], Setup]) -> Program:
        return Program(make.__name__, make, modes or WHOLE)

    return decorate


def normal(*shape: int) -> Any:
    """Returns small numbers for a program's parameters, the same in every process."""
    seed = sum(size * 31**index for index, size in enumerate(shape))
    return (0.3 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def fill(shapes: Any) -> Any:
    """Returns a tree of small positive numbers with the shapes of another, without compiling."""
    rng = np.random.default_rng(0)

    def make(leaf: Any) -> Any:
        if not np.issubdtype(leaf.dtype, np.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        return rng.uniform(0.05, 0.5, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(make, shapes)


def draw(rng: np.random.Generator, *shape: int) -> Any:
    """Returns random numbers for one argument of one call."""
    return rng.standard_normal(shape).astype(np.float32)


def draw_key(rng: np.random.Generator, impl: str = "rbg") -> jax.Array:
    """Returns a new random key for one call; XLA compiles those of threefry for long."""
    return jax.random.key(int(rng.integers(1 << 30)), impl=impl)
