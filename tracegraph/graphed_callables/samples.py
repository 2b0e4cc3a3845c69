"""Checks what `tg.make_graphed_callables` is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.core import Tracer

from tracegraph.graphed_callables.callable_errors import make_samples_error
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.user_memory.mem_pool import MemPool


def check_samples(functions: tuple[Any, ...], samples: Any, keywords: Any) -> None:
    """Checks that there is a callable, a tuple of arguments and a dict for each.

    Args:
        functions: what is graphed.
        samples: their positional arguments.
        keywords: their keyword arguments, None for none.

    Raises:
        ConfigError: they do not fit together, or JAX is tracing one of them.
    """
    for index, function in enumerate(functions):
        if not callable(function):
            raise make_samples_error(
                f"callable {index} is {type(function).__name__}, not a function or a module",
                "a function is traced to be captured",
                "pass a function, a module, or a tuple of them",
            )
    for keyword, given in (("sample_args", samples), ("sample_kwargs", keywords)):
        if not isinstance(given, tuple | list) or len(given) != len(functions):
            count = len(given) if isinstance(given, tuple | list) else type(given).__name__
            raise make_samples_error(
                f"{len(functions)} callables are given, and {keyword} for {count}",
                "each callable is captured for the arguments of its own sample",
                f"pass {keyword}=(first, second, ...), one for each callable",
            )
    for index, (args, kwargs) in enumerate(zip(samples, keywords, strict=True)):
        if not isinstance(args, tuple | list):
            raise make_samples_error(
                f"sample_args of callable {index} is {type(args).__name__}, not a tuple",
                "a sample is the tuple of a call's positional arguments",
                "write sample_args=(x,) with the comma, even for one argument",
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise make_samples_error(
                f"sample_kwargs of callable {index} is {type(kwargs).__name__}, not a dict",
                "a sample's keyword arguments are given by name",
                "write sample_kwargs={'name': value}",
            )
        leaves = jax.tree.leaves((functions[index], args, kwargs))
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise make_samples_error(
                f"callable {index} or its sample is being traced or differentiated by JAX",
                "graphs are captured and verified with values, which it has not yet",
                "make graphed callables before the function that is traced or differentiated, and "
                "call them in it",
            )
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise make_samples_error(
                f"the sample of callable {index} has a jax.ShapeDtypeStruct, not an array",
                "graphs are captured and verified with values",
                "pass an array of that type, as jnp.zeros(type.shape, type.dtype)",
            )


def check_settings(num_warmup_iters: Any, pool: Any, allow_unused_input: Any) -> None:
    """Checks the options.

    Raises:
        ConfigError: one has a value that is not allowed.
    """
    if type(num_warmup_iters) is not int or num_warmup_iters < 0:
        raise make_samples_error(
            f"num_warmup_iters={num_warmup_iters!r} is not a count",
            "it is accepted for compatibility; nothing is warmed up",
            "leave it out",
        )
    if not isinstance(allow_unused_input, bool):
        raise make_samples_error(
            f"allow_unused_input={allow_unused_input!r} is unknown",
            "it is True or False",
            "pass allow_unused_input=True, or leave it out",
        )
    if pool is not None and not isinstance(pool, PoolId | MemPool):
        raise make_samples_error(
            f"pool= is {type(pool).__name__}, not a pool",
            "a pool is what `pool()` of a captured function, `tg.graph_pool_handle()` and "
            "`tg.memory.MemPool()` give",
            "pass one of these, or leave pool= out",
        )
