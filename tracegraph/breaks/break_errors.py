"""The errors of functions that read traced values on the host, in four lines."""

from __future__ import annotations

from collections.abc import Sequence

from tracegraph.constraints.frames import locate_function
from tracegraph.constraints.sources import SourceCall
from tracegraph.constraints.traces import describe_causes
from tracegraph.runtime.errors import CaptureError
from tracegraph.tracing.prepared_call import PreparedCall


def make_difference_error(
    prepared: PreparedCall, what: str, calls: Sequence[SourceCall] = ()
) -> CaptureError:
    """Returns the error of a function that does something else after the same reads."""
    causes = describe_causes(calls)
    return CaptureError(
        f"`{prepared.options.name}` differs from run to run with the same reads: {what}",
        where=locate_function(prepared.function),
        why="its parts are replayed as they were traced, in the order that the reads decide"
        + (f"; {causes}" if causes else ""),
        fix="compute what changes outside and pass it as an argument",
        anchor="python-work",
    )


def make_reference_error(name: str, where: str) -> CaptureError:
    """Returns the error of a reference of JAX's that is alive while a value is read."""
    return CaptureError(
        f"`{name}` reads a value on the host while it holds a mutable array (`jax.new_ref`)",
        where=where,
        why="the read ends a graph, and a mutable array lives within one",
        fix="read its value with ref[...] and drop it before, or make another one afterwards",
        anchor="host-read",
    )
