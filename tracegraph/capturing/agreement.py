"""Agreement: processes that capture one program tell each other how far they have come.

Note [Agreement]
A program over the devices of several processes runs only when all of them call it. If one could
not capture it, the others would wait in a collective for ever, or while XLA compiles: on GPUs each
process tries out some of the kernels, and waits for what the others have found. So no process
compiles a new program before every other one has said that it has traced the same, or runs it
before all have compiled it; what they say goes through the store of `jax.distributed`, which needs
no device. Replays need no agreement: they are calls of one program, or of graphs and joint
collectives in one order.

Each process numbers what it says, and counts what it has heard of each other one. What was said for
a capture that the others did not come to is taken back, so that the next capture begins in step.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegraph.constraints.frames import locate_caller
from tracegraph.jax_internals import find_key_value_store
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.placement import list_joint
from tracegraph.runtime.errors import CaptureError

WAIT_S = 300.0
# The store is asked in pieces, so that an interrupt is seen between them.
PIECE_S = 1.0


# How often this process has spoken, by the processes of a program, and listened to each of them.
_said: dict[tuple[int, ...], int] = {}
_heard: dict[tuple[tuple[int, ...], int], int] = {}


class Agreement:
    """The agreement of several processes on one capture; see Note [Agreement].

    Args:
        name: of the captured function.
        devices: that its program runs on; with those of one process there is nothing to agree on.

    Attributes:
        has_others: True where other processes take part.
    """

    def __init__(self, name: str, devices: Sequence[Any]) -> None:
        self._name = name
        self._order = [device.id for device in devices]
        self._all = tuple(sorted({device.process_index for device in devices}))
        self._own = jax.process_index()
        self.has_others = len(self._all) > 1
        self._has_ended = not self.has_others

    def confirm(
        self, phase: str, program: str = "", times: Sequence[float] = ()
    ) -> list[Sequence[float]]:
        """Says that this process has finished a phase, and waits for the others to say so.

        Args:
            phase: its name.
            program: stands for what was compiled; equal in all processes.
            times: that this process has measured.

        Returns:
            The times of all processes.

        Raises:
            CaptureError: another process failed, has another program, or does not come.
        """
        if self._has_ended:
            return [times]
        mine = {"phase": phase, "name": self._name, "program": program}
        # Until all have agreed, an error is what they know already.
        self._has_ended = True
        self._say({**mine, "times": [*times]})
        heard = {process: self._hear(process) for process in self._all if process != self._own}
        for process, message in heard.items():
            if "problem" in message:
                raise self._make_joint_error(process, f"failed: {message['problem']}")
        measured = [times, *(message.pop("times") for message in heard.values())]
        for process, message in heard.items():
            if message != mine:
                raise self._make_joint_error(
                    process, f"captures another program, `{message['name']}`"
                )
        self._has_ended = False
        return measured

    def confirm_program(self, lowered: jax.stages.Lowered) -> None:
        """Says what this process is about to compile, and waits for the others to say the same.

        XLA itself may wait for all processes while it compiles.

        Args:
            lowered: by JAX.

        Raises:
            CaptureError: as `confirm`.
        """
        if self._has_ended:
            return
        text = f"{self._order}\n{lowered.as_text()}"
        self.confirm("traced", hashlib.sha256(text.encode()).hexdigest())

    def withdraw(self, error: BaseException) -> None:
        """Says that this process has failed, unless the others know."""
        if self._has_ended:
            return
        first = str(error).partition("\n")[0]
        self._say({"problem": f"{type(error).__name__}: {first}"})
        for process in self._all:
            if process != self._own:
                self._skip(process)

    def _say(self, message: dict[str, Any]) -> None:
        number = _said.get(self._all, 0)
        find_key_value_store().key_value_set(self._make_key(self._own, number), json.dumps(message))
        _said[self._all] = number + 1

    def _hear(self, process: int) -> dict[str, Any]:
        key = self._make_key(process, self._count_heard(process))
        text = _poll(lambda wait_ms: find_key_value_store().blocking_key_value_get(key, wait_ms))
        if text is None:
            self._take_back()
            raise self._make_joint_error(process, f"has not come to it within {WAIT_S:.0f} seconds")
        self._skip(process)
        return json.loads(text)

    def _take_back(self) -> None:
        number = _said[self._all] - 1
        find_key_value_store().key_value_delete(self._make_key(self._own, number))
        _said[self._all] = number

    def _skip(self, process: int) -> None:
        _heard[self._all, process] = self._count_heard(process) + 1

    def _count_heard(self, process: int) -> int:
        return _heard.get((self._all, process), 0)

    def _make_key(self, process: int, number: int) -> str:
        group = "-".join(map(str, self._all))
        return f"tracegraph/{group}/{process}/{number}"

    def _make_joint_error(self, process: int, what: str) -> CaptureError:
        return CaptureError(
            f"`{self._name}` is not captured: process {process} {what}",
            where=f"{locate_caller()}, process {self._own} of {len(self._all)}",
            why="a program over several processes runs only if all of them call it; a capture that "
            "one of them does not make is made by none",
            fix="let every process make the same calls in the same order, with equal shapes and "
            "shardings; look for the first error in the other process",
            anchor="agreement",
        )


def describe_cuts(definition: GraphDefinition) -> str:
    """Returns what processes exchange between their graphs, in order.

    XLA may choose other kernels for each process, but these names and sizes are equal.

    Args:
        definition: of one process.
    """
    members = [member for node in list_joint(definition) for member in node.members]
    return "; ".join(f"{member.name} {member.exchange}" for member in members)


def _poll(get: Callable[[int], str]) -> str | None:
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return get(max(int(min(PIECE_S, end - time.monotonic()) * 1000), 1))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if time.monotonic() > end:
            return None
