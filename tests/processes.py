"""Python in processes of its own: settings that are read once, commands, interpreter exit."""

from __future__ import annotations

import atexit
import functools
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Mapping, Sequence
from typing import IO

from tests.paths import ROOT

# A limit for what hangs; on a busy machine a process may take minutes.
TIMEOUT_S = 480
NONE: Mapping[str, str] = types.MappingProxyType({})


def run_python(
    arguments: Sequence[object],
    *,
    before: Sequence[str] = (),
    folder: pathlib.Path = ROOT,
    timeout_s: float = TIMEOUT_S,
    variables: Mapping[str, str] = NONE,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with the checkout on its path; returns its exit status and its two texts.

    Args:
        arguments: of the interpreter, as ``["-c", program]``.
        before: a command that runs the interpreter, as a checking tool does.
        folder: to run it in.
        timeout_s: after which it is ended and the test fails.
        variables: of the environment, beside those of this process.
    """
    return subprocess.run(
        [*before, sys.executable, *map(str, arguments)],
        cwd=folder,
        env=_make_environment(variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def start_python(
    arguments: Sequence[object],
    *,
    before: Sequence[str] = (),
    variables: Mapping[str, str] = NONE,
    output: IO[str] | int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Starts Python with the checkout on its path, and goes on.

    Args:
        arguments: as for `run_python`.
        before: as for `run_python`.
        variables: as for `run_python`.
        output: a file for both of its texts, which go nowhere without.
    """
    return subprocess.Popen(
        [*before, sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=_make_environment(variables),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )


def run_copy(
    arguments: Sequence[object],
    *,
    folder: pathlib.Path = ROOT,
    variables: Mapping[str, str] = NONE,
) -> subprocess.CompletedProcess[str]:
    """As `run_python` on the CPU, warnings as errors, in a copy of a process that has imported JAX.

    That takes half of the time. Neither options of the interpreter nor variables that JAX reads
    when it is imported can be given.
    """
    (done,) = run_copies([arguments], folder=folder, variables=variables)
    return done


def run_copies(
    programs: Sequence[Sequence[object]],
    *,
    folder: pathlib.Path = ROOT,
    variables: Mapping[str, str] = NONE,
) -> list[subprocess.CompletedProcess[str]]:
    """Runs several programs at the same time, each as `run_copy` does."""
    environment = _make_environment({"JAX_PLATFORMS": "cpu", **variables})
    return _start_server().run(programs, folder, environment)


def run_program(program: str, *arguments: object, **variables: str) -> str:
    """Runs a program as `run_copy` does and returns what it printed.

    It must end with exit status 0 and an empty standard error.

    Args:
        program: of Python; it is dedented.
        arguments: in ``sys.argv`` from 1 on.
        variables: of the environment, beside those of this process.
    """
    done = run_copy(["-c", textwrap.dedent(program), *arguments], variables=variables)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


class ForkServer:
    """The process of tests/fork_server.py; it answers one request after another."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-W", "error", "-m", "tests.fork_server"],
            cwd=ROOT,
            # A thread of NumPy's would not live on in a copy.
            env=_make_environment({"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What is read ahead would not show in `select`.
            bufsize=0,
        )

    def run(
        self, programs: Sequence[Sequence[object]], folder: pathlib.Path, variables: dict[str, str]
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs programs at the same time, see `run_copies`."""
        words = [[str(each) for each in arguments] for arguments in programs]
        with tempfile.TemporaryDirectory() as texts:
            outs, errors = (
                [pathlib.Path(texts, f"{name}{index}") for index in range(len(words))]
                for name in ("out", "error")
            )
            requests = [
                {
                    "arguments": arguments,
                    "folder": str(folder),
                    "variables": variables,
                    "out": str(out),
                    "error": str(error),
                }
                for arguments, out, error in zip(words, outs, errors, strict=True)
            ]
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(requests).encode() + b"\n")
            self._process.stdin.flush()
            numbers: list[int] = []
            for _ in words:
                number = self._read_number()
                assert number is not None, "no process was started"
                numbers.append(number)
            statuses: list[int] = []
            for arguments in words:
                status = self._read_number()
                if status is None:
                    self._end(numbers[len(statuses) :])
                    raise subprocess.TimeoutExpired(arguments, TIMEOUT_S)
                statuses.append(status)
            return [
                subprocess.CompletedProcess(arguments, status, out.read_text(), error.read_text())
                for arguments, status, out, error in zip(words, statuses, outs, errors, strict=True)
            ]

    def _end(self, numbers: Sequence[int]) -> None:
        """Ends copies of which the server has not yet told the exit status."""
        for number in numbers:
            os.kill(number, signal.SIGKILL)
        for _ in numbers:
            self._read_number()

    def _read_number(self) -> int | None:
        """Returns an answer of the server; None if it takes too long."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], TIMEOUT_S)[0]:
            return None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the server."""
        self._process.communicate()


@functools.cache
def _start_server() -> ForkServer:
    server = ForkServer()
    atexit.register(server.close)
    return server


def _make_environment(variables: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    return {**os.environ, "PYTHONPATH": path, **variables}
