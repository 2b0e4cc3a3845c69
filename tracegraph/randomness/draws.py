"""Draws: which generators a trace draws from, and how often.

Note [Draws]. A capture does not know the generators of a function before it has traced it. So the
first trace draws from states that it has no input for; it is thrown away, `UnboundDrawsSignal` says
which they are, and the function is captured with their states as one more argument. A recorded
block makes its inputs when they are first needed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax

from tracegraph.constraints.frames import locate_caller
from tracegraph.jax_internals import eval_trace, find_base_trace, run_in, trace_state
from tracegraph.randomness.errors import (
    ANCHOR,
    make_state_in_capture_error,
    make_traced_draw_error,
    make_two_captures_error,
)
from tracegraph.randomness.generator_state import GeneratorState
from tracegraph.runtime.errors import TracegraphError


class UnboundDrawsSignal(TracegraphError):
    """A function draws from generators whose states are no arguments of it yet.

    A captured function handles it. It is the error of what draws in the function of a graphed
    callable, which has no argument for a state.

    Args:
        states: of the generators.
    """

    def __init__(self, states: tuple[GeneratorState, ...]) -> None:
        super().__init__(
            "next_key() is called in a function whose graphs take no generator",
            where=locate_caller(),
            why="its forward and backward graphs read arguments only: the key would never change",
            fix="draw the key outside and pass it as an argument",
            anchor=ANCHOR,
        )
        self.states = states


class Draws:
    """What one trace draws.

    Args:
        name: of the capture.
        trace: that ops of the capture go to; None for any.
        bound: the inputs of states.
        outer: knows what to do for other states; None to read them at once.

    Attributes:
        counts: keys drawn of each state.
    """

    def __init__(
        self,
        name: str,
        trace: Any,
        bound: Mapping[GeneratorState, Any],
        outer: Draws | None = None,
    ) -> None:
        self.name, self.trace = name, trace
        self.counts: dict[GeneratorState, int] = dict.fromkeys(bound, 0)
        self._inputs = dict(bound)
        self._outer = outer
        self._claimed: list[GeneratorState] = []

    def draw(self, state: GeneratorState) -> jax.Array:
        """Returns the next key of a state, as a value of the trace."""
        self._claim(state)
        if state not in self._inputs:
            self._inputs[state] = self.make_input(state)
        number = self.counts.get(state, 0)
        key = state.derive(self._inputs[state], number)
        self.counts[state] = number + 1
        return key

    def make_input(self, state: GeneratorState) -> Any:
        """Returns the input of a state that has none yet."""
        return state.read_input() if self._outer is None else self._outer.make_input(state)

    def release(self) -> None:
        """Lets other captures draw."""
        for state in self._claimed:
            state.capture = None
        self._claimed.clear()

    def _claim(self, state: GeneratorState) -> None:
        me = threading.get_ident()
        with _claim_lock:
            if state.capture is None:
                state.capture = (me, self.name)
                self._claimed.append(state)
            elif state.capture[0] != me:
                raise make_two_captures_error(state.capture[1])


class UnboundDraws(Draws):
    """The draws of a trace whose function may have no inputs for states yet.

    Attributes:
        found: the states without an input.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, None, {})
        self.found: list[GeneratorState] = []

    def make_input(self, state: GeneratorState) -> Any:
        """Returns words that stand for the input; the trace will be thrown away."""
        self.found.append(state)
        return state.read_input()

    def check(self) -> None:
        """Raises the signal if there are states without an input."""
        if self.found:
            raise UnboundDrawsSignal(tuple(dict.fromkeys(self.found)))


class _ThreadState(threading.local):
    draws: Draws | None = None


D = TypeVar("D", bound=Draws)
_thread_state = _ThreadState()
_claim_lock = threading.Lock()


@contextlib.contextmanager
def noting(draws: D) -> Iterator[D]:
    """Makes the draws of this thread part of a trace."""
    before, _thread_state.draws = _thread_state.draws, draws
    try:
        yield draws
    finally:
        _thread_state.draws = before
        draws.release()


def enter_trace() -> None:
    """Says that the trace has begun: draws belong to what ops go to now."""
    if _thread_state.draws is not None:
        _thread_state.draws.trace = trace_state.value


@contextlib.contextmanager
def binding(states: Mapping[GeneratorState, Any]) -> Iterator[Mapping[GeneratorState, int]]:
    """Draws from inputs of the function that runs now; gives the counts of what it draws."""
    outer = _thread_state.draws
    name = "a function" if outer is None else outer.name
    with noting(Draws(name, trace_state.value, states, outer)) as draws:
        yield draws.counts


def draw_key(state: GeneratorState) -> jax.Array:
    """Returns the next key: of the capture that this thread traces, or at once.

    Raises:
        TracedDrawError: JAX traces a function of its own around the draw.
        CaptureError: another thread captures with the generator.
    """
    base, draws = find_base_trace(), _thread_state.draws
    expected = eval_trace if draws is None else draws.trace
    # None where types are all that is asked for.
    if expected is not None and base is not expected:
        raise make_traced_draw_error()
    # A function that is differentiated or mapped draws the key that it would draw otherwise.
    with run_in(base):
        return state.draw() if draws is None else draws.draw(state)


def check_outside(call: str) -> None:
    """Raises inside a capture, where states are neither read nor set."""
    if _thread_state.draws is not None:
        raise make_state_in_capture_error(call)


@contextlib.contextmanager
def hold_states(states: tuple[GeneratorState, ...]) -> Iterator[None]:
    """Keeps other threads from drawing, in an order in which no two threads wait for each other."""
    with contextlib.ExitStack() as stack:
        for state in sorted(states, key=id):
            stack.enter_context(state.lock)
        yield
