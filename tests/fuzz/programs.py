"""Random programs: a seed gives a function, its options and its arguments."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg
from tests.fuzz.steps import (
    ANYWHERE,
    DATA_DEPENDENT,
    DTYPES,
    EAGER,
    Step,
    is_float,
    is_key,
    pick,
    tame,
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A random function of a state, which is donated or not, and a nested argument.

    Calls of `run` draw from the seed anew, so that every trace does the same.

    Attributes:
        seed: that everything follows from.
        steps: what it does, in order.
        is_donated: True when the state is donated; it always comes back updated.
        side: the stream that some steps are on, or None.
        control_flow: the option of `tg.capture`.
    """

    seed: int
    steps: tuple[Step, ...]
    is_donated: bool
    side: tg.Stream | None
    control_flow: Literal["allow", "refuse"]

    @property
    def is_capturable(self) -> bool:
        """True when one graph can hold it."""
        return not any(step in self.eager for step in self.steps)

    @property
    def eager(self) -> tuple[Step, ...]:
        """The steps that only partial mode takes, outside of its graphs."""
        return EAGER if self.control_flow == "allow" else (*EAGER, *DATA_DEPENDENT)

    def run(self, state: Any, given: Any, *, has_streams: bool = False) -> Any:
        """Returns the new state and some of the values that the steps made."""
        draw = random.Random(self.seed)
        values = [jnp.asarray(leaf) for leaf in jax.tree.leaves((state, given))]
        for step in self.steps:
            is_aside = draw.random() < 0.4 and step not in self.eager
            if not (has_streams and is_aside and self.side is not None):
                values += step(draw, values)
                continue
            self.side.wait_stream(tg.current_stream())
            with tg.stream(self.side):
                values += step(draw, values)
            tg.current_stream().wait_stream(self.side)
        return self._update(draw, state, values), self._choose(draw, given, values)

    def _update(self, draw: random.Random, state: Any, values: list[Any]) -> Any:
        def move(leaf: Any) -> Any:
            other = jnp.real(tame(pick(draw, values, ndim=0)).astype(jnp.complex64))
            if is_key(leaf):
                return jax.random.fold_in(leaf, 1)
            if leaf.ndim == 0 and is_float(leaf):
                # The weak type may come or go.
                changes = [leaf * 2, jnp.where(leaf > 1, 0.5, 1.5), jnp.float32(1) + leaf]
                return draw.choice(changes)
            return tame(leaf + other.astype(leaf.dtype)).astype(leaf.dtype)

        return jax.tree.map(move, state)

    def _choose(self, draw: random.Random, given: Any, values: list[Any]) -> Any:
        chosen = [draw.choice(values) for _ in range(draw.randint(1, 5))]
        if draw.random() < 0.4:
            chosen.append(chosen[0])
        if draw.random() < 0.4:
            chosen.append(draw.choice(jax.tree.leaves(given)))
        if draw.random() < 0.3:
            chosen.append(draw.choice([1.5, np.float32(2), 7, None]))
        return draw.choice([tuple, list, lambda each: {"first": each[0], "rest": each[1:]}])(chosen)

    def make_arguments(self, turn: int) -> tuple[Any, Any]:
        """Returns a state and an argument: of the same types for each turn, with other values."""
        draw = random.Random(self.seed + 1)
        numbers = np.random.default_rng([self.seed, turn])

        def make(shape: tuple[int, ...], dtype: str) -> Any:
            array = np.asarray(numbers.standard_normal(shape) * 2)
            array = np.abs(array) if dtype == "uint8" else array
            return array.astype(jnp.dtype(dtype))

        def make_any() -> Any:
            array = make(draw.choice([(), (4,), (3, 4)]), draw.choice(DTYPES))
            return array if draw.random() < 0.2 else jnp.asarray(array)

        state: dict[str, Any] = {"w": jnp.asarray(make((4,), "float32")), "n": jnp.int32(turn)}
        if draw.random() < 0.5:
            state["e"] = draw.choice([jnp.asarray(0.5 + turn), jnp.float32(turn)])
        if draw.random() < 0.4:
            state["k"] = jax.random.key(turn)
        if draw.random() < 0.4:
            state["h"] = jnp.asarray(make((3, 4), draw.choice(["bfloat16", "complex64"])))
        given: dict[str, Any] = {"a": [make_any() for _ in range(draw.randint(1, 3))]}
        if draw.random() < 0.6:
            given["s"] = draw.choice([0.5 + turn, 2 + turn, True])
        if draw.random() < 0.5:
            given["k"] = jax.random.key(turn + 3)
        if draw.random() < 0.4:
            given["weak"] = jnp.asarray(1.5 + turn)
        return state, given


def make_program(seed: int) -> Program:
    """Returns the program of a seed."""
    draw = random.Random(seed)
    steps = [draw.choice(ANYWHERE) for _ in range(draw.randint(3, 9))]
    for chance, others in ((0.4, DATA_DEPENDENT), (0.2, EAGER)):
        if draw.random() < chance:
            for _ in range(draw.randint(1, 2)):
                steps.insert(draw.randrange(len(steps) + 1), draw.choice(others))
    side = tg.Stream() if draw.random() < 0.25 else None
    is_refused = draw.random() < 0.33
    is_donated = draw.random() < 0.5
    return Program(seed, tuple(steps), is_donated, side, "refuse" if is_refused else "allow")
