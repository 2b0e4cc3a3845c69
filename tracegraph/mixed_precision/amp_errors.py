"""The errors of mixed precision: dtypes, rules and options that are not allowed, scales gone."""

from __future__ import annotations

from typing import Any

from tracegraph.constraints.frames import locate_caller
from tracegraph.runtime.errors import CaptureError, ConfigError, ReplayError

AUTOCAST_ANCHOR = "autocast"
SCALER_ANCHOR = "grad-scaler"


def make_dtype_error(given: Any) -> ConfigError:
    """Returns the error of a dtype that no region computes in."""
    return ConfigError(
        f"autocast is given dtype={given!r}",
        where=f"{locate_caller()}, argument 0 `dtype`",
        why="matmuls and convolutions are computed in bfloat16 or float16",
        fix="tg.amp.autocast(jnp.bfloat16), or autocast(enabled=False) to compute as it is written",
        anchor=AUTOCAST_ANCHOR,
    )


def make_rule_error(key: Any, value: Any) -> ConfigError:
    """Returns the error of a rule for an op that can't have it."""
    return ConfigError(
        f"the rule {key}: {value!r} is not allowed",
        where=f"{locate_caller()}, argument `rules`",
        why="a rule gives one of JAX's primitives, no call or loop, float32, bfloat16, float16, "
        '"keep" or "promote"',
        fix='rules={"dot_general": "keep"}; jax.make_jaxpr(function) prints the names',
        anchor=AUTOCAST_ANCHOR,
    )


def make_rules_error(given: Any) -> ConfigError:
    """Returns the error of rules that are no mapping."""
    return ConfigError(
        f"autocast is given rules={given!r}",
        where=f"{locate_caller()}, argument `rules`",
        why="rules are a mapping of JAX's primitives, or their names, to dtypes",
        fix='rules={"dot_general": "keep"}',
        anchor=AUTOCAST_ANCHOR,
    )


def make_option_error(name: str, value: Any) -> ConfigError:
    """Returns the error of an option of `autocast` that is no bool."""
    return ConfigError(
        f"autocast is given {name}={value!r}",
        where=f"{locate_caller()}, argument `{name}`",
        why="it is True or False",
        fix=f"tg.amp.autocast({name}=False)",
        anchor=AUTOCAST_ANCHOR,
    )


def make_function_error(given: Any) -> ConfigError:
    """Returns the error of what is decorated and cannot be called."""
    return ConfigError(
        f"autocast decorates {type(given).__name__}, not a function",
        where=locate_caller(),
        why="the ops of a function, or of a with-block, are computed in another dtype",
        fix="write @tg.amp.autocast above the function, or with tg.amp.autocast(): around a block",
        anchor=AUTOCAST_ANCHOR,
    )


def make_block_error() -> ConfigError:
    """Returns the error of a block that is left where it was not entered."""
    return ConfigError(
        "a block of autocast is left that this thread has not entered",
        where=locate_caller(),
        why="a region belongs to one thread and ends in the reverse order of its beginning",
        fix="use it as with tg.amp.autocast():, not by __exit__",
        anchor=AUTOCAST_ANCHOR,
    )


_RANGES = {
    "init_scale": "it is a finite number above 0, as 65536.0",
    "growth_factor": "it is a finite number above 1, as 2.0",
    "backoff_factor": "it is a number between 0 and 1, as 0.5",
    "growth_interval": "it is a count of steps, at least 1, as 2000",
    "window": "it is a count of steps, at least 1, as 50",
    "enabled": "it is True or False",
}


def make_scaler_option_error(name: str, value: Any) -> ConfigError:
    """Returns the error of an option of a scaler that is out of range."""
    return ConfigError(
        f"GradScaler is given {name}={value!r}",
        where=f"{locate_caller()}, argument `{name}`",
        why=_RANGES[name],
        fix=f"leave {name} out for its default",
        anchor=SCALER_ANCHOR,
    )


def make_float16_error(path: str) -> ConfigError:
    """Returns the error of gradients of float16."""
    return ConfigError(
        f"the gradient{path} is float16",
        where=f"{locate_caller()}, argument `grads`",
        why="an unscaled gradient would vanish in float16: parameters are kept in float32",
        fix="make the parameters float32, and compute in tg.amp.autocast(jnp.float16)",
        anchor=SCALER_ANCHOR,
    )


def make_gradient_error(path: str, given: Any) -> ConfigError:
    """Returns the error of a gradient that is no array."""
    return ConfigError(
        f"the gradient{path} is a {type(given).__name__}, not an array",
        where=f"{locate_caller()}, argument `grads`",
        why="gradients are divided by the scale",
        fix="pass what jax.grad returned",
        anchor=SCALER_ANCHOR,
    )


def make_found_inf_error(given: Any) -> ConfigError:
    """Returns the error of an update that is not told how the step was."""
    return ConfigError(
        f"found_inf={given!r} is not the result of a step",
        where=f"{locate_caller()}, argument `found_inf`",
        why="the scale falls or grows by whether the gradients were finite",
        fix="pass what scaler.step or scaler.unscale returned",
        anchor=SCALER_ANCHOR,
    )


def make_optimizer_error(given: Any) -> ConfigError:
    """Returns the error of what can make no step."""
    return ConfigError(
        f"GradScaler.step is given {type(given).__name__} that can make no step",
        where=f"{locate_caller()}, argument `optimizer`",
        why="a step is made by an optimizer of optax, or by a function of gradients, state and "
        "parameters that returns parameters and state",
        fix="scaler.step(optax.adam(1e-3), grads, opt_state, params)",
        anchor=SCALER_ANCHOR,
    )


def make_step_error(path: str, wanted: Any, got: Any) -> ConfigError:
    """Returns the error of an optimizer that changes a type."""
    return ConfigError(
        f"the optimizer was given {wanted} and returns {got}",
        where=f"{locate_caller()}, (params, opt_state){path}",
        why="a step that is skipped returns what it was given, so both must be of one type",
        fix="return what was given, with its dtypes and shapes",
        anchor=SCALER_ANCHOR,
    )


def make_state_dict_error(missing: list[str]) -> ConfigError:
    """Returns the error of a state that no enabled scaler has given."""
    return ConfigError(
        f"the state of a GradScaler has no {', '.join(missing)}",
        where=f"{locate_caller()}, argument `state_dict`",
        why="a scaler that is off has no state; one that is on has a scale, factors and a count",
        fix="pass what state_dict() of an enabled scaler returned",
        anchor=SCALER_ANCHOR,
    )


def make_checked_trace_error() -> CaptureError:
    """Returns the error of a check where there are no values."""
    return CaptureError(
        "GradScaler.check() is called while JAX traces",
        where=locate_caller(),
        why="it reads a value, and a step that is captured has none yet",
        fix="call scaler.check() after the step, now and then",
        anchor=SCALER_ANCHOR,
    )


def make_lost_scale_error(skipped: int, scale: float) -> ReplayError:
    """Returns the error of a scaler without a finite step in its window."""
    return ReplayError(
        f"GradScaler has skipped the last {skipped} steps: no gradient was finite",
        where=locate_caller(),
        why=f"the scale has fallen to {scale:.3g}, so it is not what overflows: the loss or a "
        "parameter is not finite itself",
        fix="look for the first NaN with jax.debug_nans(True), or load an earlier checkpoint",
        anchor=SCALER_ANCHOR,
    )
