"""`capture`: the decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, ParamSpec, TypeVar, overload

from tracegraph.buckets.bucket_sizes import Buckets
from tracegraph.buckets.bucketed_function import BucketedFunction
from tracegraph.graphed_function import GraphedFunction
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.streams.stream import Stream
from tracegraph.user_memory.mem_pool import MemPool

P = ParamSpec("P")
R = TypeVar("R")


@overload
def capture(
    fn: Callable[P, R],
    *,
    static_argnums: int | Iterable[int] | None = (),
    static_argnames: str | Iterable[str] | None = (),
    donate_argnums: int | Iterable[int] | None = (),
    donate_argnames: str | Iterable[str] | None = (),
    mode: Literal["whole", "partial"] = "whole",
    outputs: Literal["fresh", "static"] = "fresh",
    pool: PoolId | MemPool | None = None,
    stream: Stream | None = None,
    verify: bool = True,
    name: str | None = None,
    static_leaves: Literal["auto", "refuse"] = "auto",
    control_flow: Literal["allow", "refuse"] = "allow",
    prefer: Literal["auto", "graph"] = "auto",
    numerics: Literal["xla", "equivalent"] = "xla",
    buckets: Buckets | None = None,
    debug_nans: bool = False,
    warm: bool = True,
) -> GraphedFunction[P, R]: ...
@overload
def capture(
    fn: None = None,
    *,
    static_argnums: int | Iterable[int] | None = (),
    static_argnames: str | Iterable[str] | None = (),
    donate_argnums: int | Iterable[int] | None = (),
    donate_argnames: str | Iterable[str] | None = (),
    mode: Literal["whole", "partial"] = "whole",
    outputs: Literal["fresh", "static"] = "fresh",
    pool: PoolId | MemPool | None = None,
    stream: Stream | None = None,
    verify: bool = True,
    name: str | None = None,
    static_leaves: Literal["auto", "refuse"] = "auto",
    control_flow: Literal["allow", "refuse"] = "allow",
    prefer: Literal["auto", "graph"] = "auto",
    numerics: Literal["xla", "equivalent"] = "xla",
    buckets: Buckets | None = None,
    debug_nans: bool = False,
    warm: bool = True,
) -> Callable[[Callable[P, R]], GraphedFunction[P, R]]: ...
def capture(
    fn: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Iterable[int] | None = (),
    static_argnames: str | Iterable[str] | None = (),
    donate_argnums: int | Iterable[int] | None = (),
    donate_argnames: str | Iterable[str] | None = (),
    mode: Literal["whole", "partial"] = "whole",
    outputs: Literal["fresh", "static"] = "fresh",
    pool: PoolId | MemPool | None = None,
    stream: Stream | None = None,
    verify: bool = True,
    name: str | None = None,
    static_leaves: Literal["auto", "refuse"] = "auto",
    control_flow: Literal["allow", "refuse"] = "allow",
    prefer: Literal["auto", "graph"] = "auto",
    numerics: Literal["xla", "equivalent"] = "xla",
    buckets: Buckets | None = None,
    debug_nans: bool = False,
    warm: bool = True,
    **unknown: Any,
) -> GraphedFunction[..., Any] | Callable[[Callable[..., Any]], GraphedFunction[..., Any]]:
    """Makes a function replayable: captured at its first call, replayed from then on.

    Use it as a decorator, with options or without, or call it with a function. Each signature
    (shapes, dtypes, trees and static arguments) is captured once. Where an eager `jax.grad` or
    `jax.vjp` differentiates a call, a forward and a backward graph are replayed; in other programs
    of JAX the function is traced.

    Args:
        fn: takes and returns trees of arrays and static leaves. Left out, a decorator is returned.
        static_argnums: positions of arguments that are hashable Python values. They become part of
            the graph: another value is another signature. One position or several.
        static_argnames: the same by name.
        donate_argnums: positions of arguments that the call may use up. Their leaves live in the
            graph from then on, updated in place at fixed addresses. As under `jax.jit`, an array
            that was passed is deleted: use what the call returned. One position or several.
        donate_argnames: the same by name.
        mode: ``"whole"`` raises for what a graph cannot hold; ``"partial"`` runs it eagerly between
            two graphs, and lets Python read values between them: ``if`` on an array, ``.item()``.
        outputs: ``"fresh"`` results keep their value for ever; ``"static"`` ones are the graph's
            own buffers and become stale with the next call.
        pool: a private pool to share: ``pool()`` of another captured function, a
            `tg.graph_pool_handle`, or a `tg.memory.MemPool`. None for a pool of its own.
        stream: the stream that is captured; not the default stream. None for a new one.
        verify: before a new graph is used, compare two replays with XLA's own executables.
        name: in reports and errors; by default the function's name.
        static_leaves: ``"auto"`` makes leaves that are no arrays part of the graph, such as the
            functions and texts of a model: another value, compared with ``==``, is another
            signature. ``"refuse"`` takes arrays and numbers only.
        control_flow: ``"allow"`` takes loops and branches of `jax.lax` whose path depends on data;
            ``"refuse"`` holds every replay to one path, as graphs of PyTorch are held to theirs.
        prefer: in partial mode, what runs where a part is eager: ``"auto"`` the faster one of the
            graph and `jax.jit`, as timed when it is captured; ``"graph"`` always the graph.
        numerics: ``"xla"`` computes what `jax.jit` does, bit for bit; ``"equivalent"`` lets what is
            faster, and as exact, take the place of some of XLA's kernels: docs/numerics.md. Each is
            measured and timed when the function is captured; `explain` lists them.
        buckets: sizes that arguments are padded to, as ``{"x": {0: (1, 2, 4, 8)}}`` for axis 0 of
            the argument ``x``: one graph per size serves every size up to it. What is padded must
            not reach a result, which is checked.
        debug_nans: True checks the results of each replay, which waits for the device. For one with
            a NaN or an infinity the call raises `InvalidFloatError`, which names the first op that
            made it. Nothing is donated meanwhile, and a part that is eager runs once more then.
        warm: True captures at the first call of a signature, which waits for it. False is for
            services: calls run as `jax.jit` while the capture is made in a thread beside, and then
            switch over to the graph; `wait_until_captured` waits for that.
        **unknown: options that do not exist; they raise.

    Returns:
        The captured function: called like the function, with the methods of `tg.GraphedFunction`.
        Without ``fn``, a decorator that returns it.

    Raises:
        ConfigError: an option is unknown or has a value that is not allowed, or ``fn`` cannot be
            called.
        CaptureError: ``stream`` is the default stream.

    Example:
        >>> @tg.capture
        ... def double(x):
        ...     return x * 2
        >>> print(double(jnp.arange(3.0)))
        [0. 2. 4.]

        A train step keeps its state in the graph:

        >>> @tg.capture(donate_argnums=0)
        ... def step(state, x):
        ...     return {"sum": state["sum"] + x}
        >>> state = {"sum": jnp.zeros(2)}
        >>> for _ in range(3):
        ...     state = step(state, jnp.ones(2))
        >>> print(state["sum"])
        [3. 3.]
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
        "static_leaves": static_leaves,
        "control_flow": control_flow,
        "prefer": prefer,
        "numerics": numerics,
        "debug_nans": debug_nans,
        "warm": warm,
        **unknown,
    }
    if buckets is not None:
        given["buckets"] = buckets
    if fn is None:
        return functools.partial(_capture, given=given)
    return _capture(fn, given=given)


def _capture(fn: Callable[P, R], *, given: dict[str, Any]) -> GraphedFunction[P, R]:
    if not callable(fn):
        raise ConfigError(
            f"capture is given {type(fn).__name__}, not a function",
            where="tg.capture, argument 0 `fn`",
            why="a function is traced to be captured",
            fix="write @tg.capture above the function, or tg.capture(function)",
            anchor="unknown-option",
        )
    return (BucketedFunction if "buckets" in given else GraphedFunction)(fn, given)
