"""The errors of graphed callables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegraph.constraints.frames import locate_caller, locate_function
from tracegraph.replaying.mismatch_error import make_mismatch_error
from tracegraph.runtime.errors import CaptureError, ConfigError, ReplayError, shorten_list
from tracegraph.tracing.call_spec import make_call_spec
from tracegraph.tracing.prepared_call import PreparedCall


def make_signature_error(sample: PreparedCall, found: PreparedCall) -> ReplayError:
    """Returns the error of a call that is not like the sample: what differs, side by side."""
    return make_mismatch_error(
        make_call_spec(sample),
        found,
        other_way="make another graphed callable with samples like these",
    )


def make_unused_error(function: Any, name: str, arguments: Sequence[str]) -> CaptureError:
    """Returns the error of arguments that no result depends on."""
    listed = ", ".join(shorten_list([f"`{each}`" for each in arguments]))
    return CaptureError(
        f"no result of `{name}` depends on {listed}",
        where=f"{locate_function(function)}, sample_args",
        why="the backward graph would compute a gradient of zeros for it at every call",
        fix="leave the argument out, or pass allow_unused_input=True",
        anchor="graphed-callable",
    )


def make_structure_error(function: Any) -> CaptureError:
    """Returns the error of a function that changes the structure of an object."""
    return CaptureError(
        "a module's attributes are others after the call than before it",
        where=locate_function(function),
        why="a graph updates the arrays of a module; new attributes are no work of a device",
        fix="make all Variables in the module's constructor, and switch modes before the call",
        anchor="graphed-callable",
    )


def make_samples_error(what: str, why: str, fix: str) -> ConfigError:
    """Returns the error of arguments of `tg.make_graphed_callables` that do not fit together."""
    return ConfigError(
        what,
        where=f"{locate_caller()}, tg.make_graphed_callables",
        why=why,
        fix=fix,
        anchor="graphed-callable",
    )
