"""`tg.probe`: names a value inside of a captured function, so that it can be read after a replay.

Note [Probes]. In a capture, `probe` binds a primitive that passes its operands on. It has an effect
of JAX's, so that no rewrite of JAX's drops it where its result is not used. Before the graph is
made, `tracegraph/probing/collect_probes.py` turns each into results of the function, so that no
later stage knows of it. Outside of a capture nothing is bound.

JAX keeps the traces of nested `jax.jit` functions, and a trace from outside of a capture has no
probes. So from the first probe of the process on, captures are traced under a setting of their own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from tracegraph.jax_internals import allow_effect, make_effect, make_primitive, make_setting
from tracegraph.probing.probe_errors import make_name_error, make_tangent_error, make_value_error

T = TypeVar("T")

_effect = make_effect("tg_probe")
allow_effect(type(_effect))
_setting = make_setting("tg.probe", False)


class _Traces(threading.local):
    # Whether this thread traces a function for capture.
    is_tracing = False
    was_missed = False


class _Seen:
    # Set by the first probe of the process, for good.
    is_used = False


_traces = _Traces()


def probe(name: str, value: T) -> T:
    """Keeps a value of a captured function readable after each replay; changes nothing else.

    Read it with ``probes()`` of the captured function. In `jax.lax.scan` the values of all
    iterations are kept, stacked; under `jax.vmap` those of the whole batch, the batch axis first.
    Outside of a capture the value is only returned.

    Args:
        name: under which it is read; each is used once in a captured function.
        value: an array, or a tree of arrays.

    Returns:
        The value.

    Raises:
        CaptureError: the name is no text, or the value is no tree of arrays; when the function has
            been traced: a name is used twice, or a probe is in a while loop or in a branch.

    Example:
        >>> @tg.capture
        ... def step(x):
        ...     h = tg.probe("hidden", x * 2)
        ...     return h.sum()
        >>> print(step(jnp.arange(3.0)), step.probes()["hidden"])
        6.0 [0. 2. 4.]
    """
    _Seen.is_used = True
    if not _traces.is_tracing:
        return value
    if not isinstance(name, str) or not name:
        raise make_name_error(name)
    leaves, tree = jax.tree.flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, (jax.Array, bool, int, float, complex)) and not hasattr(
            leaf, "dtype"
        ):
            raise make_value_error(name, leaf)
    if not _setting.value:
        _traces.was_missed = True
        return value
    return jax.tree.unflatten(tree, probe_p.bind(*leaves, name=name, tree=tree))


@contextlib.contextmanager
def watching_probes() -> Iterator[_Traces]:
    """Says that this thread traces a function for capture; gives what was seen meanwhile."""
    before = _traces.is_tracing, _traces.was_missed
    _traces.is_tracing, _traces.was_missed = True, False
    try:
        yield _traces
    finally:
        _traces.is_tracing, _traces.was_missed = before


def has_probes_anywhere() -> bool:
    """True once this process has called `probe`."""
    return _Seen.is_used


@contextlib.contextmanager
def binding_probes() -> Iterator[None]:
    """Makes JAX trace under the setting in which probes are bound, see Note [Probes]."""
    before = _setting.swap_local(True)
    try:
        yield
    finally:
        _setting.set_local(before)


def has_probes(jaxpr: Any) -> bool:
    """True for a jaxpr, closed or open, with a probe in it or in one of its functions."""
    return _effect in jaxpr.effects


probe_p = make_primitive("tg_probe")


@probe_p.def_effectful_abstract_eval
def _find_types(*avals: Any, **_params: Any) -> tuple[list[Any], set[Any]]:
    return list(avals), {_effect}


@probe_p.def_impl
def _pass_on(*values: Any, **_params: Any) -> list[Any]:
    return list(values)


def _differentiate(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    return probe_p.bind(*primals, **params), list(tangents)


def _map(operands: Any, axes: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    is_mapped = [axis is not None for axis in axes]
    moved = [
        jnp.moveaxis(operand, axis, 0) if is_one else operand
        for operand, axis, is_one in zip(operands, axes, is_mapped, strict=True)
    ]
    results = probe_p.bind(*moved, **params)
    return results, [0 if is_one else None for is_one in is_mapped]


def _transpose(_cotangents: Any, *_operands: Any, name: str, **_params: Any) -> Any:
    raise make_tangent_error(name)


ad.primitive_jvps[probe_p] = _differentiate
ad.primitive_transposes[probe_p] = _transpose
batching.primitive_batchers[probe_p] = _map
mlir.register_lowering(probe_p, lambda _context, *operands, **_params: list(operands))
