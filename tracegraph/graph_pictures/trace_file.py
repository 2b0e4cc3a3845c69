"""The Chrome trace that `jax.profiler` writes: found, read, and written again."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
from typing import Any, TypeAlias

from tracegraph.constraints.frames import locate_caller
from tracegraph.runtime.errors import ConfigError, shorten_list

TraceEvent: TypeAlias = dict[str, Any]
# Not those of `create_perfetto_trace`, which end in _trace.json.gz and have the same events.
_PATTERNS = ("*.trace.json.gz", "*.trace.json")
_MOST_FILES = 4


def find_trace(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the file of a trace.

    Args:
        path: the file, or the folder that was given to `jax.profiler.trace`.

    Raises:
        ConfigError: there is no such file, or the folder has none or several.
    """
    if not isinstance(path, str | os.PathLike):
        raise make_trace_error(
            f"`path` is {path!r}", "it names the file to read", 'pass a name as "trace.json.gz"'
        )
    found = pathlib.Path(path)
    if found.is_file():
        return found
    if not found.is_dir():
        raise make_trace_error(
            f"there is no trace at {os.fspath(path)!r}",
            "neither a file nor a folder has this name",
            "pass the folder that was given to jax.profiler.trace, after its with-block has ended",
        )
    files = sorted(file for pattern in _PATTERNS for file in found.rglob(pattern))
    if len(files) == 1:
        return files[0]
    names = shorten_list([str(file.relative_to(found)) for file in files], _MOST_FILES)
    raise make_trace_error(
        f"the folder {os.fspath(path)!r} has {len(files)} traces",
        f"these are {', '.join(names)}" if files else "no name in it ends in .trace.json.gz",
        "pass the file" if files else "pass the folder that was given to jax.profiler.trace",
    )


def read_trace(path: pathlib.Path) -> dict[str, Any]:
    """Returns what a trace holds; its events are in the list ``traceEvents``.

    Args:
        path: of a JSON file, which may be compressed.

    Raises:
        ConfigError: it is no trace, or is truncated.
    """
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, ValueError) as error:
        raise _make_broken_error(path, f"it cannot be read as JSON: {error}") from error
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise _make_broken_error(path, "it has no list `traceEvents` of events")
    return content


def write_trace(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a trace, compressed if its name ends in ``.gz``; a file of this name is replaced.

    Args:
        path: of the file.
        content: as `read_trace` returned it.
    """
    data = json.dumps(content, separators=(",", ":")).encode()
    # A trace cannot be recorded again: after an interrupt the old file is still there.
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    partial.replace(path)


def make_trace_error(what: str, why: str, fix: str) -> ConfigError:
    """Returns the error of a trace that cannot be labelled.

    Args:
        what: is wrong.
        why: it is.
        fix: what to do.
    """
    where = f"label_trace, {locate_caller()}"
    return ConfigError(what, where=where, why=why, fix=fix, anchor="trace-labels")


def _make_broken_error(path: pathlib.Path, why: str) -> ConfigError:
    fix = "pass the .trace.json.gz that jax.profiler.trace has written, as it was"
    return make_trace_error(f"{os.fspath(path)!r} is no trace of a profiler", why, fix)
