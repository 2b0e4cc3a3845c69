"""`make_graphed_callables`: forward and backward graphs of functions and modules, in one pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.constraints.frames import hides_own_frames
from tracegraph.graphed_callables.graph_pair import Recipe
from tracegraph.graphed_callables.making import Making
from tracegraph.graphed_callables.samples import check_samples, check_settings
from tracegraph.jax_internals import eval_trace, run_in
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.user_memory.mem_pool import MemPool


@hides_own_frames
def make_graphed_callables(
    callables: Any,
    sample_args: tuple[Any, ...],
    sample_kwargs: Any = None,
    *,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: PoolId | MemPool | None = None,
) -> Any:
    """Captures a forward and a backward graph of each callable, for eager code around them.

    Eager calls replay graphs, and so do eager `jax.grad`, `jax.value_and_grad` and `jax.vjp`.
    Wherever else JAX is at work (`jax.jit`, `jax.vmap`, `jax.jvp`, a second differentiation), the
    callable itself is called.

    Args:
        callables: a function, a module that is a tree (as those of equinox), or a tuple of them in
            the order of use.
        sample_args: the positional arguments of a call, a tuple; for a tuple of callables a tuple
            of such tuples. Later calls have their shapes, dtypes and trees.
        sample_kwargs: the keyword arguments of a call, a dict; or a tuple of dicts.
        num_warmup_iters: accepted for compatibility; graphs are verified when they are
            captured, and nothing needs a warm-up.
        allow_unused_input: take arguments that no result depends on.
        pool: a private pool to share: ``pool()`` of a captured function, a `tg.graph_pool_handle`,
            or a `tg.memory.MemPool`. None for a new one.

    Returns:
        A `tg.GraphedCallable` for a function, a `tg.GraphedModule` for a module; a tuple of them
        for a tuple.

    Raises:
        CaptureError: a callable cannot be captured, or no result depends on an argument.
        ConfigError: samples and callables do not fit together, or JAX is tracing them.
        VerificationError: a graph differs from its reference.
        OutOfMemoryError: the pool cannot hold the graphs.

    Example:
        >>> def layer(w, x):
        ...     return jnp.tanh(x @ w)
        >>> w, x = jnp.ones((3, 2)), jnp.ones((4, 3))
        >>> graphed = tg.make_graphed_callables(layer, (w, x))
        >>> def loss(w):
        ...     y = graphed(w, x)  # a replay
        ...     return jnp.mean(y**2)  # eager
        >>> value, gradient = jax.value_and_grad(loss)(w)  # the backward graph is replayed
        >>> gradient.shape
        (3, 2)
    """
    is_tuple = type(callables) is tuple
    functions = callables if is_tuple else (callables,)
    samples = sample_args if is_tuple else (sample_args,)
    keywords = sample_kwargs if is_tuple else (sample_kwargs,)
    if sample_kwargs is None:
        keywords = (None,) * len(functions)
    check_samples(functions, samples, keywords)
    check_settings(num_warmup_iters, pool, allow_unused_input)
    recipe = Recipe(FunctionPool(pool.id if isinstance(pool, MemPool) else pool))
    # The samples have values, whatever JAX traces or differentiates around this call.
    with run_in(eval_trace):
        made = _make(functions, samples, keywords, recipe, allow_unused_input=allow_unused_input)
    return made if is_tuple else made[0]


def _make(
    functions: Sequence[Any],
    samples: Sequence[Any],
    keywords: Sequence[Any],
    recipe: Recipe,
    *,
    allow_unused_input: bool,
) -> tuple[Any, ...]:
    makings = [
        Making(function, args, kwargs or {}, recipe)
        for function, args, kwargs in zip(functions, samples, keywords, strict=True)
    ]
    # Forwards in the order of use, then backwards in the opposite order, as they are replayed.
    for making in makings:
        making.capture_forward()
        if not allow_unused_input:
            making.check_used()
    for making in reversed(makings):
        making.capture_backward()
    return tuple(making.result for making in makings)
