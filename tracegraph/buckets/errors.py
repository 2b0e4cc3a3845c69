"""The errors of shape buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tracegraph.constraints.frames import locate_caller, locate_function
from tracegraph.runtime.errors import CaptureError, ConfigError


def make_option_error(function: Callable[..., Any], what: str, why: str) -> ConfigError:
    """Returns the error of an option `buckets` that is not understood."""
    return ConfigError(
        what,
        where=f"{locate_function(function)}, tg.capture, option `buckets`",
        why=why,
        fix="write buckets={'argument': {axis: (1, 2, 4, 8)}}",
        anchor="buckets",
    )


def make_size_error(label: str, size: int, sizes: Sequence[int]) -> CaptureError:
    """Returns the error of an argument that no bucket holds."""
    if size > sizes[-1]:
        what = (
            f"{label} is {size}, and the largest bucket is {sizes[-1]}: smaller than its argument"
        )
        why = "an argument is padded to a bucket, never cut"
        fix = f"add a bucket of {size} or more, or call with at most {sizes[-1]} at a time"
    else:
        what, why = f"{label} is {size}", "of an empty argument nothing is computed"
        fix = "skip the call when there is nothing in it"
    return CaptureError(what, where=locate_caller(), why=why, fix=fix, anchor="bucket-size")


def make_unequal_error(first: str, size: int, second: str, other: int) -> CaptureError:
    """Returns the error of two arguments that share buckets and differ in size."""
    return CaptureError(
        f"{first} is {size} and {second} is {other}, with the same buckets",
        where=locate_caller(),
        why="axes with the same buckets are one size, which a call pads to one bucket",
        fix="pass the same size, or name the sizes apart: {axis: {'rows': (1, 2, 4)}}",
        anchor="bucket-size",
    )


def make_leaf_error(label: str, found: str) -> CaptureError:
    """Returns the error of a leaf that has no such axis."""
    return CaptureError(
        f"{label} is {found}",
        where=locate_caller(),
        why="each leaf of an argument with buckets is padded on that axis",
        fix="pass arrays that have the axis, or give buckets to those arguments only that do",
        anchor="bucket-size",
    )


def make_missing_error(name: str) -> CaptureError:
    """Returns the error of a call without an argument that has buckets."""
    return CaptureError(
        f"argument `{name}`, which has buckets, is not given",
        where=locate_caller(),
        why="the bucket of a call is that of its argument",
        fix=f"pass `{name}`",
        anchor="bucket-size",
    )


def make_objects_error(name: str) -> CaptureError:
    """Returns the error of a call with objects of nnx."""
    return CaptureError(
        f"`{name}` has buckets and is called with an object of flax.nnx",
        where=locate_caller(),
        why="graphs of several sizes cannot hold the state of one object",
        fix="split the object with nnx.split, and pass its state as an argument",
        anchor="bucket-size",
    )


def make_scope_error(wanted: str, known: Sequence[str]) -> CaptureError:
    """Returns the error of `bucket_size` without such a size."""
    if not known:
        what = "tg.bucket_size() is called where there is no bucket"
        why = "it is the true size of an argument of a function with buckets, while that runs"
        fix = "call it inside of a function captured with buckets=, by way of the captured function"
    else:
        what = f"tg.bucket_size({wanted}) does not name one size"
        why = f"the sizes are {', '.join(known)}"
        fix = "name the argument, and the axis if it has several"
    return CaptureError(what, where=locate_caller(), why=why, fix=fix, anchor="bucket-size")
