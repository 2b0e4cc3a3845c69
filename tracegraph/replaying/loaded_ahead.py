"""LoadedAhead: the arguments that a graph has loaded for a call that may follow."""

from __future__ import annotations

from typing import Any

import jax


class LoadedAhead:
    """What is loaded, until the graph is called; under the graph's lock, but for `drop`.

    Attributes:
        args: of the call that may follow; None where nothing is loaded.
    """

    __slots__ = ("_generation", "args")

    def __init__(self) -> None:
        self.args: tuple[Any, ...] | None = None
        self._generation = 0

    def keep(self, args: tuple[Any, ...], generation: int) -> None:
        """Remembers what was loaded after so many replays."""
        self.args, self._generation = args, generation

    def take(self, args: tuple[Any, ...], generation: int) -> bool:
        """Returns whether these very arguments are loaded still; nothing is from then on.

        Args:
            args: of the call.
            generation: of the graph and those that share its state: any replay counts.
        """
        is_loaded = self.args is args and self._generation == generation
        self.args = None
        return is_loaded and not any(map(_is_gone, args))

    def drop(self, args: tuple[Any, ...]) -> None:
        """Forgets arguments, so that nothing holds them; a thread that has others loads again."""
        if self.args is args:
            self.args = None


def _is_gone(value: Any) -> bool:
    """True for an array that was deleted; a tree is watched by its slot."""
    return isinstance(value, jax.Array) and value.is_deleted()
