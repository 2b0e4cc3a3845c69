"""A peer in a process of its own: PyTorch and JAX share neither libraries nor memory pools."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any


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
