"""The errors of `Array`: reading a stale output, writing where nothing may be written."""

from __future__ import annotations

import sys
from typing import Any

from tracegraph.runtime.arrays.residence import Donation
from tracegraph.runtime.errors import (
    CaptureError,
    ConfigError,
    InternalError,
    ReplayError,
    StaleOutputError,
)
from tracegraph.runtime.source_lines import locate_stack


def make_stale_error(name: str, made: int, now: int) -> StaleOutputError:
    """Returns the error of reading a static output after a later replay.

    Args:
        name: the buffer.
        made: number of the replay that made the output.
        now: number of the replay whose bytes the buffer holds.
    """
    return StaleOutputError(
        f"static output `{name}` was overwritten by a later replay",
        where=f"read at {locate_stack(sys._getframe())}; made by replay {made}, "
        f"the buffer now holds replay {now}",
        why='outputs="static" returns the static buffer itself, which every replay overwrites',
        fix='copy it before the next call (`.copy()`), or capture with outputs="fresh"',
        anchor="stale-output",
    )


def make_donated_error(described: str, donation: Donation, *, where: str) -> ReplayError:
    """Returns the error of reading or passing an array that a captured function has taken.

    Args:
        described: the array, as ``float32[4]``.
        donation: to which call.
        where: it was used.
    """
    return ReplayError(
        f"this {described} has been deleted: it was donated to `{donation.function}`",
        where=f"{where}; it was `{donation.argument}` of that call",
        why="a donated array's memory now holds what that call computed, as under `jax.jit`",
        fix="use what the call returned, or copy before the call: `jnp.copy(x)`, for a tree "
        "`jax.tree.map(jnp.copy, tree)`",
        anchor="deleted-array",
    )


def make_unsettled_error(name: str, made: int, now: int) -> InternalError:
    """Returns the error of an owner that overwrote a fresh result without settling it."""
    return InternalError(
        f"result `{name}` was overwritten before it had a copy",
        where=f"made by replay {made}, the buffer now holds replay {now}",
        why="the owner of a buffer settles its live results before a replay; it did not",
    )


def make_immutable_error(described: str) -> ReplayError:
    """Returns the error of `copy_` into an immutable value."""
    return ReplayError(
        f"`copy_` cannot write to this {described}: it is an immutable value",
        where=f"copy_ at {locate_stack(sys._getframe())}",
        why="only donated state and static outputs are in a static buffer that may be written",
        fix='pass the new value to the next call, or capture with outputs="static"',
        anchor="array-copy",
    )


def make_mismatch_error(name: str, wanted: str, got: str) -> ReplayError:
    """Returns the error of `copy_` from another shape or dtype."""
    return ReplayError(
        f"`copy_` into `{name}`: wanted {wanted}, got {got}",
        where=f"copy_ at {locate_stack(sys._getframe())}, argument 0 `src`",
        why="a static buffer has a fixed shape and dtype; nothing is broadcast or converted",
        fix="convert it first, as with `src.astype(dtype).reshape(shape)`",
        anchor="array-copy",
    )


def make_unreplayed_error(described: str, problem: str) -> ReplayError:
    """Returns the error of reading what a recorded block made, where there is no value.

    Args:
        described: the array, as ``float32[4]``.
        problem: why there is none.
    """
    return ReplayError(
        f"this {described} has no value: {problem}",
        where=f"read at {locate_stack(sys._getframe())}",
        why="work inside `with tg.graph(g)` is recorded, not run; a replay computes the values",
        fix="call `g.replay()` before the value is read",
        anchor="unreplayed-output",
    )


def make_recorded_copy_error() -> CaptureError:
    """Returns the error of `copy_` inside a block that is recorded."""
    return CaptureError(
        "`copy_` writes what a block has made, inside of a block that is recorded",
        where=f"copy_ at {locate_stack(sys._getframe())}",
        why="a graph writes its outputs itself; only a static input keeps what is copied into it",
        fix="compute a new array instead, or copy into a tg.static_input",
        anchor="array-copy",
    )


def make_traced_copy_error(shown: str) -> CaptureError:
    """Returns the error of `copy_` inside a function that is traced.

    Args:
        shown: what is copied.
    """
    return CaptureError(
        f"`copy_` is given {shown}, which a traced function computes",
        where=f"copy_ at {locate_stack(sys._getframe())}",
        why="a trace has no values yet, and the array would keep what stands for one",
        fix="return the value and copy it after the call, or record a `tg.graph` block",
        anchor="array-copy",
    )


def make_stream_error(stream: object) -> ConfigError:
    """Returns the error of `record_stream` with something else."""
    return ConfigError(
        f"`stream` is {stream!r}",
        where=f"record_stream at {locate_stack(sys._getframe())}",
        why="streams are known by their objects; a number may be that of another library",
        fix="pass a tg.Stream, as tg.current_stream()",
        anchor="config",
    )


def describe_array(value: Any) -> str:
    """Returns ``float32[2,3]`` for an array, and the type's name for anything else.

    Example:
        >>> import numpy as np
        >>> describe_array(np.zeros((2, 3), np.float32)), describe_array("text")
        ('float32[2,3]', 'str')
    """
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"
