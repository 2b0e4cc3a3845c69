"""Which program this thread records; the front end sets it, arrays that live on ask it."""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Recorder(Protocol):
    """A program that is being recorded."""

    def read_live(self, buffer: Any) -> Any:
        """Returns what stands for a live value in the program.

        Args:
            buffer: a `LiveBuffer`; the program reads what it holds at each replay.
        """
        ...

    def write_live(self, buffer: Any, value: Any) -> None:
        """Makes the program write a live value.

        Args:
            buffer: a `LiveBuffer`; it holds the result after each replay.
            value: an array of its shape and dtype, or what stands for one in the program.
        """
        ...

    def show_value(self, value: Any) -> Any:
        """Returns an array for what stands for a value in the program; anything else as it is.

        Args:
            value: what `read_live` has returned.
        """
        ...

    def offer_value(self, value: Any) -> Any:
        """Returns what JAX gets as the value of a live array: an array, where one may be bound.

        Args:
            value: what `read_live` has returned.
        """
        ...


class RecorderState(threading.local):
    """The program that this thread records.

    Attributes:
        recorder: None outside of a block that is recorded.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None


recorder_state = RecorderState()
