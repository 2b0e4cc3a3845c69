"""Processes of a benchmark: scripts that print figures, and peers that answer requests.

PyTorch is such a peer: it and JAX share neither libraries nor memory pools.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

SCRIPT_SECONDS = 600.0


def run_script(arguments: Sequence[str], variables: Mapping[str, str]) -> Any:
    """Runs Python in a process of its own, and returns the JSON of the last line that it prints.

    Args:
        arguments: of the interpreter; the first is the script.
        variables: all of the environment.

    Raises:
        subprocess.CalledProcessError: it failed; its messages went to the standard error.
        subprocess.TimeoutExpired: it took longer than `SCRIPT_SECONDS`.
    """
    ran = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=SCRIPT_SECONDS,
        check=True,
        env=variables,
    )
    return json.loads(ran.stdout.splitlines()[-1])


@contextlib.contextmanager
def start_peer(serve: Callable[..., None], *args: Any) -> Iterator[Callable[..., Any]]:
    """Starts a process and yields what asks it: it sends its arguments and returns the answer.

    Args:
        serve: called there with a connection and the arguments; answers until the pipe is closed.
        args: can be pickled.
    """
    context = multiprocessing.get_context("spawn")
    connection, far_end = context.Pipe()
    # Ends with this process, or when the pipe does.
    process = context.Process(target=serve, args=(far_end, *args), daemon=True)
    process.start()
    far_end.close()

    def ask(*request: Any) -> Any:
        connection.send(request)
        return connection.recv()

    yield ask
    connection.close()
    process.join()


def answer_requests(connection: Any, answer: Callable[..., Any]) -> None:
    """Answers requests until the pipe is closed."""
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(answer(*request))


def serve_module(connection: Any, name: str) -> None:
    """Lets a module answer: the process imports that, and nothing that its parent needs."""
    importlib.import_module(name).serve(connection)
