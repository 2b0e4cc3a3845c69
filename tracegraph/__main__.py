"""Explains what a capture holds, and draws memory snapshots.

python -m tracegraph explain FILE:FUNCTION [--args EXPRESSION]
    Prints the report of a function: whether it can be captured, its regions, its memory plan, its
    nodes and what a call copies. FILE is run; FUNCTION may be captured or plain.
    Example: python -m tracegraph explain train.py:step --args "(jnp.ones(3), 2.0)"

python -m tracegraph memory SNAPSHOT [--html FILE] [--png FILE] [--time]
    Draws what tg.memory.dump_snapshot() wrote: memory over time, the segments of each pool, and the
    memory plan of each graph.
    Example: python -m tracegraph memory dump_snapshot.pickle --html memory.html
"""

from __future__ import annotations

import inspect
import pathlib
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging

from tracegraph.decorator import capture
from tracegraph.graphed_function import GraphedFunction
from tracegraph.memory_pictures.timeline import describe_snapshot, write_page, write_png
from tracegraph.runtime.errors import ConfigError, TracegraphError
from tracegraph.runtime.memory.snapshots.snapshot import read_snapshot

_ARGS = flags.DEFINE_string(
    "args",
    None,
    "explain: Python expression for the tuple of arguments, with the names of FILE; by default "
    "FILE's `sample_args`, a tuple or a function that returns one.",
)
_HTML = flags.DEFINE_string(
    "html",
    None,
    "memory: page to write; by default SNAPSHOT with the suffix .html, if there is no --png.",
)
_PNG = flags.DEFINE_string("png", None, "memory: image to write; needs matplotlib.")
_TIME = flags.DEFINE_boolean("time", False, "memory: timelines in milliseconds, not in events.")
_USAGE = "python -m tracegraph explain FILE:FUNCTION [--args EXPRESSION]"
_MEMORY_USAGE = "python -m tracegraph memory SNAPSHOT [--html FILE] [--png FILE] [--time]"


def main(argv: Sequence[str]) -> None:
    """Runs one command and prints what it returns.

    Args:
        argv: the program, ``explain`` or ``memory``, and the target of the command.
    """
    # JAX reports at INFO each backend that this machine does not have.
    logging.set_verbosity(logging.WARNING)
    try:
        print(run_command(argv[1:]))
    except TracegraphError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


def run_command(words: Sequence[str]) -> str:
    """Returns the text that the words of a command line ask for.

    Raises:
        TracegraphError: the command, its target or its arguments are wrong or cannot be found.
    """
    if len(words) == 2 and words[0] == "memory":
        return draw_snapshot(words[1])
    if len(words) == 2 and words[0] == "explain" and ":" in words[1]:
        return explain_target(words[1])
    raise ConfigError(
        f"cannot read the command `{' '.join(words)}`" if words else "there is no command",
        where="command line",
        why="the commands are explain and memory, with one target each",
        fix=f"{_USAGE}; or {_MEMORY_USAGE}",
        anchor="command-line",
    )


def draw_snapshot(target: str) -> str:
    """Draws a memory snapshot into the files that the flags name; returns what was drawn.

    Args:
        target: path of the snapshot.

    Raises:
        TracegraphError: the file is not a snapshot, or a picture cannot be written.
    """
    snapshot = read_snapshot(target)
    page = _HTML.value
    if page is None and _PNG.value is None:
        page = str(pathlib.Path(target).with_suffix(".html"))
    lines = [f"{target}: {describe_snapshot(snapshot)}"]
    for path, write in ((page, write_page), (_PNG.value, write_png)):
        if path is None:
            continue
        try:
            write(path, snapshot, has_time_axis=_TIME.value)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}",
                where="command line",
                why=f"{type(error).__name__}: {error}",
                fix=f"name a file in an existing folder; {_MEMORY_USAGE}",
                anchor="command-line",
            ) from error
        lines.append(f"wrote {path}")
    return "\n".join(lines)


def explain_target(target: str) -> str:
    """Returns the report of a function.

    Args:
        target: ``FILE:FUNCTION``.

    Raises:
        ConfigError: the file, the function or its arguments cannot be found.
    """
    path, _, name = target.rpartition(":")
    if not pathlib.Path(path).is_file():
        raise _make_usage_error(f"there is no file {path}", "the target is FILE:FUNCTION")
    namespace = runpy.run_path(path, run_name="tracegraph_target")
    function = namespace.get(name)
    if not callable(function):
        raise _make_usage_error(f"{path} has no function `{name}`", "the target is FILE:FUNCTION")
    graphed = function if isinstance(function, GraphedFunction) else capture(function)
    return graphed.explain(*_find_arguments(graphed, namespace, path))


def _find_arguments(function: Any, namespace: dict[str, Any], path: str) -> tuple[Any, ...]:
    expression = _ARGS.value
    if expression is not None:
        return _as_tuple(_evaluate(expression, namespace))
    sample = namespace.get("sample_args")
    if sample is not None:
        return _as_tuple(sample() if callable(sample) else sample)
    required = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if required:
        raise _make_usage_error(
            f"{path} does not say with which {', '.join(required)} to explain the function",
            "a graph has static shapes, so it is made from example arguments",
        )
    return ()


def _evaluate(expression: str, namespace: dict[str, Any]) -> Any:
    # The user has just asked to run the file; the expression is as trusted as the file is.
    try:
        return eval(expression, namespace)
    except Exception as error:
        raise ConfigError(
            f"cannot evaluate --args `{expression}`: {type(error).__name__}: {error}",
            where="command line, --args",
            why="the expression is evaluated with the names of FILE and gives the arguments",
            fix='write a tuple, as in --args "(jnp.ones(3), 2.0)"',
            anchor="command-line",
        ) from error


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _make_usage_error(what: str, why: str) -> ConfigError:
    return ConfigError(
        what,
        where="command line",
        why=why,
        fix=f"{_USAGE}; or define `sample_args` in FILE",
        anchor="command-line",
    )


if __name__ == "__main__":
    app.run(main)
