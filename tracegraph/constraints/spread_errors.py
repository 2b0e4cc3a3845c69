"""Errors of captures over several devices."""

from __future__ import annotations

from tracegraph.constraints.frames import locate_caller
from tracegraph.runtime.errors import CaptureError


def make_no_nodes_error(name: str, program: object) -> CaptureError:
    """Returns the error of a function whose nodes are asked for, where there are none.

    Args:
        name: of the captured function.
        program: that all devices run.
    """
    return CaptureError(
        f"`{name}` has no nodes to show: it is {program}",
        where=locate_caller(),
        why="on the host device a region is one call of XLA's; over several devices it is all",
        fix="read explain(...), or the program itself: lower(...).as_text()",
        anchor="several-devices",
    )
