"""CaptureQueue: bounded, in order, and nothing is left in it by what fails."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from tracegraph.capturing import capture_queue
from tracegraph.capturing.capture_queue import CaptureQueue
from tracegraph.runtime.errors import CaptureError


class Owner:
    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.queue = CaptureQueue("step", weakref.WeakMethod(self.keep))

    def keep(self, call: Any, capture: Any) -> None:
        assert self.queue.is_wanted(call)
        self.kept.append(capture)


def make_signature(number: int) -> Any:
    return ("signature", number)


def test_the_signature_that_was_not_called_for_longest_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture_queue, "MAX_SIGNATURES", 2)
    queue = Owner().queue
    first, second = (queue.add(make_signature(number)) for number in range(2))
    assert queue.find(make_signature(0)) is first
    assert queue.add(make_signature(0)) is first
    third = queue.add(make_signature(2))
    assert queue.find(make_signature(1)) is None
    assert [queue.is_wanted(each) for each in (first, second, third)] == [True, False, True]
    queue.clear()
    assert not queue.is_wanted(first)
    assert queue.wait(0)


def test_what_goes_wrong_in_the_thread_is_an_error_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> Any:
        raise ZeroDivisionError("planted\nsecond line")

    error = capture_queue._run(fail, "step")
    assert isinstance(error, CaptureError)
    assert error.what == "the capture of `step` failed: ZeroDivisionError: planted"
    assert [record.exc_info is not None for record in caplog.records] == [True]
    with pytest.raises(KeyboardInterrupt):
        capture_queue._run(interrupt, "step")


def interrupt() -> Any:
    raise KeyboardInterrupt


def test_a_capture_is_kept_unless_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_queue, "Capture", str)
    owner = Owner()
    queue, signature = owner.queue, make_signature(0)
    call = queue.add(signature)
    queue.finish(call, None)
    assert queue.find(signature) is call
    queue.finish(call, capture_queue._make_failure_error("step", ValueError("x")))
    assert not call.wants_values
    queue.finish(call, capture_queue._make_lost_error("step"))
    assert call.wants_values
    assert call.has_lost_values
    queue.finish(call, "captured")  # pyright: ignore
    assert owner.kept == ["captured"]
    assert queue.find(signature) is None
