"""Options of `capture`: what they mean, and what is refused when the function is decorated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

import tracegraph as tg
from tests.tracegraph.tracing.test_signature import DEFAULTS
from tracegraph.options import Options, read_options
from tracegraph.runtime.errors import CaptureError, ConfigError
from tracegraph.runtime.streams.stream import Stream, default_stream

jax.config.update("jax_platforms", "cpu")


def step(state: Any, batch: Any, *, rate: Any = 0.1, flag: bool = False) -> Any:
    return state


def positional(state: Any, batch: Any, /) -> Any:
    return state


def variadic(*args: Any, **kwargs: Any) -> Any:
    return args


def read(function: Callable[..., Any] = step, **given: Any) -> Options:
    return read_options(function, DEFAULTS | given)


@pytest.mark.parametrize(
    ("function", "given", "positions", "names"),
    [
        (step, {}, set(), set()),
        (step, {"donate_argnums": 0}, {0}, {"state"}),
        (step, {"donate_argnums": (0, 1)}, {0, 1}, {"state", "batch"}),
        (step, {"donate_argnums": -1}, {1}, {"batch"}),
        (step, {"donate_argnames": "batch"}, {1}, {"batch"}),
        (step, {"donate_argnames": ["batch", "rate"]}, {1}, {"batch", "rate"}),
        (step, {"donate_argnums": 0, "donate_argnames": "rate"}, {0}, {"state", "rate"}),
        (step, {"donate_argnums": None, "donate_argnames": None}, set(), set()),
        (positional, {"donate_argnums": 0}, {0}, set()),
        (variadic, {"donate_argnums": 5, "donate_argnames": "any"}, {5}, {"any"}),
    ],
)
def test_positions_and_names(function: Any, given: Any, positions: set[int], names: set[str]):
    options = read(function, **given)
    assert options.donate_argnums == positions
    assert options.donate_argnames == names
    statics = read(function, **{key.replace("donate", "static"): v for key, v in given.items()})
    assert statics.static_argnums == positions
    assert statics.static_argnames == names


@pytest.mark.parametrize(
    ("given", "what", "why"),
    [
        (
            {"speed": 1},
            "capture has no option `speed`",
            "the options are control_flow, debug_nans, donate_argnames",
        ),
        ({"mode": "half"}, "mode='half' is unknown", "the modes are partial, whole"),
        ({"outputs": "old"}, "outputs='old' is unknown", "they are fresh, static"),
        ({"verify": "none"}, "verify='none' is unknown", "it is True or False"),
        ({"verify": 1}, "verify=1 is unknown", "it is True or False"),
        ({"verify": None}, "verify=None is unknown", "it is True or False"),
        ({"pool": 3}, "pool= is not a pool", "`pool()`"),
        ({"stream": 3}, "stream= is not a tg.Stream", "a stream of tracegraph"),
        ({"donate_argnums": 2}, "donate_argnums has 2", "2 positional arguments"),
        ({"static_argnums": -3}, "static_argnums has -3", "2 positional arguments"),
        ({"donate_argnames": "stat"}, "donate_argnames has 'stat'", "state, batch, rate, flag"),
        ({"donate_argnums": "0"}, "donate_argnums='0' is not allowed", "one or more of int"),
        ({"donate_argnums": 1.5}, "donate_argnums=1.5 is not allowed", "one or more of int"),
        ({"donate_argnums": True}, "donate_argnums=True is not allowed", "one or more of int"),
        ({"static_argnames": [1]}, "static_argnames=[1] is not allowed", "one or more of str"),
        ({"static_argnums": 0, "donate_argnums": 0}, "an argument is static and donated", "buffer"),
        ({"static_argnums": 0, "donate_argnames": "state"}, "an argument is static and", "buffer"),
    ],
)
def test_what_is_refused(given: dict[str, Any], what: str, why: str):
    with pytest.raises(ConfigError) as raised:
        tg.capture(step, **given)
    error = raised.value
    assert error.what.startswith(what)
    assert why in error.why
    assert "test_options.py" in error.where
    assert error.anchor == "unknown-option"


def test_the_default_stream_is_refused():
    with pytest.raises(CaptureError) as raised:
        read(stream=default_stream())
    assert raised.value.anchor == "default-stream"


def test_a_stream_of_its_own_unless_one_is_given():
    assert read().stream is not read().stream
    given = Stream()
    assert read(stream=given).stream is given


def test_the_name_is_the_functions_unless_one_is_given():
    assert read().name == "step"
    assert read(name="train").name == "train"

    class Model:
        def __call__(self, x: Any) -> Any:
            return x

    assert read(Model()).name == "Model"


def test_a_function_without_a_signature_takes_positions_as_they_are():
    assert read(max, donate_argnums=3).donate_argnums == {3}


def test_what_is_not_a_function_is_refused():
    with pytest.raises(ConfigError, match="capture is given int, not a function"):
        tg.capture(3)  # type: ignore[call-overload]
