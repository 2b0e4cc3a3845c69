"""Worker processes for the harnesses: one that dies takes one case with it, not the run.

A worker writes a line when it begins a case and one when the case is done. After an error it ends
by itself, for a fault on a GPU makes every later call of the process fail; a fresh one continues.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from tests.conformance.results import Outcome, Result

BEGUN = "begun"
DONE = "done"
SECONDS_PER_CASE = 60.0


def write_begun(name: str, file: IO[str]) -> None:
    """Says that a case begins."""
    _write_line({"event": BEGUN, "name": name}, file)


def write_done(result: Result, file: IO[str]) -> None:
    """Says what became of a case."""
    fields = {**vars(result), "outcome": result.outcome.value}
    _write_line({"event": DONE, **fields}, file)


def read_result(fields: dict[str, Any]) -> Result:
    """Returns the result that a line of `write_done` holds."""
    kept = {key: value for key, value in fields.items() if key != "event"}
    return Result(**{**kept, "outcome": Outcome(kept["outcome"])})


def run_workers(
    names: Sequence[str],
    make_command: Callable[[Sequence[str]], list[str]],
    count: int,
    on_result: Callable[[Result], None],
) -> None:
    """Runs all cases in several processes at once.

    Args:
        names: of the cases, each one unique.
        make_command: gives the command of a worker that runs some of them in order.
        count: how many workers at once.
        on_result: called once per case, never twice at once.
    """
    lock = threading.Lock()

    def report(result: Result) -> None:
        with lock:
            on_result(result)

    threads = [
        threading.Thread(target=_run_share, args=(list(names[first::count]), make_command, report))
        for first in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _run_share(
    names: list[str],
    make_command: Callable[[Sequence[str]], list[str]],
    report: Callable[[Result], None],
) -> None:
    """Runs the cases of one worker, with a fresh process after each one that died."""
    while names:
        finished, begun, ending = 0, names[0], ""
        for event in _follow(make_command(names)):
            if event["event"] == BEGUN:
                begun = event["name"]
            elif event["event"] == DONE:
                report(read_result(event))
                finished, begun = finished + 1, ""
            else:
                ending = event["ending"]
        if begun and finished < len(names):
            report(Result("", names[finished], Outcome.ERROR, reason=f"worker {ending}"))
            finished += 1
        names = names[finished:]


def _follow(command: list[str]) -> Iterator[dict[str, Any]]:
    """Yields what a worker writes, and at last how it ended."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    timer = _restart_timer(None, process)
    try:
        for line in process.stdout:
            timer = _restart_timer(timer, process)
            if line.startswith("{"):
                yield json.loads(line)
    finally:
        timer.cancel()
        process.stdout.close()
        if process.poll() is None:
            process.wait(timeout=SECONDS_PER_CASE)
    yield {"event": "ended", "ending": f"ended with status {process.returncode}"}


def _restart_timer(
    timer: threading.Timer | None, process: subprocess.Popen[str]
) -> threading.Timer:
    if timer is not None:
        timer.cancel()
    timer = threading.Timer(SECONDS_PER_CASE, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def _write_line(fields: dict[str, Any], file: IO[str]) -> None:
    print(json.dumps(fields), file=file, flush=True)


def is_last(result: Result) -> bool:
    """True when a worker must end after this result: the device may be unusable from then on."""
    return result.outcome is Outcome.ERROR
