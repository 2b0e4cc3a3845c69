"""`autocast`: a decorator and a with-block whose matmuls and convolutions compute in 16 bits."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import jax.numpy as jnp

from tracegraph.constraints.frames import hides_own_frames
from tracegraph.mixed_precision.amp_errors import (
    make_block_error,
    make_function_error,
    make_option_error,
)
from tracegraph.mixed_precision.cast_rules import make_rules, read_dtype
from tracegraph.mixed_precision.region_trace import enter_region

F = TypeVar("F", bound=Callable[..., Any])


class Autocast:
    """A region: a context manager, entered as often as one likes, and a decorator.

    Args:
        dtype: of matmuls and convolutions.
        enabled: False computes everything as it is written, in an outer region too.
        cache_enabled: a value is cast once while the region lasts.
        rules: changes to the table.
    """

    def __init__(
        self, dtype: Any, enabled: bool, cache_enabled: bool, rules: Mapping[Any, Any] | None
    ) -> None:
        for name, value in (("enabled", enabled), ("cache_enabled", cache_enabled)):
            if not isinstance(value, bool):
                raise make_option_error(name, value)
        checked = make_rules(dtype, rules, caches=cache_enabled)
        self._rules = checked if enabled else None
        self._entered = threading.local()

    def __repr__(self) -> str:
        return f"<autocast {self._rules.dtype}>" if self._rules else "<autocast off>"

    def __enter__(self) -> Autocast:
        stack = contextlib.ExitStack()
        stack.enter_context(enter_region(self._rules))
        vars(self._entered).setdefault("stacks", []).append(stack)
        return self

    @hides_own_frames
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stacks = vars(self._entered).get("stacks")
        if not stacks:
            raise make_block_error()
        stacks.pop().__exit__(kind, error, traceback)

    @hides_own_frames
    def __call__(self, function: F) -> F:
        """Returns a function that computes in the region.

        Raises:
            ConfigError: it cannot be called.
        """
        if not callable(function):
            raise make_function_error(function)
        rules = self._rules

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with enter_region(rules):
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]


@hides_own_frames
def autocast(
    dtype: Any = jnp.bfloat16,
    enabled: bool = True,
    cache_enabled: bool = True,
    rules: Mapping[Any, Any] | None = None,
) -> Any:
    """Computes matmuls and convolutions of float32 in 16 bits: a decorator or a with-block.

    Their operands are rounded, and so are their results, which keep the dtype that they have
    without it. Sums, exponentials and the like of 16-bit values are computed in float32. It works
    in eager code, in `tg.capture`, in `jax.jit`, and inside or around derivatives.

    Args:
        dtype: ``bfloat16`` or ``float16``. A function in its place is decorated.
        enabled: False computes everything as it is written, in an outer region too.
        cache_enabled: a value is cast once while the region lasts, and not at each use.
        rules: by primitive of JAX or its name, what differs from the table: a dtype to compute in,
            ``"keep"`` for the dtype as it is, ``"promote"`` for the widest one of the operands.

    Returns:
        The region, or the decorated function.

    Raises:
        ConfigError: a dtype, an option or a rule is not allowed.

    Example:
        >>> import jax
        >>> @tg.capture
        ... @tg.amp.autocast
        ... def layer(w, x):
        ...     return x @ w
        >>> y = layer(jnp.ones((4, 2)), jnp.full((1, 4), 1.001))
        >>> print(y, y.dtype)
        [[4. 4.]] float32
        >>> with tg.amp.autocast(jnp.float16):
        ...     print((jnp.ones((1, 4)) @ jnp.full((4, 1), 1.0004)).item())
        4.0
    """
    if callable(dtype) and read_dtype(dtype) is None:
        return Autocast(jnp.bfloat16, enabled, cache_enabled, rules)(dtype)
    return Autocast(dtype, enabled, cache_enabled, rules)
