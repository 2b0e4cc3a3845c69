"""Inner calls: a captured function that JAX traces becomes a part of the program around it.

Note [Inner calls]. While JAX traces, a call of a captured function is what a call of `jax.jit` of
it would be: `jit`, `grad`, `vmap`, `scan` see one call of a traced function. Donation is ignored
there, as `jit` ignores it, since the buffers belong to the outermost program.

JAX keeps what it traced by the function and the types. Inside the capture of another function that
would hide things: an inner function that was traced under `jit` has left no marks of its streams,
one that was traced for another capture names the streams of that one, and Python work that changes
would be seen once instead of twice. So inside a capture the inner function is traced anew, once for
each trace of the outer one and each stream that it is called on. The passes inline it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from tracegraph.options import Options
from tracegraph.runtime.stream import current_stream, read_trace_memo


class InnerCall:
    """Calls a captured function by way of `jax.jit`, for where JAX traces or computes op by op.

    Args:
        function: the user's function.
        options: of its capture; the static arguments are the same here.
    """

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._function = function
        self._static = {
            "static_argnums": tuple(sorted(options.static_argnums)),
            "static_argnames": tuple(sorted(options.static_argnames)),
        }

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function, traced as Note [Inner calls] says."""
        memo = read_trace_memo()
        if memo is None:
            return self.jitted(*args, **kwargs)
        key = (self, current_stream().number)
        if key not in memo:
            memo[key] = self._jit(_make_new(self._function))
        return memo[key](*args, **kwargs)

    # Most captured functions are never traced.
    @functools.cached_property
    def jitted(self) -> Any:
        """`jax.jit` of the function."""
        return self._jit(self._function)

    def clear(self) -> None:
        """Drops what JAX traced and compiled of it."""
        if "jitted" in vars(self):
            self.jitted.clear_cache()

    def _jit(self, function: Callable[..., Any]) -> Any:
        return jax.jit(function, **self._static)


def _make_new(function: Callable[..., Any]) -> Callable[..., Any]:
    # JAX finds what it has traced by the identity of the function.
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run
