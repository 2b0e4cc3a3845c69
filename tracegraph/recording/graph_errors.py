"""The errors of `CUDAGraph`: what is called in the wrong order, or in the wrong place."""

from __future__ import annotations

from typing import Any

from tracegraph.constraints.frames import locate_caller
from tracegraph.runtime.errors import CaptureError, ConfigError, ReplayError

CAPTURE_ERROR_MODES = ("global", "thread_local", "relaxed")


def make_nested_error(call: str) -> CaptureError:
    """Returns the error of a capture, or a replay, while this thread captures or traces."""
    return CaptureError(
        f"{call} is called while this thread records or traces something else",
        where=locate_caller(),
        why="a thread records into one program at a time, and a replay is no op of a program",
        fix="end the other one first; inside it call the function that the graph was made from",
        anchor="graph-order",
    )


def make_underway_error(call: str) -> CaptureError:
    """Returns the error of a call that has to wait for `capture_end`."""
    return CaptureError(
        f"{call} is called before the capture has ended",
        where=locate_caller(),
        why="there is no graph before its block has ended",
        fix="call it behind the block, or behind `capture_end()`",
        anchor="graph-order",
    )


def make_captured_error() -> CaptureError:
    """Returns the error of a second capture into one graph."""
    return CaptureError(
        "this CUDAGraph holds a graph already",
        where=locate_caller(),
        why="the arrays of its first capture show the buffers of that graph",
        fix="call `g.reset()` first, or capture into a new tg.CUDAGraph()",
        anchor="graph-order",
    )


def make_empty_error() -> ReplayError:
    """Returns the error of a replay without a graph."""
    return ReplayError(
        "this CUDAGraph holds no graph to replay",
        where=locate_caller(),
        why="nothing was captured into it, or its capture failed, or it was reset",
        fix="capture first: `with tg.graph(g): ...`",
        anchor="graph-order",
    )


def make_unbegun_error() -> CaptureError:
    """Returns the error of `capture_end` without a capture."""
    return CaptureError(
        "capture_end is called without capture_begin",
        where=locate_caller(),
        why="there is nothing that could end",
        fix="call `g.capture_begin()` first, or write `with tg.graph(g):`",
        anchor="graph-order",
    )


def make_other_end_error(what: str) -> CaptureError:
    """Returns the error of `capture_end` where the capture did not begin.

    Args:
        what: the thread or the stream.
    """
    return CaptureError(
        f"capture_end is called on another {what} than capture_begin",
        where=locate_caller(),
        why="a capture ends where it began: the order of its work is that of one stream",
        fix="call both on one thread and inside the same `with tg.stream(s):`, if there is one",
        anchor="graph-order",
    )


def make_device_error(aval: Any, device: Any, wanted: Any) -> CaptureError:
    """Returns the error of a block that reads an array of another device.

    Args:
        aval: of the array.
        device: that it is on.
        wanted: that the graph is for.
    """
    return CaptureError(
        f"the block reads an array on another device: {aval.str_short()} on {device}",
        where=locate_caller(),
        why=f"a graph is of one device; this one is of {wanted}, the current one "
        "where its block began",
        fix="move it first, before the block: jax.device_put(x, device); or capture in "
        "`with tg.device(i):`",
        anchor="other-device",
    )


def make_deleted_error() -> ReplayError:
    """Returns the error of a replay that reads an array of outside that is gone."""
    return ReplayError(
        "an array that the graph reads was deleted",
        where=locate_caller(),
        why="a graph reads arrays of outside where they are; this one was deleted or donated",
        fix="keep it: pass a copy to what donates it, or make it a tg.static_input",
        anchor="graph-order",
    )


def make_unkept_error(call: str) -> CaptureError:
    """Returns the error of a call that needs what the capture has dropped."""
    return CaptureError(
        f"{call} is called on a CUDAGraph that keeps no graph",
        where=locate_caller(),
        why="it became executable when its capture ended, and what it was made from was dropped",
        fix="make it with tg.CUDAGraph(keep_graph=True), before the capture",
        anchor="graph-order",
    )


def make_uninstantiated_error(call: str) -> ReplayError:
    """Returns the error of a call that needs an executable graph."""
    return ReplayError(
        f"{call} is called before the graph is executable",
        where=locate_caller(),
        why="with keep_graph=True it becomes executable in instantiate(), or in the first replay",
        fix="call `g.instantiate()` first",
        anchor="graph-order",
    )


def make_poolless_error() -> ReplayError:
    """Returns the error of asking an imported graph for its pool."""
    return ReplayError(
        "this CUDAGraph has no pool",
        where=locate_caller(),
        why="it was imported: its memory belongs to those who made it",
        fix="share the pool of a graph that was captured, or a tg.graph_pool_handle()",
        anchor="graph-order",
    )


def make_handle_error(call: str, *, is_empty: bool) -> ConfigError:
    """Returns the error of asking for a handle where the driver has no graph.

    Args:
        call: as the user wrote it.
        is_empty: True where the block did nothing; otherwise it is for the host device.
    """
    return ConfigError(
        f"{call} is called on a graph that the CUDA driver does not have",
        where=locate_caller(),
        why="its block made nothing, so there is nothing to launch"
        if is_empty
        else "it is of the host device, where a graph is a row of compiled calls",
        fix="record something that is kept"
        if is_empty
        else "run where JAX computes on a GPU; `g.get_graph_data()` has nodes and edges everywhere",
        anchor="graph-order",
    )


def check_error_mode(mode: str) -> None:
    """Refuses a word that is no mode of CUDA's; they all mean the same here.

    Nothing that another thread does can spoil a recording: it is JAX's trace of this thread.
    """
    if mode not in CAPTURE_ERROR_MODES:
        raise ConfigError(
            f"capture_error_mode={mode!r} is unknown",
            where=f"{locate_caller()}, argument `capture_error_mode`",
            why=f"the modes of CUDA are {', '.join(CAPTURE_ERROR_MODES)}",
            fix="leave it out: no mode changes what is recorded",
            anchor="unknown-option",
        )
