"""`jax_debug_nans` and `jax_debug_infs`: an invalid result is found op by op, as `jax.jit` does it.

Note [Invalid floats]
JAX checks the results of every program while one of the two settings is on, and of an invalid one
calls the function once more, op by op, to name the op and the user's line. A graph on a GPU is no
program of JAX's, so its results are checked here, after each replay. Both settings are part of a
graph's signature: a graph that is captured without them checks nothing and pays nothing. Donation
is off meanwhile, as in `jax.jit`: the second call needs what the first was given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from tracegraph.constraints.frames import hide_own_frames, locate_error
from tracegraph.jax_internals import InvalidFloatSignal, rerun_op_by_op
from tracegraph.options import Options


def is_checking_floats() -> bool:
    """True while JAX is to raise where a result is NaN or infinite."""
    return _is_checking_nans() or _is_checking_infs()


def adapt_donation(options: Options) -> Options:
    """Returns the options without donation while floats are checked, see Note [Invalid floats]."""
    if not (options.debug_nans or is_checking_floats()):
        return options
    return dataclasses.replace(options, donate_argnums=frozenset(), donate_argnames=frozenset())


def check_results(build: Callable[[], Any], name: str) -> Callable[[], Any]:
    """Returns a function that builds the results of a replay and checks them.

    Args:
        build: returns a tree of arrays.
        name: the captured function's name.
    """

    def build_checked() -> Any:
        results = build()
        for leaf in jax.tree_util.tree_leaves(results):
            _check_floats(leaf, name)
        return results

    return build_checked


def raise_float_error(
    signal: Exception,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> NoReturn:
    """Calls the function op by op, and raises where an op gives an invalid float.

    Args:
        signal: what JAX or `check_results` raised for the results as a whole.
        function: the user's function.
        args: of the call.
        kwargs: of the call.

    Raises:
        FloatingPointError: as `jax.jit` raises it, with a note that names the user's line.
    """
    try:
        rerun_op_by_op(signal, function, args, kwargs)
    except FloatingPointError as error:
        error.add_note(f"  where: {locate_error(error, function)}")
        hide_own_frames(error)
        raise
    raise signal  # JAX's search always raises


def _check_floats(value: Any, name: str) -> None:
    dtype = value.dtype
    if not jax.numpy.issubdtype(dtype, jax.numpy.inexact):
        return
    array = np.asarray(value)
    if _is_checking_nans() and np.isnan(array).any():
        raise InvalidFloatSignal(f"jit({name})", "nan")
    if _is_checking_infs() and np.isinf(array).any():
        raise InvalidFloatSignal(f"jit({name})", "inf")


def _is_checking_nans() -> bool:
    return bool(jax.config.jax_debug_nans)  # pyright: ignore[reportAttributeAccessIssue]


def _is_checking_infs() -> bool:
    return bool(jax.config.jax_debug_infs)  # pyright: ignore[reportAttributeAccessIssue]
