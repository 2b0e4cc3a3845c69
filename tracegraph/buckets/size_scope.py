"""`tg.bucket_size`: the true size of a bucketed argument, inside of the captured function."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

from tracegraph.buckets.bucket_sizes import BucketSizes
from tracegraph.buckets.errors import make_scope_error

_bound: contextvars.ContextVar[tuple[BucketSizes, Mapping[str, Any]] | None] = (
    contextvars.ContextVar("tracegraph_bucket_sizes", default=None)
)


def bucket_size(argument: str | int | None = None, axis: int | None = None) -> Any:
    """Returns the true size of an argument with buckets: an ``int32`` scalar, traced in a capture.

    Args:
        argument: name or position of the argument, or the name of the size. It may be left out
            where the function has one size.
        axis: which of its bucketed axes. It may be left out where it has one size.

    Returns:
        The size that the argument had before it was padded.

    Raises:
        CaptureError: it is called outside of a function with buckets, or names no size.

    Example:
        >>> @tg.capture(buckets={"x": {0: (4, 8)}})
        ... def mean(x):
        ...     size = tg.bucket_size()
        ...     return jnp.sum(jnp.where(jnp.arange(x.shape[0]) < size, x, 0)) / size
        >>> print(mean(jnp.array([1.0, 2.0, 6.0])))
        3.0
    """
    bound = _bound.get()
    if bound is None:
        raise make_scope_error("", ())
    sizes, values = bound
    if isinstance(argument, int):
        argument = sizes.name_position(argument)
    names = {
        each.size
        for each in sizes.axes
        if argument in (None, each.argument, each.size) and axis in (None, each.axis)
    }
    if len(names) != 1:
        wanted = ", ".join(repr(each) for each in (argument, axis) if each is not None)
        raise make_scope_error(wanted, [str(each) for each in sizes.axes])
    return values[names.pop()]


@contextlib.contextmanager
def binding_sizes(sizes: BucketSizes, values: Mapping[str, Any]) -> Iterator[None]:
    """Makes the true sizes of a call known to `bucket_size`.

    Args:
        sizes: of the function.
        values: a scalar for each size, by name.
    """
    token = _bound.set((sizes, values))
    try:
        yield
    finally:
        _bound.reset(token)
