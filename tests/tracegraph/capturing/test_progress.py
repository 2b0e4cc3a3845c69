"""Progress: a line on a terminal, plain lines in a log when it is set, only for long captures."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import os
import select
import threading
import types
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.paths import ROOT
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
    assert is_shown(Terminal(is_terminal=is_terminal)) is expected


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
        with Progress("capturing `step`") as line:
            line.enter("trace")
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


class Reader:
    """The other end of a stream: what was written, as it comes."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.text = descriptor, ""

    def read(self, *, timeout_s: float = 0) -> str:
        """Returns all text so far; waits for more if there is a timeout."""
        while select.select([self.descriptor], [], [], timeout_s)[0]:
            data = os.read(self.descriptor, 4096)
            if not data:
                break
            self.text += data.decode()
            timeout_s = 0
        return self.text

    def wait_for(self, text: str) -> None:
        """Fails when the text does not come."""
        while text not in self.read():
            before = self.text
            assert self.read(timeout_s=30) != before, f"no {text!r} after {self.text!r}"


@contextlib.contextmanager
def attach(
    monkeypatch: pytest.MonkeyPatch, name: str, descriptors: tuple[int, int]
) -> Iterator[Reader]:
    """Puts the second descriptor in the place of a stream of `sys`, buffered as Python does it."""
    reader = Reader(descriptors[0])
    with os.fdopen(descriptors[1], "w") as stream, monkeypatch.context() as patch:
        patch.setattr(f"sys.{name}", stream)
        yield reader
    os.close(descriptors[0])


def capture_slowly(reader: Reader, text: str) -> None:
    """Captures a function that is traced until the reader has seen a text."""

    def wait(x: jax.Array) -> jax.Array:
        reader.wait_for(text)
        return x + 1

    assert tg.capture(wait, name="step", verify=False)(jnp.zeros(2)).tolist() == [1, 1]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_PERIOD_SECONDS", 0.001)
    monkeypatch.delenv("TRACEGRAPH_PROGRESS", raising=False)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("choice", ["auto", "1"])
def test_a_capture_shows_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch, choice: str):
    monkeypatch.setenv("TRACEGRAPH_PROGRESS", choice)
    with attach(monkeypatch, "stderr", os.openpty()) as reader:
        capture_slowly(reader, "\r\x1b[Kcapturing `step`: trace, 0 s")
        reader.wait_for("\n")
    assert reader.text.count("\n") == 1
    # A terminal turns the end of a line into two characters.
    assert reader.text.split("\x1b[K")[-1].startswith("capturing `step`: done in ")


@pytest.mark.usefixtures("at_once")
def test_a_capture_writes_plain_lines_into_a_pipe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACEGRAPH_PROGRESS", "1")
    with attach(monkeypatch, "stderr", os.pipe()) as reader:
        # A line comes while the capture goes on, not when a buffer is full.
        capture_slowly(reader, "capturing `step`: trace, 0 s\n")
        reader.wait_for("done")
    assert "\r" not in reader.text
    assert "\x1b" not in reader.text
    lines = reader.text.splitlines()
    assert lines[0] == "capturing `step`: trace, 0 s"
    assert lines[-1].startswith("capturing `step`: done in ")
    phases = [line.split(": ")[1].split(",")[0].split()[0] for line in lines]
    # However long a phase takes, it does not fill the log; checks come twice.
    assert all(one != other for one, other in itertools.pairwise(phases))


@pytest.mark.usefixtures("at_once")
def test_a_capture_writes_nothing_into_a_pipe_by_itself(monkeypatch: pytest.MonkeyPatch):
    with attach(monkeypatch, "stderr", os.pipe()) as reader:
        assert tg.capture(lambda x: x + 1, verify=False)(jnp.zeros(2)).tolist() == [1, 1]
    assert reader.text == ""


@pytest.mark.usefixtures("at_once")
def test_a_log_repeats_a_long_phase(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACEGRAPH_PROGRESS", "1")
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.002)
    with attach(monkeypatch, "stderr", os.pipe()) as reader:
        capture_slowly(reader, "capturing `step`: trace, 0 s\ncapturing `step`: trace, 0 s\n")


@pytest.mark.usefixtures("at_once")
def test_a_reader_that_leaves_stops_no_capture(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACEGRAPH_PROGRESS", "1")
    here, there = os.pipe()
    os.close(here)
    stream = os.fdopen(there, "w")  # What is left in its buffer cannot be written.
    monkeypatch.setattr("sys.stderr", stream)
    assert tg.capture(lambda x: x + 2, verify=False)(jnp.zeros(2)).tolist() == [2, 2]
    with contextlib.suppress(BrokenPipeError):
        stream.close()


@pytest.mark.parametrize("choice", ["auto", "1"])
def test_a_capture_without_a_usable_stream(monkeypatch: pytest.MonkeyPatch, choice: str):
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    monkeypatch.setenv("TRACEGRAPH_PROGRESS", choice)
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, types.SimpleNamespace(write=len, flush=list)):
        monkeypatch.setattr("sys.stderr", stream)
        with Progress("capturing `step`") as line:
            line.enter("trace")


def test_the_demo_prints_lines_through_a_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: object):
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples/03_train_digits.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    make_generator = np.random.default_rng

    class EnoughError(Exception):
        pass

    with attach(monkeypatch, "stdout", os.pipe()) as reader, monkeypatch.context() as patch:

        def look(epoch: int) -> np.random.Generator:
            if epoch == 2:
                raise EnoughError
            return make_generator(epoch)

        patch.setattr(np.random, "default_rng", look)
        with pytest.raises(EnoughError):
            demo.main(f"{tmp_path}/plot.png")
        # Nothing was closed or filled up: each line was passed on by itself.
        lines = reader.read().split("\n")
    assert [line.split(",")[0] for line in lines] == ["epoch  1/15", "epoch  2/15", ""]
    assert "\r" not in reader.text
