"""The errors of probes."""

from __future__ import annotations

from typing import Any

from tracegraph.constraints.frames import locate_caller
from tracegraph.runtime.errors import CaptureError

ANCHOR = "probe"


def make_name_error(name: Any) -> CaptureError:
    """Returns the error of a name that is no text, or an empty one."""
    return CaptureError(
        f"tg.probe is given {name!r} for a name",
        where=f"{locate_caller()}, argument 0 `name`",
        why="a probe is read by its name: probes()[name]",
        fix='tg.probe("hidden", value)',
        anchor=ANCHOR,
    )


def make_value_error(name: str, leaf: Any) -> CaptureError:
    """Returns the error of a value that holds something that is no array."""
    return CaptureError(
        f"probe {name!r} is given {type(leaf).__name__}, not an array",
        where=f"{locate_caller()}, argument 1 `value`",
        why="a probe keeps what is computed on the device: arrays, or trees of arrays",
        fix="pass the arrays only; what is known while tracing can be printed there",
        anchor=ANCHOR,
    )


def make_twice_error(name: str, first: str, second: str) -> CaptureError:
    """Returns the error of a name that two probes of one function have."""
    return CaptureError(
        f"probe {name!r} is there twice in one captured function",
        where=f"{second}, and before at {first}",
        why="each name stands for one value of a replay",
        fix=f'give each a name of its own, as tg.probe(f"{name}_{{i}}", value)',
        anchor=ANCHOR,
    )


def make_place_error(op: str, where: str, name: str) -> CaptureError:
    """Returns the error of a probe in a function that is not called once, or a known number."""
    return CaptureError(
        f"{f'probe {name!r}' if name else 'a probe'} is inside of `{op}`",
        where=where,
        why="how often a while loop, or whether a branch runs is not known before the replay",
        fix="return the value from it (in a loop: carry it) and probe that; or use jax.lax.scan",
        anchor=ANCHOR,
    )


def make_unrun_error(name: str, where: str) -> CaptureError:
    """Returns the error of a probe in the linear function of a solve that never calls it."""
    return CaptureError(
        f"probe {name!r} is in the `matvec` of `custom_linear_solve`, which is not run",
        where=where,
        why="`solve` computes the result; JAX uses `matvec` for derivatives only, if that",
        fix="probe what `solve` computes, or what custom_linear_solve returns",
        anchor=ANCHOR,
    )


def make_tangent_error(name: str) -> CaptureError:
    """Returns the error of a probe of a value that JAX only transposes."""
    return CaptureError(
        f"probe {name!r} is of a tangent that a backward pass never computes",
        where=locate_caller(),
        why="a gradient transposes the linear part of a function instead of running it",
        fix="probe the primal value, or the gradient that jax.grad returns",
        anchor=ANCHOR,
    )


def make_bucket_error(name: str, where: str) -> CaptureError:
    """Returns the error of a probe in a function with buckets."""
    return CaptureError(
        f"probe {name!r} is in a function with buckets",
        where=where,
        why="a probe would show the padding, too, which is only cut from results",
        fix="return the value, or leave buckets= out while you look at it",
        anchor=ANCHOR,
    )
