"""RecordedDraws: the inputs of a recorded block for the generators that it draws from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from tracegraph.jax_internals import eval_trace, run_in
from tracegraph.randomness.draws import Draws, hold_states
from tracegraph.randomness.generator_state import GeneratorState
from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.arrays.live_buffers import StaticInput, place


class RecordedDraws(Draws):
    """The draws of a block: each state gets an input, which is filled before each replay.

    Args:
        name: of the graph.
        trace: that records the block.
        jax_device: that the graph is for.
    """

    def __init__(self, name: str, trace: Any, jax_device: Any) -> None:
        self._jax_device = jax_device
        self._buffers: dict[GeneratorState, StaticInput] = {}
        super().__init__(name, trace, {})

    def make_input(self, state: GeneratorState) -> Any:
        """Returns an array that stands for the input of a state."""
        with run_in(eval_trace):
            value = place(jnp.array(state.read_input()), self._jax_device)
        buffer = self._buffers[state] = StaticInput(value, self._jax_device)
        return Array(buffer, 0, ArrayState.LIVE)

    def make_turns(self) -> DrawTurns | None:
        """Returns what a replay does for the generators; None if the block has drawn nothing."""
        if not self._buffers:
            return None
        # What stands for the inputs in the block would keep the block alive.
        self._inputs.clear()
        return DrawTurns(
            [(state, buffer, self.counts[state]) for state, buffer in self._buffers.items()]
        )


class DrawTurns:
    """Fills a graph's inputs from generators, and counts what each replay draws.

    Args:
        draws: states, each with its input and the number of keys of one replay.
    """

    def __init__(self, draws: list[tuple[GeneratorState, StaticInput, int]]) -> None:
        self._draws = draws
        self._states = tuple(state for state, _, _ in draws)

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Surrounds one replay; one that fails counts no keys."""
        with hold_states(self._states):
            for state, buffer, _ in self._draws:
                buffer.write(state.read_input())
            yield
            for state, _, count in self._draws:
                state.advance(count)
