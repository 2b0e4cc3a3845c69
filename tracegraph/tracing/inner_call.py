"""Inner calls: a captured function that JAX traces becomes a part of the program around it.

Note [Inner calls]. While JAX traces, a call of a captured function is what a call of `jax.jit` of
it would be: `jit`, `grad`, `vmap`, `scan` see one call of a traced function. Donation is ignored
there, as `jit` ignores it, since the buffers belong to the outermost program. An eager `grad` sees
two graphs where that is right, see Note [Differentiated calls].

JAX keeps what it traced by the function and the types. Inside the capture of another function that
would hide things: an inner function that was traced under `jit` has left no marks of its streams,
one that was traced for another capture names the streams of that one, and Python work that changes
would be seen once instead of twice. So inside a capture the inner function is traced anew, once for
each trace of the outer one and each stream that it is called on. The passes inline it.

A function that draws keys draws them at each call, as a part of what is around it. That it does so
shows in a trace of its own, which is given up. Each kind of call is remembered, so that later ones
need no such trace. A kind that draws no more is called all the same, which is right and slower.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax

from tracegraph.jax_internals import drop_open_trace
from tracegraph.options import Options
from tracegraph.randomness.draws import UnboundDraws, noting
from tracegraph.randomness.errors import TracedDrawError
from tracegraph.runtime.streams.stream import current_stream
from tracegraph.runtime.streams.stream_capture import read_trace_memo
from tracegraph.tracing.static_leaves import wrap_static_leaves

# Of calls that draw keys; as many as a captured function keeps signatures.
_MAX_KINDS = 64


class InnerCall:
    """Calls a captured function by way of `jax.jit`, for where JAX traces or computes op by op.

    Args:
        function: the user's function.
        options: of its capture; the static arguments are the same here.
    """

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._function, self._options = function, options
        # The kinds of calls that draw keys, as they were found.
        self._drawing: collections.OrderedDict[Any, None] = collections.OrderedDict()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function, traced as Note [Inner calls] says."""
        wrapped, named = self._wrap(args, kwargs)
        if self._drawing and self._find_kind(wrapped, named) in self._drawing:
            return self._function(*args, **kwargs)
        memo = read_trace_memo()
        key = (self, current_stream().number)
        if memo is not None and key not in memo:
            memo[key] = self._jit()
        jitted = self._jitted if memo is None else memo[key]
        # A function that draws keys may do so as a part of what is around it, not in its own trace.
        with contextlib.suppress(TracedDrawError):
            return jitted(*wrapped, **named)
        kind = self._find_kind(wrapped, named)
        if kind is not None:
            self._drawing[kind] = None
        if len(self._drawing) > _MAX_KINDS:
            self._drawing.popitem(last=False)
        return self._function(*args, **kwargs)

    def eval_shape(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the types of the results of a call."""
        args, kwargs = self._wrap(args, kwargs)
        with contextlib.suppress(TracedDrawError):
            return self._jitted.eval_shape(*args, **kwargs)
        # A trace of its own, which is dropped: it has keys that no program may have.
        with noting(UnboundDraws(self._options.name)):
            return self._jit().eval_shape(*args, **kwargs)

    def clear(self) -> None:
        """Drops what JAX traced and compiled of it, and which calls draw keys."""
        self._drawing.clear()
        if "_jitted" in vars(self):
            self._jitted.clear_cache()

    # Most captured functions are never traced.
    @functools.cached_property
    def _jitted(self) -> Any:
        return self._jit()

    def _jit(self) -> Any:
        return jax.jit(
            _make_new(self._function, takes_static_leaves=self._options.takes_static_leaves),
            static_argnums=tuple(sorted(self._options.static_argnums)),
            static_argnames=tuple(sorted(self._options.static_argnames)),
        )

    def _find_kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns static arguments and types of a call; None if they cannot be compared."""
        positions, names = self._options.static_argnums, self._options.static_argnames
        static = [value for position, value in enumerate(args) if position in positions]
        named = tuple((key, value) for key, value in kwargs.items() if key in names)
        values = [value for position, value in enumerate(args) if position not in positions]
        rest = {key: value for key, value in kwargs.items() if key not in names}
        leaves, tree = jax.tree.flatten((values, rest))
        try:
            kind = (tree, *map(jax.typeof, leaves), *static, named)
            hash(kind)
        except TypeError:
            return None
        return kind

    def _wrap(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the call with a node for each static leaf of the dynamic arguments."""
        if not self._options.takes_static_leaves:
            return args, kwargs
        positions, names = self._options.static_argnums, self._options.static_argnames
        wrapped = [
            value if position in positions else wrap_static_leaves(value)
            for position, value in enumerate(args)
        ]
        named = {k: v if k in names else wrap_static_leaves(v) for k, v in kwargs.items()}
        return tuple(wrapped), named


def _make_new(function: Callable[..., Any], *, takes_static_leaves: bool) -> Callable[..., Any]:
    # JAX finds what it has traced by the identity of the function.
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except BaseException:
            drop_open_trace()
            raise
        return wrap_static_leaves(result) if takes_static_leaves else result

    return run
