"""Command line: ``python -m tracegraph explain FILE:FUNCTION [--args EXPRESSION]``."""

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
from tracegraph.runtime.errors import ConfigError, TracegraphError

_ARGS = flags.DEFINE_string(
    "args",
    None,
    "Python expression, evaluated in FILE, that gives the tuple of arguments; "
    "by default FILE's `sample_args`, a tuple or a function that returns one.",
)
_USAGE = "python -m tracegraph explain FILE:FUNCTION [--args EXPRESSION]"


def main(argv: Sequence[str]) -> None:
    """Prints the report of one captured function.

    Args:
        argv: program, ``explain``, ``FILE:FUNCTION``.
    """
    # JAX reports at INFO each backend that this machine does not have.
    logging.set_verbosity(logging.WARNING)
    try:
        print(explain_target(argv[1:]))
    except TracegraphError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


def explain_target(words: Sequence[str]) -> str:
    """Returns the report for the words of a command line.

    Raises:
        ConfigError: the command, the file, the function or its arguments are not to be found.
    """
    if len(words) != 2 or words[0] != "explain" or ":" not in words[1]:
        raise _usage_error(f"cannot read the command `{' '.join(words)}`", "one command is known")
    path, _, name = words[1].rpartition(":")
    if not pathlib.Path(path).is_file():
        raise _usage_error(f"there is no file {path}", "the target is FILE:FUNCTION")
    namespace = runpy.run_path(path, run_name="tracegraph_target")
    function = namespace.get(name)
    if not callable(function):
        raise _usage_error(f"{path} has no function `{name}`", "the target is FILE:FUNCTION")
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
        raise _usage_error(
            f"{path} does not say with which {', '.join(required)} to explain the function",
            "a graph has static shapes, so it is made from example arguments",
        )
    return ()


def _evaluate(expression: str, namespace: dict[str, Any]) -> Any:
    # The file has just been run at the user's word; the expression is of the same hand.
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


def _usage_error(what: str, why: str) -> ConfigError:
    return ConfigError(
        what,
        where="command line",
        why=why,
        fix=f"{_USAGE}; or define `sample_args` in FILE",
        anchor="command-line",
    )


if __name__ == "__main__":
    app.run(main)
