"""The progress line: only on a terminal or when it is set, only for long captures."""

from __future__ import annotations

import io
import threading
import types
from collections.abc import Callable

import pytest

from tracegraph.capturing import progress
from tracegraph.capturing.progress import Progress, is_shown


class Terminal(io.StringIO):
    """Says when something has been written, so that no test has to sleep."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self._written = threading.Condition()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        with self._written:
            count = super().write(text)
            self._written.notify_all()
        return count

    def wait_for(self, text: str) -> bool:
        with self._written:
            return self._written.wait_for(lambda: text in self.getvalue(), timeout=30)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Puts a terminal in the place of stderr; to be called in the test, where pytest is done."""

    def attach() -> Terminal:
        shown = Terminal(is_terminal=True)
        monkeypatch.setattr("sys.stderr", shown)
        return shown

    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_PERIOD_SECONDS", 0.001)
    monkeypatch.delenv("TRACEGRAPH_PROGRESS", raising=False)
    return attach


@pytest.mark.parametrize(
    ("choice", "is_terminal", "expected"),
    [
        ("auto", True, True),
        ("auto", False, False),
        ("1", False, True),
        ("0", True, False),
    ],
)
def test_when_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, choice: str, is_terminal: bool, expected: bool
):
    monkeypatch.setenv("TRACEGRAPH_PROGRESS", choice)
    monkeypatch.setattr("sys.stderr", Terminal(is_terminal=is_terminal))
    assert is_shown() is expected


def test_a_long_capture_shows_its_phase_and_its_end(terminal: Callable[[], Terminal]):
    shown = terminal()
    with Progress("capturing `step`") as line:
        line.enter("trace")
        assert shown.wait_for("\r\x1b[Kcapturing `step`: trace, ")
    text = shown.getvalue()
    assert "\r\x1b[Kcapturing `step`: done in " in text
    assert text.endswith(" s\n")


def test_a_failed_capture_says_so(terminal: Callable[[], Terminal]):
    shown = terminal()

    def fail() -> None:
        with Progress("capturing `step`"):
            assert shown.wait_for("capturing `step`: ")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "capturing `step`: failed in " in shown.getvalue()


def test_a_short_capture_writes_nothing(
    terminal: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch
):
    shown = terminal()
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 60.0)
    with Progress("capturing `step`") as line:
        line.enter("trace")
    assert shown.getvalue() == ""


def test_nothing_is_started_when_nothing_is_shown(
    terminal: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch
):
    shown = terminal()
    monkeypatch.setenv("TRACEGRAPH_PROGRESS", "0")
    before = threading.active_count()
    with Progress("capturing `step`"):
        assert threading.active_count() == before
    assert shown.getvalue() == ""


def test_its_thread_ends_with_it(terminal: Callable[[], Terminal]):
    terminal()
    before = threading.active_count()
    with Progress("capturing `step`"):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_seconds_of_a_phase_that_is_entered_again_add_up(monkeypatch: pytest.MonkeyPatch):
    times = iter([0.0, 1.0, 3.0, 7.0, 15.0])
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(perf_counter=times.__next__))
    line = Progress("capturing `step`")
    for phase in ("compile", "lower", "compile", ""):
        line.enter(phase, "region0 of 1")
    assert line.seconds == {"compile": 2.0 + 8.0, "lower": 4.0}
