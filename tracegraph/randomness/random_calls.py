"""RandomCalls: calls of a captured function that draws keys from generators.

Note [Random functions]. The function that is captured takes the states of the generators as one
more argument, and returns beside its results how many keys it has drawn of each, which is known
when it is traced. So a call counts as many keys as the function would draw without a capture; one
that fails counts none. Graphs that draw nothing are as they would be without all this.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from tracegraph.extra_parameter import name_parameter
from tracegraph.options import Options, list_keywords
from tracegraph.randomness.draws import UnboundDrawsSignal, binding, hold_states
from tracegraph.randomness.generator_state import GeneratorState

P = ParamSpec("P")
R = TypeVar("R")
STATES = "generator_states"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Drawn:
    """What a call has drawn.

    Attributes:
        counts: of each state, in their order.
        is_tuple: True when the function returns a tuple.
    """

    counts: tuple[int, ...]
    is_tuple: bool


class RandomCalls:
    """Calls of one captured function that draws keys, see Note [Random functions].

    Args:
        function: the user's function.
        options: how it is captured.
        capture: from a function and the keywords of `capture` to a captured function.
        states: that the function was seen to draw from.

    Attributes:
        captured: the captured function with the states as an argument.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Options,
        capture: Callable[[Callable[..., Any], dict[str, Any]], Any],
        states: tuple[GeneratorState, ...],
    ) -> None:
        self.captured = capture(_make_pure(function, states), list_keywords(options))
        self.states = states

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the captured function and counts what it draws.

        Raises:
            UnboundDrawsSignal: with these arguments it draws from other generators, too.
        """
        with hold_states(self.states):
            *results, drawn = self.captured(*args, **self.add_states(kwargs))
            for state, count in zip(self.states, drawn.counts, strict=True):
                state.advance(count)
        return tuple(results) if drawn.is_tuple else results[0]

    def add_states(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of a call, with the states as they are now."""
        return kwargs | {STATES: [state.read_input() for state in self.states]}

    def extend(self, signal: UnboundDrawsSignal) -> tuple[GeneratorState, ...]:
        """Returns the states of a function that draws from others, too."""
        return tuple(dict.fromkeys((*self.states, *signal.states)))


def retries_draws(method: Callable[P, R]) -> Callable[P, R]:
    """Makes a method of a captured function trace again when generators are drawn from."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # The first argument is the captured function.
        captured: Any = args[0]
        while True:
            before = captured._random
            try:
                return method(*args, **kwargs)
            except UnboundDrawsSignal as signal:
                captured._join_random(signal, before)

    return call


def _make_pure(
    function: Callable[..., Any], states: tuple[GeneratorState, ...]
) -> Callable[..., Any]:
    """Returns the function that is captured in the place of the user's function."""

    def pure(*args: Any, generator_states: list[Any], **kwargs: Any) -> Any:
        with binding(dict(zip(states, generator_states, strict=True))) as counts:
            result = function(*args, **kwargs)
            drawn = tuple(counts[state] for state in states)
        # Beside the results, not around them: a state that is returned is found there.
        if type(result) is tuple:
            return *result, Drawn(drawn, is_tuple=True)
        return result, Drawn(drawn, is_tuple=False)

    name_parameter(pure, function, STATES)
    return pure
