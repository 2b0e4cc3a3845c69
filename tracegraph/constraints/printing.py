"""The rule `host-read` for `print`: a traced value has nothing to print."""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from jax.core import Tracer

from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.violation import Violation, make_capture_error

_lock = threading.Lock()
_tracing = threading.local()
_plain_print = builtins.print
_watchers = 0


@contextlib.contextmanager
def watch_print(name: str, *, is_quiet: bool = False) -> Iterator[None]:
    """Makes `print` of a traced value an error in this thread, while the function is traced.

    Args:
        name: the captured function's name.
        is_quiet: prints nothing in this thread: what a function prints while it is traced has
            appeared in the first trace, and `jax.jit` prints it once.

    Raises:
        CaptureError: from the user's `print`, when an argument is a traced value. Everything else
            is printed as always, also from other threads.
    """
    outer = getattr(_tracing, "name", None), getattr(_tracing, "is_quiet", False)
    _tracing.name, _tracing.is_quiet = name, is_quiet or outer[1]
    _install(1)
    try:
        yield
    finally:
        _install(-1)
        _tracing.name, _tracing.is_quiet = outer


def _install(change: int) -> None:
    global _watchers, _plain_print
    with _lock:
        if _watchers == 0:
            _plain_print = builtins.print
        _watchers += change
        builtins.print = _print if _watchers else _plain_print


def _print(*values: Any, **options: Any) -> None:
    name = getattr(_tracing, "name", None)
    if name is not None and any(isinstance(value, Tracer) for value in values):
        raise make_capture_error([_make_print_violation(name)], graph_name=name)
    if name is None or not _tracing.is_quiet:
        _plain_print(*values, **options)


def _make_print_violation(name: str) -> Violation:
    return Violation(
        "host-read",
        f"`{name}` prints a traced value with `print`",
        locate_caller(),
        "the function is traced without values; a CUDA graph never comes back to the host",
        "return the value and print it outside `capture`; `print(x.shape)` is fine",
    )
