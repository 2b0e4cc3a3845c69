"""The errors of generators: what is asked for in the wrong place, and states that are none."""

from __future__ import annotations

from typing import Any

from tracegraph.constraints.frames import locate_caller
from tracegraph.runtime.errors import CaptureError, ConfigError

ANCHOR = "random"


class TracedDrawError(CaptureError):
    """A key is drawn where JAX would keep it for all calls; see `InnerCall`, which handles it."""


def make_traced_draw_error() -> TracedDrawError:
    """Returns the error of a draw inside of a function that JAX traces on its own."""
    return TracedDrawError(
        "next_key() is called in a function that JAX traces on its own (jit, scan, checkpoint ...)",
        where=locate_caller(),
        why="JAX would run it once and use the same key in every call, or in every iteration",
        fix="draw the key outside and pass it as an argument; in a loop `jax.random.split` it",
        anchor=ANCHOR,
    )


def make_two_captures_error(other: str) -> CaptureError:
    """Returns the error of a generator that two threads trace at once."""
    return CaptureError(
        f"a generator is drawn from here while another thread captures `{other}` with it",
        where=locate_caller(),
        why="how many keys come before those of a capture is not known until the other one ends",
        fix="capture one after the other, or give each thread a tg.random.Generator of its own",
        anchor=ANCHOR,
    )


def make_state_in_capture_error(call: str) -> CaptureError:
    """Returns the error of reading or setting a state inside a capture."""
    return CaptureError(
        f"{call} is called inside a capture",
        where=locate_caller(),
        why="nothing runs in a capture: a replay draws from the state as it is by then",
        fix="call it before the capture, or between two replays",
        anchor=ANCHOR,
    )


def make_seed_error(seed: Any) -> ConfigError:
    """Returns the error of a seed that is none."""
    return ConfigError(
        f"seed={seed!r} is not allowed",
        where=f"{locate_caller()}, argument `seed`",
        why="a seed is an int of 64 bits, signed or not",
        fix="pass an int such as 0",
        anchor=ANCHOR,
    )


def make_device_error(device: Any) -> ConfigError:
    """Returns the error of a device that JAX does not know."""
    return ConfigError(
        f"device={device!r} is not a device of JAX",
        where=f"{locate_caller()}, argument `device`",
        why="eager keys are put on the device, with those of its platform that JAX has here",
        fix="pass one of jax.devices(), or leave device= out",
        anchor=ANCHOR,
    )


def make_state_error(found: str, wanted: str) -> ConfigError:
    """Returns the error of a state that no generator has given."""
    return ConfigError(
        f"the state of a generator cannot be {found}",
        where=f"{locate_caller()}, argument `state`",
        why=f"the state of this generator is {wanted}",
        fix="pass what `get_state()` of a generator with the same kind of keys returned",
        anchor=ANCHOR,
    )


def make_generators_error(given: Any) -> ConfigError:
    """Returns the error of something else in the place of several generators."""
    return ConfigError(
        f"a list of generators is expected, not {type(given).__name__}",
        where=f"{locate_caller()}, argument `generators`",
        why="the states of all of them are given back after the block",
        fix="pass [generator], or nothing for the default generator",
        anchor=ANCHOR,
    )


def make_generator_error(given: Any) -> ConfigError:
    """Returns the error of something else in the place of a generator."""
    return ConfigError(
        f"a generator is expected, not {type(given).__name__}",
        where=locate_caller(),
        why="keys are drawn from a tg.random.Generator",
        fix="pass tg.random.Generator(seed), or tg.random.default_generator",
        anchor=ANCHOR,
    )
