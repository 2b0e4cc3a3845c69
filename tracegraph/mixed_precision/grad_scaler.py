"""GradScaler: the scale of a float16 loss, as arrays that go through a captured step.

Note [A scaler is a value]. Nothing in it is changed: `update` returns another one. So the scale is
an argument and a result of a step, like parameters: it is donated and stays in the graph's memory,
and whether a step is skipped is decided there. The host learns of it when it asks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from tracegraph.constraints.frames import hides_own_frames
from tracegraph.constraints.leaf_kinds import is_array
from tracegraph.mixed_precision.amp_errors import (
    make_checked_trace_error,
    make_float16_error,
    make_found_inf_error,
    make_gradient_error,
    make_lost_scale_error,
    make_optimizer_error,
    make_scaler_option_error,
    make_state_dict_error,
    make_step_error,
)

_OPTIONS = ("growth_factor", "backoff_factor", "growth_interval", "enabled", "window")
_ARRAYS = ("_scale", "_growth_tracker", "_skipped")


@jax.tree_util.register_pytree_with_keys_class
class GradScaler:
    """A scale for the loss that keeps the gradients of float16 in range, with PyTorch's names.

    It is a tree of three scalars, and no call changes it: `update` returns the next one. Pass it
    to the captured step and return it, donated or not.

    Args:
        init_scale: the scale to begin with.
        growth_factor: what the scale is multiplied by after ``growth_interval`` finite steps.
        backoff_factor: what it is multiplied by after a step that is not finite.
        growth_interval: finite steps in a row after which the scale grows.
        enabled: False scales nothing and skips nothing.
        window: steps in a row, none of them finite, after which `check` raises.

    Raises:
        ConfigError: an option is out of range.

    Example:
        >>> import jax
        >>> def loss(w, x):
        ...     with tg.amp.autocast(jnp.float16):
        ...         return jnp.mean((x @ w) ** 2)
        >>> @tg.capture(donate_argnums=(0, 1))
        ... def step(w, scaler, x):
        ...     grads = jax.grad(lambda w: scaler.scale(loss(w, x)))(w)
        ...     grads, found_inf = scaler.unscale(grads)
        ...     return jnp.where(found_inf, w, w - 0.1 * grads), scaler.update(found_inf)
        >>> w, scaler = jnp.ones((4, 2)), tg.amp.GradScaler()
        >>> w, scaler = step(w, scaler, jnp.full((8, 4), jnp.inf))
        >>> print(w[0], scaler.get_scale())
        [1. 1.] 32768.0
    """

    _scale: Any
    _growth_tracker: Any
    _skipped: Any

    @hides_own_frames
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        window: int = 50,
    ) -> None:
        _check_option("init_scale", init_scale, _is_number(init_scale) and init_scale > 0)
        self._set_options(growth_factor, backoff_factor, growth_interval, enabled, window)
        self._set_arrays(init_scale, 0, 0)

    def _set_options(
        self,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
        window: int,
    ) -> None:
        is_growing = _is_number(growth_factor) and growth_factor > 1
        _check_option("growth_factor", growth_factor, is_growing)
        is_falling = _is_number(backoff_factor) and 0 < backoff_factor < 1
        _check_option("backoff_factor", backoff_factor, is_falling)
        _check_option("growth_interval", growth_interval, _is_count(growth_interval))
        _check_option("enabled", enabled, isinstance(enabled, bool))
        _check_option("window", window, _is_count(window))
        self._growth_factor, self._backoff_factor = float(growth_factor), float(backoff_factor)
        self._growth_interval, self._enabled, self._window = int(growth_interval), enabled, window

    def _set_arrays(self, scale: Any, growth_tracker: Any, skipped: Any) -> None:
        self._scale = jnp.asarray(scale, jnp.float32)
        self._growth_tracker = jnp.asarray(growth_tracker, jnp.int32)
        self._skipped = jnp.asarray(skipped, jnp.int32)

    # What JAX calls.

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        """Returns the arrays by name, and the options."""
        key = jax.tree_util.GetAttrKey
        arrays = tuple((key(name.lstrip("_")), getattr(self, name)) for name in _ARRAYS)
        return arrays, tuple(getattr(self, f"_{name}") for name in _OPTIONS)

    @classmethod
    def tree_unflatten(cls, options: tuple[Any, ...], arrays: tuple[Any, ...]) -> GradScaler:
        """Returns a scaler of its options and arrays; JAX also puts other things in their place."""
        new = object.__new__(cls)
        for name, value in zip(_OPTIONS, options, strict=True):
            setattr(new, f"_{name}", value)
        for name, value in zip(_ARRAYS, arrays, strict=True):
            setattr(new, name, value)
        return new

    def __repr__(self) -> str:
        if not self._enabled:
            return "<GradScaler off>"
        return f"<GradScaler scale={self._scale} growth_tracker={self._growth_tracker}>"

    # In a step.

    def scale(self, outputs: Any) -> Any:
        """Returns a loss, or a tree of arrays, multiplied by the scale.

        Args:
            outputs: leaves of floats are scaled, at least to float32; others stay as they are.
        """
        if not self._enabled:
            return outputs
        return jax.tree.map(lambda x: x * self._scale if _is_float(x) else x, outputs)

    @hides_own_frames
    def unscale(self, grads: Any) -> tuple[Any, jax.Array]:
        """Returns gradients divided by the scale, and whether one of them is not finite.

        Args:
            grads: a tree of arrays, of the scaled loss. Not of float16: parameters are to be
                float32, and gradients have their dtype.

        Returns:
            The gradients with their dtypes, and a bool of shape (), for `step` and `update`.

        Raises:
            ConfigError: a gradient is of float16, or no array.
        """
        if not self._enabled:
            return grads, jnp.zeros((), bool)
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
            if not is_array(leaf):
                raise make_gradient_error(jax.tree_util.keystr(path), leaf)
            if _is_float(leaf) and jax.typeof(leaf).dtype == jnp.float16:
                raise make_float16_error(jax.tree_util.keystr(path))
        finite = _check_finite([x for x in jax.tree.leaves(grads) if _is_float(x)])
        factor = 1 / self._scale
        unscaled = jax.tree.map(
            lambda x: (x * factor).astype(x.dtype) if _is_float(x) else x, grads
        )
        return unscaled, ~jnp.all(jnp.stack(finite)) if finite else jnp.zeros((), bool)

    @hides_own_frames
    def step(
        self, optimizer: Any, grads: Any, opt_state: Any, params: Any, *, found_inf: Any = None
    ) -> tuple[Any, Any, jax.Array]:
        """Lets an optimizer make a step, or keeps everything as it is if a gradient is not finite.

        Args:
            optimizer: of optax, or a function ``(grads, opt_state, params)`` that returns the next
                parameters and state.
            grads: of the scaled loss; with ``found_inf`` what `unscale` returned, clipped perhaps.
            opt_state: of the optimizer.
            params: a tree of arrays.
            found_inf: of `unscale`, if it was called already.

        Returns:
            Parameters, state of the optimizer, and ``found_inf``. Parameters and state of a step
            that is skipped keep their bits.

        Raises:
            ConfigError: there is no such optimizer, it returns other types than it was given, or a
                gradient is of float16.

        Example:
            >>> scaler = tg.amp.GradScaler(128.0)
            >>> def sgd(grads, opt_state, params):
            ...     return params - grads, opt_state + 1
            >>> params, count, found_inf = scaler.step(sgd, jnp.ones(2), jnp.int32(0), jnp.ones(2))
            >>> print(params, count, found_inf)
            [0.9921875 0.9921875] 1 False
        """
        if found_inf is None:
            grads, found_inf = self.unscale(grads)
        new = _choose_update(optimizer)(grads, opt_state, params)
        if not (isinstance(new, tuple) and len(new) == 2):
            raise make_optimizer_error(optimizer)
        if self._enabled:
            old = (params, opt_state)
            _check_types(old, new)
            new = jax.tree.map(lambda a, b: _select(found_inf, a, b), old, new)
        return (*new, found_inf)

    @hides_own_frames
    def update(self, found_inf: Any, new_scale: Any = None) -> GradScaler:
        """Returns the scaler for the next step: the scale falls, grows, or stays.

        Args:
            found_inf: of `step` or `unscale`; of several optimizers a tree of them.
            new_scale: a scale to take instead, a number or an array of shape ().

        Raises:
            ConfigError: ``found_inf`` is empty, or not of arrays.
        """
        if not self._enabled:
            return self
        found = jax.tree.leaves(found_inf)
        if not found or not all(map(is_array, found)):
            raise make_found_inf_error(found_inf)
        skips = jnp.any(jnp.stack([jnp.asarray(each, bool) for each in found]))
        steps = self._growth_tracker + 1
        is_due = steps >= self._growth_interval
        larger = self._scale * np.float32(self._growth_factor)
        kept = jnp.where(is_due & jnp.isfinite(larger), larger, self._scale)
        scale = jnp.where(skips, self._scale * np.float32(self._backoff_factor), kept)
        new = self._copy()
        new._set_arrays(
            scale if new_scale is None else new_scale,
            jnp.where(skips | is_due, 0, steps),
            jnp.where(skips, self._skipped + 1, 0),
        )
        return new

    # On the host.

    @hides_own_frames
    def check(self) -> None:
        """Raises if no step of the last ``window`` ones was finite. It waits for the device.

        Raises:
            ReplayError: all of them were skipped.
            CaptureError: it is called while JAX traces.
        """
        if not self._enabled:
            return
        if isinstance(self._skipped, jax.core.Tracer):
            raise make_checked_trace_error()
        skipped = int(self._skipped)
        if skipped >= self._window:
            raise make_lost_scale_error(skipped, float(self._scale))

    def get_scale(self) -> jax.Array:
        """Returns the scale, a float32 of shape (), without waiting; 1 if the scaler is off."""
        return self._scale if self._enabled else jnp.ones((), jnp.float32)

    def get_growth_factor(self) -> float:
        """Returns what the scale is multiplied by when it grows."""
        return self._growth_factor

    def get_backoff_factor(self) -> float:
        """Returns what the scale is multiplied by after a step that is not finite."""
        return self._backoff_factor

    def get_growth_interval(self) -> int:
        """Returns after how many finite steps in a row the scale grows."""
        return self._growth_interval

    def is_enabled(self) -> bool:
        """Returns whether anything is scaled."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as numbers, with the keys of PyTorch's; it waits for the device.

        Example:
            >>> tg.amp.GradScaler(128.0).state_dict()["scale"]
            128.0
        """
        if not self._enabled:
            return {}
        return {
            "scale": float(self._scale),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": int(self._growth_tracker),
            "_skipped": int(self._skipped),
        }

    @hides_own_frames
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> GradScaler:
        """Returns a scaler with a state that `state_dict` of it, or of PyTorch's, has returned.

        Args:
            state_dict: of an enabled scaler.

        Raises:
            ConfigError: something is missing in it, or out of range.

        Example:
            >>> scaler = tg.amp.GradScaler().load_state_dict(tg.amp.GradScaler(128.0).state_dict())
            >>> print(scaler.get_scale())
            128.0
        """
        if not self._enabled:
            return self
        wanted = ("scale", *_OPTIONS[:3], "_growth_tracker")
        known = state_dict if isinstance(state_dict, Mapping) else {}
        missing = [name for name in wanted if name not in known]
        if missing:
            raise make_state_dict_error(missing)
        options = {name: state_dict[name] for name in _OPTIONS[:3]}
        new = GradScaler(state_dict["scale"], **options, window=self._window)
        new._set_arrays(new._scale, state_dict["_growth_tracker"], state_dict.get("_skipped", 0))
        return new

    def _copy(self) -> GradScaler:
        return jax.tree.map(lambda x: x, self)


def _choose_update(optimizer: Any) -> Callable[..., Any]:
    update = getattr(optimizer, "update", None)
    if callable(update) and hasattr(optimizer, "init"):
        return lambda *args: _update_by_optax(update, *args)
    if not callable(optimizer):
        raise make_optimizer_error(optimizer)
    return optimizer


def _update_by_optax(
    update: Callable[..., Any], grads: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    updates, opt_state = update(grads, opt_state, params)
    # Updates are added as `optax.apply_updates` does, without importing it.
    return jax.tree.map(lambda p, u: jnp.asarray(p + u).astype(p.dtype), params, updates), opt_state


def _check_types(old: Any, new: Any) -> None:
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise make_step_error("", jax.tree.structure(old), jax.tree.structure(new))
    pairs = zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
    for (path, before), after in pairs:
        types = [(jax.typeof(leaf).shape, jax.typeof(leaf).dtype) for leaf in (before, after)]
        if types[0] != types[1]:
            raise make_step_error(jax.tree_util.keystr(path), jax.typeof(before), jax.typeof(after))


def _select(skips: Any, old: Any, new: Any) -> jax.Array:
    return lax.select(skips, jnp.asarray(old), jnp.asarray(new))


def _check_finite(leaves: Sequence[Any]) -> list[jax.Array]:
    """Returns whether all is finite, by type of array: layers that are alike share a kernel."""
    groups: dict[Any, list[jax.Array]] = {}
    for leaf in leaves:
        groups.setdefault(jax.typeof(leaf), []).append(jnp.isfinite(leaf))
    return [jnp.all(functools.reduce(jnp.logical_and, group)) for group in groups.values()]


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jax.typeof(leaf).dtype, jnp.floating)


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return is_real and math.isfinite(float(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1


def _check_option(name: str, value: Any, is_allowed: bool) -> None:
    if not is_allowed:
        raise make_scaler_option_error(name, value)
