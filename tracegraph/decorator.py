"""`capture`: the decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

from tracegraph.graphed_function import GraphedFunction
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.stream import Stream
from tracegraph.user_memory.mem_pool import MemPool


@overload
def capture(fn: Callable[..., Any], **options: Any) -> GraphedFunction: ...
@overload
def capture(fn: None = None, **options: Any) -> Callable[[Callable[..., Any]], GraphedFunction]: ...
def capture(
    fn: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    mode: str = "whole",
    outputs: str = "fresh",
    pool: PoolId | MemPool | None = None,
    stream: Stream | None = None,
    verify: bool = True,
    name: str | None = None,
    **unknown: Any,
) -> Any:
    """Makes a function replayable: captured at its first call, replayed from then on.

    Args:
        fn: takes and returns trees of arrays. Left out, a decorator is returned.
        static_argnums: positions of arguments that are Python values, baked into the graph.
        static_argnames: the same by name.
        donate_argnums: positions of arguments that the call may use up. Their leaves live in the
            graph from then on, and come back as the same objects, updated in place.
        donate_argnames: the same by name.
        mode: ``"whole"`` refuses what a graph cannot hold; ``"partial"`` runs it eagerly between
            two graphs.
        outputs: ``"fresh"`` results keep their value for ever; ``"static"`` ones are the graph's
            own buffers and become stale with the next call.
        pool: share a private pool: another captured function's, from its ``pool()``, that of a
            handle of `tg.graph_pool_handle`, or a `tg.memory.MemPool`.
        stream: the stream that is captured; not the default stream.
        verify: compare the first replay with `jax.jit`.
        name: in reports and errors; by default the function's name.
        **unknown: refused by name.

    Returns:
        The captured function.

    Raises:
        ConfigError: an option is unknown or has a value that is not allowed.

    Example:
        >>> import jax.numpy as jnp
        >>> @capture
        ... def double(x):
        ...     return x * 2
        >>> print(double(jnp.arange(3.0)))
        [0. 2. 4.]
    """
    given = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "mode": mode,
        "outputs": outputs,
        "pool": pool,
        "stream": stream,
        "verify": verify,
        "name": name,
        **unknown,
    }
    if fn is None:
        return functools.partial(_capture, given=given)
    return _capture(fn, given=given)


def _capture(fn: Callable[..., Any], *, given: dict[str, Any]) -> GraphedFunction:
    if not callable(fn):
        raise ConfigError(
            f"capture is given {type(fn).__name__}, not a function",
            where="tg.capture, argument 0 `fn`",
            why="a function is traced to be captured",
            fix="write @tg.capture above the function, or tg.capture(function)",
            anchor="unknown-option",
        )
    return GraphedFunction(fn, given)
