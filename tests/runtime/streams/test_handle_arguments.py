"""What streams and events are given: anything else than one of these is refused at its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.streams.event import Event
from tracegraph.runtime.streams.stream import Stream, set_stream, stream


@pytest.mark.parametrize("name", ["enable_timing", "blocking", "interprocess", "external"])
@pytest.mark.parametrize("value", [3, 1, None, "yes"])
def test_what_an_event_is_made_with_is_true_or_false(name: str, value: Any):
    with pytest.raises(ConfigError) as raised:
        Event(**{name: value})
    assert raised.value.what == f"`{name}` is {value!r}"
    assert raised.value.where.startswith(
        f"argument `{name}` of tg.Event at tests/runtime/streams/test_handle_arguments.py:"
    )


USES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "Stream.wait_stream": ("other", lambda given: Stream().wait_stream(given)),
    "Stream.wait_event": ("event", lambda given: Stream().wait_event(given)),
    "Stream.record_event": ("event", lambda given: Stream().record_event(given)),
    "Event.record": ("stream", lambda given: Event().record(given)),
    "Event.wait": ("stream", lambda given: Event().wait(given)),
    "Event.elapsed_time": ("end", lambda given: Event(enable_timing=True).elapsed_time(given)),
    "tg.stream": ("s", lambda given: stream(given).__enter__()),
    "tg.set_stream": ("s", set_stream),
}


@pytest.mark.parametrize("call", USES)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_what_is_no_stream_or_event_is_refused(call: str, *, is_swapped: bool):
    name, use = USES[call]
    is_event = name in ("event", "end")
    given: Any = 3 if not is_swapped else Stream() if is_event else Event()
    with pytest.raises(ConfigError) as raised:
        use(given)
    error = raised.value
    assert error.what == f"`{name}` is {given!r}"
    assert error.where.startswith(
        f"argument `{name}` of {call} at tests/runtime/streams/test_handle_arguments.py:"
    )
    assert error.fix.startswith("pass a tg.Event" if is_event else "pass a tg.Stream")
    assert str(error).count("\n") == 3
