"""Explains captures, saved graphs and errors, and draws memory snapshots."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import pathlib
import platform
import runpy
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
from absl import logging

from tracegraph import __version__
from tracegraph.compile_ahead import HERE, compile_ahead
from tracegraph.decorator import capture
from tracegraph.error_sections import describe_error, list_errors
from tracegraph.graphed_function import GraphedFunction
from tracegraph.memory_pictures.timeline import describe_snapshot, write_page, write_png
from tracegraph.reports.report import PARTS, read_parts
from tracegraph.runtime.errors import CaptureError, ConfigError, TracegraphError
from tracegraph.runtime.memory.snapshots.snapshot import read_snapshot
from tracegraph.saving.describe_file import describe_file

_EXPLAIN = "python -m tracegraph explain FILE:FUNCTION [--args EXPRESSION] [--show PARTS]"
_MEMORY = "python -m tracegraph memory SNAPSHOT [--html FILE] [--png FILE] [--time]"
_SHOW = "python -m tracegraph show FILE"
_COMPILE = (
    "python -m tracegraph compile FILE:FUNCTION --output FILE [--args EXPRESSION] [--target NAME]"
)
_ERROR = "python -m tracegraph error [NAME]"
_EXAMPLES = {
    _EXPLAIN: 'python -m tracegraph explain train.py:step --args "(jnp.ones(3), 2.0)"',
    _MEMORY: "python -m tracegraph memory dump_snapshot.pickle --html memory.html",
    _SHOW: "python -m tracegraph show step.tg",
    _COMPILE: "python -m tracegraph compile serve.py:step --target h200 --output step.tg",
    _ERROR: "python -m tracegraph error callback",
}
# Of errors about the arguments of a call, which the function itself has not seen.
_ARGUMENT_ANCHORS = ("no-arguments", "non-array-argument", "static-argument", "donated-twice")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are those of this package."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            message,
            where="command line",
            why="the commands are explain, memory, show, compile and error, each with at most one "
            "target",
            fix=f"{'; or '.join((self.usage or '').splitlines())}; or --help",
            anchor="command-line",
        )


def main() -> None:
    """Runs the command of this process's command line, and prints what it returns."""
    # JAX reports at INFO each backend that this machine does not have.
    logging.set_verbosity(logging.WARNING)
    try:
        print(run_command(sys.argv[1:]))
    except TracegraphError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


def run_command(words: Sequence[str]) -> str:
    """Returns the text that the words of a command line ask for.

    Raises:
        TracegraphError: the command, its target or its arguments are wrong or cannot be found.
        SystemExit: the words ask for help or the version, which is printed.
    """
    options = _make_parser().parse_args(words)
    if options.command == "explain":
        return explain_target(options.target, options.args, options.show)
    if options.command == "memory":
        return draw_snapshot(options.snapshot, options.html, options.png, options.time)
    if options.command == "show":
        return describe_file(options.file)
    if options.command == "compile":
        return compile_target(options.target, options.args, options.device, options.output)
    return list_errors() if options.name is None else describe_error(options.name)


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="python -m tracegraph",
        usage="\n".join(_EXAMPLES),
        description=__doc__,
        epilog="\n  ".join(("examples:", *_EXAMPLES.values())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    versions = f"jax {jax.__version__}, Python {platform.python_version()}"
    version = f"tracegraph {__version__} ({versions})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_explain(commands)
    _add_memory(commands)
    _add_show(commands)
    _add_compile(commands)
    _add_error(commands)
    return parser


def _add_explain(commands: Any) -> None:
    parser = _add_command(
        commands,
        _EXPLAIN,
        "Prints the report of a function: whether it can be captured, how it is cut, its nodes,\n"
        "its memory and what a call copies. FILE is run; FUNCTION may be captured or plain.",
    )
    _add_target(parser)
    parser.add_argument(
        "--show",
        metavar="PARTS",
        default="",
        help=f"parts of the report that follow its summary, as ir,plan,nodes: {', '.join(PARTS)}, "
        "or all",
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="FILE:FUNCTION", help="file, and a function in it")
    parser.add_argument(
        "--args",
        metavar="EXPRESSION",
        help="Python expression for the tuple of arguments, with the names of FILE; by default "
        "FILE's `sample_args`, a tuple or a function that returns one",
    )


def _add_compile(commands: Any) -> None:
    parser = _add_command(
        commands,
        _COMPILE,
        "Captures a function and saves its graph: on the current device, or for a GPU that is not\n"
        "here. Such a graph is verified by its first call where it is loaded.",
    )
    _add_target(parser)
    parser.add_argument("--output", metavar="FILE", required=True, help="to write")
    parser.add_argument(
        "--target",
        dest="device",
        metavar="NAME",
        default=HERE,
        help=f"the GPU, as h200; by default `{HERE}`, the current device, where the graph is "
        "verified at once",
    )


def _add_memory(commands: Any) -> None:
    parser = _add_command(
        commands,
        _MEMORY,
        "Draws what tg.memory.dump_snapshot() wrote: memory over time, the segments of each pool,\n"
        "and the memory plan of each graph.",
    )
    parser.add_argument("snapshot", metavar="SNAPSHOT", help="file that dump_snapshot() wrote")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="page to write; by default SNAPSHOT with the suffix .html, if there is no --png",
    )
    parser.add_argument("--png", metavar="FILE", help="image to write; needs matplotlib")
    parser.add_argument("--time", action="store_true", help="timelines in milliseconds, not events")


def _add_show(commands: Any) -> None:
    parser = _add_command(
        commands,
        _SHOW,
        "Prints what a saved graph holds: what it is for, its signatures, nodes and memory, how\n"
        "it was verified, and the sum that pins it. Its kernels are not loaded.",
    )
    parser.add_argument("file", metavar="FILE", help="that `save` of a captured function wrote")


def _add_error(commands: Any) -> None:
    parser = _add_command(
        commands,
        _ERROR,
        "Explains an error: what it means, with a failing and a repaired example. Without NAME it\n"
        "lists all names. The last line of an error's message has its name.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="as in `tracegraph error NAME`")


def _add_command(commands: Any, usage: str, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        usage.split()[3],
        usage=usage,
        help=text.partition(":")[0],
        description=text,
        epilog=f"example:\n  {_EXAMPLES[usage]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def draw_snapshot(target: str, page: str | None, image: str | None, has_time_axis: bool) -> str:
    """Draws a memory snapshot into files; returns what was drawn.

    Args:
        target: path of the snapshot.
        page: HTML file to write; by default next to the snapshot, if there is no image.
        image: PNG file to write.
        has_time_axis: True for timelines in milliseconds, not in events.

    Raises:
        TracegraphError: the file is not a snapshot, or a picture cannot be written.
    """
    snapshot = read_snapshot(target)
    if page is None and image is None:
        page = str(pathlib.Path(target).with_suffix(".html"))
    lines = [f"{target}: {describe_snapshot(snapshot)}"]
    for path, write in ((page, write_page), (image, write_png)):
        if path is None:
            continue
        try:
            write(path, snapshot, has_time_axis=has_time_axis)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}",
                where="command line",
                why=f"{type(error).__name__}: {error}",
                fix=f"name a file in an existing folder; {_MEMORY}",
                anchor="command-line",
            ) from error
        lines.append(f"wrote {path}")
    return "\n".join(lines)


def explain_target(target: str, expression: str | None = None, show: str = "") -> str:
    """Returns the report of a function.

    Args:
        target: ``FILE:FUNCTION``.
        expression: Python expression for the tuple of arguments; None for those of FILE.
        show: names of the parts that follow the summary, separated by commas.

    Raises:
        TracegraphError: the file, the function, its arguments or a part of the report cannot be
            found, or do not fit.
    """
    # Before the file is run, which may take long.
    parts = read_parts(show)
    graphed, arguments, origin = _find_call(target, expression)
    with _naming_arguments(origin):
        return graphed.explain(*arguments).show(",".join(parts))


def compile_target(target: str, expression: str | None, device: str, output: str) -> str:
    """Captures a function and saves its graph; returns what the file holds.

    Args:
        target: ``FILE:FUNCTION``.
        expression: Python expression for the tuple of arguments; None for those of FILE.
        device: name of a GPU, or `HERE`.
        output: the file to write.

    Raises:
        TracegraphError: the file, the function or its arguments cannot be found, or do not fit, or
            the graph cannot be compiled or saved.
    """
    graphed, arguments, origin = _find_call(target, expression)
    with _naming_arguments(origin):
        if device == HERE:
            graphed(*arguments)
            graphed.save(output)
        else:
            compile_ahead(graphed, arguments, output, device)
    return f"wrote {output}\n\n{describe_file(output)}"


def _find_call(
    target: str, expression: str | None
) -> tuple[GraphedFunction[..., Any], tuple[Any, ...], str]:
    """Returns a captured function, its arguments, and where these come from."""
    path, _, name = target.rpartition(":")
    if not pathlib.Path(path).is_file():
        raise _make_usage_error(f"there is no file {path or target}", "the target is FILE:FUNCTION")
    namespace = runpy.run_path(path, run_name="tracegraph_target")
    function = namespace.get(name)
    if not callable(function):
        raise _make_usage_error(f"{path} has no function `{name}`", "the target is FILE:FUNCTION")
    graphed = function if isinstance(function, GraphedFunction) else capture(function)
    return graphed, *_find_arguments(graphed, namespace, path, expression)


@contextlib.contextmanager
def _naming_arguments(origin: str) -> Iterator[None]:
    """Names the words of the command line in errors about arguments."""
    try:
        yield
    except CaptureError as error:
        if error.anchor not in _ARGUMENT_ANCHORS:
            raise
        raise _make_argument_error(error, origin) from error


def _find_arguments(
    function: Any, namespace: dict[str, Any], path: str, expression: str | None
) -> tuple[tuple[Any, ...], str]:
    """Returns the arguments to explain with, and where they come from."""
    if expression is not None:
        return _as_tuple(_evaluate(expression, namespace)), f"command line, --args `{expression}`"
    sample = namespace.get("sample_args")
    if sample is not None:
        return _as_tuple(sample() if callable(sample) else sample), f"{path}, `sample_args`"
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
    return (), path


def _make_argument_error(error: CaptureError, origin: str) -> CaptureError:
    # The line of the call is ours: what is wrong is in the words of the command line.
    named = error.where.partition(", ")[2]
    return CaptureError(
        error.what,
        where=f"{origin}, {named}",
        why=error.why,
        fix=error.fix,
        anchor=error.anchor,
        violations=error.violations,
    )


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
        fix=f"{_EXPLAIN}; or define `sample_args` in FILE",
        anchor="command-line",
    )


if __name__ == "__main__":
    main()
