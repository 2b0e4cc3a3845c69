"""States: what the stages of one handler leave for later ones, deleted with their owner."""

from __future__ import annotations

import weakref
from typing import ClassVar

from tracegraph.runtime.ffi import c_api
from tracegraph.runtime.ffi.c_api import ExecutionStage


class States:
    """The states of one call; the handler's own function deletes each when this is gone."""

    _deleters: ClassVar[dict[int, int | None]] = {}

    def __init__(self) -> None:
        self._states: dict[ExecutionStage, tuple[int, int]] = {}
        weakref.finalize(self, _delete_states, self._states)

    @classmethod
    def register_deleter(cls, type_id: int, deleter: int | None) -> None:
        """Says which function deletes states of a type; None for none."""
        cls._deleters[type_id] = deleter

    def put(self, stage: ExecutionStage, type_id: int, state: int) -> str:
        """Takes a state over; returns why that is not possible, or an empty text."""
        if stage in self._states:
            return f"the state of the stage `{stage.name.lower()}` is set twice"
        if type_id not in self._deleters:
            return (
                f"the type of its state (number {type_id}) is not known: it was registered before "
                "tracegraph was imported"
            )
        self._states[stage] = type_id, state
        return ""

    def find(self, stage: ExecutionStage, type_id: int) -> int | None:
        """Returns the state of a stage, if it has this type."""
        found = self._states.get(stage)
        return None if found is None or found[0] != type_id else found[1]

    def __bool__(self) -> bool:
        return bool(self._states)


def _delete_states(states: dict[ExecutionStage, tuple[int, int]]) -> None:
    for type_id, state in states.values():
        deleter = States._deleters.get(type_id)
        if deleter and state:
            c_api.ROUTINE(deleter)(state)
    states.clear()
