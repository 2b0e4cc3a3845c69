"""The errors of streams and events that are made or used wrongly."""

from __future__ import annotations

import sys
from typing import Any

from tracegraph.runtime.errors import CaptureError, ConfigError, ReplayError, UnsupportedError
from tracegraph.runtime.source_lines import locate_stack


def make_priority_error(priority: Any) -> ConfigError:
    """Returns the error for a priority that is no int."""
    return ConfigError(
        f"`priority` is {priority!r}",
        where="argument `priority` of tg.Stream",
        why="a priority is an int, lower numbers are served first",
        fix="pass 0, or a number of tg.Stream.priority_range()",
        anchor="config",
    )


def check_flags(call: str, **flags: Any) -> None:
    """Refuses a number or a text in the place of True or False, as an event for `enable_timing`.

    Args:
        call: as the user wrote it.
        **flags: its arguments.

    Raises:
        ConfigError: one of them is no bool.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(
                f"`{name}` is {value!r}",
                where=f"argument `{name}` of {call} at {locate_stack(sys._getframe())}",
                why="it is True or False",
                fix=f"pass {name}=True, or leave it out",
                anchor="config",
            )


def check_handle(kind: type, value: Any, call: str, name: str) -> None:
    """Refuses what is no stream, or no event.

    Args:
        kind: the class that is expected.
        value: what the user passed.
        call: as the user wrote it.
        name: of its argument.

    Raises:
        ConfigError: the value is of another class.
    """
    if isinstance(value, kind):
        return
    raise ConfigError(
        f"`{name}` is {value!r}",
        where=f"argument `{name}` of {call} at {locate_stack(sys._getframe())}",
        why="streams and events are known by their objects; a number may be another library's",
        fix=f"pass a tg.{kind.__name__}, as tg.{kind.__name__}() makes one",
        anchor="config",
    )


def make_interprocess_error() -> UnsupportedError:
    """Returns the error for an event that several processes are to share."""
    return UnsupportedError(
        "an event for several processes is asked for",
        where="Event(interprocess=True)",
        why="the memory of graphs and JAX's arrays belong to one process, as its events do",
        fix="leave `interprocess` out, and let the process that computes wait for its work",
        anchor="interprocess-event",
    )


def make_no_time_error(name: str) -> ReplayError:
    """Returns the error for a time between events of which one has none.

    Args:
        name: of that one, ``start`` or ``end``.
    """
    return ReplayError(
        f"the {name} event has no time",
        where="Event.elapsed_time",
        why="an event takes the time only with enable_timing=True and once recorded",
        fix="create it as Event(enable_timing=True) and call record()",
        anchor="event-time",
    )


def make_captured_event_error(call: str, name: str) -> CaptureError:
    """Returns the error of a call that needs an event of the device, not one of a capture.

    Args:
        call: as the user wrote it.
        name: of the capture in which the event was recorded.
    """
    return CaptureError(
        f"{call} is called for an event that was recorded in a capture",
        where=f"{call}, event recorded in the capture of `{name}`",
        why="such an event orders streams inside of the graph, and no replay records it outside",
        fix="make it tg.Event(external=True), which each replay records, or record another one",
        anchor="captured-event",
    )


def make_two_clocks_error() -> ReplayError:
    """Returns the error for a time between events of two devices."""
    return ReplayError(
        "the two events were recorded on two devices",
        where="Event.elapsed_time",
        why="each device has a clock of its own",
        fix="record both on streams of one device",
        anchor="event-time",
    )


def make_handle_error(stream: Any, why: str) -> ConfigError:
    """Returns the error for what is no stream of the driver.

    Args:
        stream: what the user passed.
        why: one fact about it.
    """
    shown = hex(stream) if type(stream) is int else repr(stream)
    return ConfigError(
        f"{shown} is not a stream",
        where="argument `stream` of tg.ExternalStream",
        why=why,
        fix="pass the stream object of the library, or its handle, while the stream is alive",
        anchor="stream-handle",
    )
