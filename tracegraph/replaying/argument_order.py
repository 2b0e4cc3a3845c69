"""ArgumentOrder: from a call, however its arguments are spelled, to one value per slot."""

from __future__ import annotations

import copy
from typing import Any

from tracegraph.replaying.argument_slots import Slot, StaticSlot
from tracegraph.tracing.call_spec import CallSpec


class ArgumentOrder:
    """The slots of one signature in order: positional arguments, then those by keyword.

    Args:
        call: the calls that the graph takes.
        slots: one per argument, by position or name, static ones included.

    Attributes:
        slots: in order; see `keep_statics` for None.
        arity: how many arguments a call has that gives all by position; -1 if none can.
    """

    __slots__ = ("_count", "_keys", "_keywords", "_names", "_spellings", "arity", "slots")

    def __init__(self, call: CallSpec, slots: dict[int | str, Slot]) -> None:
        positions = sorted(key for key in slots if isinstance(key, int))
        self._names = [key for key in slots if isinstance(key, str)]
        self.slots: tuple[Any, ...] = (
            *(slots[key] for key in positions),
            *(slots[key] for key in self._names),
        )
        self._count = len(positions)
        self._spellings = call.spellings
        self._keys = [*range(self._count), *map(self._spellings.find_key, self._names)]
        # The names by which the captured call gave its last arguments.
        self._keywords = dict.fromkeys((*call.moved, *self._names))
        # Calls with keyword arguments are ordered first, see `join`.
        self.arity = -1 if self._keywords else self._count

    def keep_statics(self) -> ArgumentOrder:
        """Returns the same order without the slots of dynamic arguments, which hold a graph."""
        kept = copy.copy(self)
        kept.slots = tuple(s if isinstance(s, StaticSlot) else None for s in self.slots)
        return kept

    def join(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Returns one argument per slot; None for others than the slots'."""
        if kwargs.keys() == self._keywords.keys():
            joined = (*args, *(kwargs[key] for key in self._keywords))
            if len(joined) == len(self.slots):
                return joined
        # Another spelling than that of the call that was captured, see Note [Spellings].
        return self._spellings.join(self._keys, args, kwargs)

    def respell(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Returns a call with the arguments that the slots take; None if it has others."""
        joined = self.join(args, kwargs)
        if joined is None:
            return None
        return joined[: self._count], dict(zip(self._names, joined[self._count :], strict=True))
