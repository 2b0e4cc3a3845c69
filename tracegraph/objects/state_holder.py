"""StateHolder: which arrays of the last call may be given up by the next one.

The state of objects is donated, so that it stays in the graph, but users of nnx hold on to what a
model holds: `nnx.clone(model)` and `nnx.state(model)` hold the same arrays, and must keep their
values. So an array is given up only if a call has returned it and nothing else has come to refer to
it since, by CPython's count of references; of any other array the call gets a copy. Where counts
say nothing, without the interpreter's lock, it is always a copy.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


class StateHolder:
    """Holds the arrays that the last call returned, with the number of references to each."""

    def __init__(self) -> None:
        self._arrays: dict[str, Any] = {}
        self._counts: list[int] = []

    def hold(self, state: dict[str, Any]) -> None:
        """Takes over what a call returned, when all its users have got their references."""
        self._arrays, self._counts = state, list(map(sys.getrefcount, state.values()))

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns arrays that may be given up: those of the state, or copies."""
        # The dict itself has one more reference to each.
        free = self._find_free(extra=1)
        self.drop()
        return {name: array if id(array) in free else _copy(array) for name, array in state.items()}

    def take_again(self, state: dict[str, Any], variables: Sequence[Any]) -> dict[str, Any]:
        """Returns the same of the arrays that are in variables now; the state itself if it can."""
        free = self._find_free(extra=0)
        self.drop()
        values = [variable.get_raw_value() for variable in variables]
        is_same = len(free) == len(state) and all(map(operator.is_, values, state.values()))
        if is_same:
            return state
        pairs = zip(state, values, strict=True)
        return {name: array if id(array) in free else _copy(array) for name, array in pairs}

    def drop(self) -> None:
        """Holds nothing: if the call fails, the next one takes copies."""
        self._arrays, self._counts = {}, []

    def _find_free(self, *, extra: int) -> set[int]:
        """Returns the identities of arrays without new references, but for so many."""
        if not _has_counts():
            return set()
        # All at once: the loop below refers to the arrays, too.
        counts = list(map(sys.getrefcount, self._arrays.values()))
        return {
            id(array)
            for array, then, now in zip(self._arrays.values(), self._counts, counts, strict=True)
            if now <= then + extra
        }


def _has_counts() -> bool:
    is_locked: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
    return sys.implementation.name == "cpython" and is_locked


def _copy(array: Any) -> Any:
    """Returns a copy of an array; what is no array, or is deleted, is left to the checks."""
    is_copied = isinstance(array, jax.Array) and not array.is_deleted()
    return jnp.copy(array) if is_copied else array
