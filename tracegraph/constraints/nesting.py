"""The rule `nested-capture` for the place of a call: what a captured function is called in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.core import Tracer

from tracegraph.constraints.frames import locate_caller
from tracegraph.runtime.errors import CaptureError, InternalError
from tracegraph.runtime.stream import is_tracing, traced_name


def make_refusal_error(name: str) -> InternalError:
    """Returns an internal error: a new graph does not take the call that it was made for."""
    return InternalError(
        f"the graph of `{name}` refuses the call that it was captured for",
        where=locate_caller(),
        why="the arguments changed while they were checked, or their type is not what it says",
    )


def check_not_nested(name: str) -> None:
    """Refuses a call inside the capture of another function, in this thread."""
    if not is_tracing():
        return
    raise CaptureError(
        f"`{name}` is called while `{traced_name()}` is being captured",
        where=f"{locate_caller()}, capture of `{traced_name()}`",
        why="a replay inside a capture would run once, now, and never again",
        fix=f"capture the outermost function only, or call `{name}.__wrapped__`",
        anchor="nested-capture",
    )


def check_not_staged(name: str) -> None:
    """Refuses a capture where JAX does not compute: while it traces, or runs nothing compiled."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise CaptureError(
            f"`{name}` is captured while jax.disable_jit is on",
            where=locate_caller(),
            why="a graph is made of compiled programs; with disable_jit JAX compiles nothing",
            fix=f"leave disable_jit out, or call `{name}.__wrapped__` to run it op by op",
            anchor="nested-capture",
        )
    if not isinstance(jnp.zeros(()), Tracer):
        return
    raise CaptureError(
        f"`{name}` is captured while JAX traces another function",
        where=locate_caller(),
        why="a capture compiles, launches and compares values, and there are none while tracing",
        fix=f"call `{name}` outside jit, scan and eval_shape, or call `{name}.__wrapped__` inside",
        anchor="nested-capture",
    )
