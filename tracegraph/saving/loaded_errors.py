"""The errors of calls of a loaded function, which cannot capture what it does not have."""

from __future__ import annotations

from collections.abc import Sequence

from tracegraph.constraints.frames import locate_caller
from tracegraph.reports.differences import Difference, find_differences
from tracegraph.runtime.errors import ReplayError, shorten_list
from tracegraph.tracing.call_spec import CallSpec
from tracegraph.tracing.prepared_call import PreparedCall

ANCHOR = "loaded-function"


def make_unfit_error(
    name: str, source: str, calls: Sequence[CallSpec], found: PreparedCall
) -> ReplayError:
    """Returns the error of a call that fits no signature: what differs from the nearest.

    Args:
        name: of the function.
        source: the file that it was loaded from.
        calls: that its graphs take.
        found: the call.
    """
    differences = [find_differences(found, each.names, each.signature) for each in calls]
    nearest = min(differences, key=_rank)
    is_set = all(each.kind == "setting" for each in nearest)
    which = "the one signature" if len(calls) == 1 else f"any of the {len(calls)} signatures"
    return ReplayError(
        f"`{name}` is called with other arguments than {which} of {source}",
        where=f"{locate_caller()}: "
        + "; ".join(shorten_list([each.side_by_side for each in nearest])),
        why="a file has no source: what was not captured when it was saved cannot be captured now",
        fix="call it under the settings that it was saved with, on the device that is current when "
        "it is loaded: with tg.device(i)"
        if is_set
        else f"call `{name}` with these arguments before it is saved, or pass others",
        anchor=ANCHOR,
    )


def _rank(differences: Sequence[Difference]) -> tuple[int, int]:
    """Returns how far a call is from a signature: of one shape is nearer than of one dtype."""
    return len(differences), sum(each.kind not in ("dtype", "weak type") for each in differences)


def make_trace_error(name: str) -> ReplayError:
    """Returns the error of a call inside of what JAX traces, differentiates or runs op by op."""
    return ReplayError(
        f"the loaded `{name}` is called inside of another program of JAX",
        where=locate_caller(),
        why="a program is traced from the source of a function, and a file has none; neither is "
        "there a derivative of a graph",
        fix="call it outside of jax.jit, jax.grad and the like, or capture the function there",
        anchor=ANCHOR,
    )


def make_float_error(name: str, text: str) -> ReplayError:
    """Returns the error of an invalid float in a result, while JAX looks for such.

    Args:
        name: of the function.
        text: what JAX says.
    """
    return ReplayError(
        f"a result of the loaded `{name}` is invalid: {text}",
        where=locate_caller(),
        why="jax_debug_nans or jax_debug_infs is on; the op that made it cannot be found, since a "
        "file has no source",
        fix=f"capture `{name}` from its source and call it with these arguments",
        anchor=ANCHOR,
    )
