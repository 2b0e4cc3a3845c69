"""Bad input: four lines that name the user's own line, nothing lost, and the next call works."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.error_lines import line, match
from tests.oracles.tree_equality import assert_same

X = jnp.arange(3.0)
FILE = "tests/public/errors/test_capture_errors.py"


def step(state, x):
    return {"w": state["w"] * x}, state["w"].sum()


def test_no_arguments_and_too_many():
    captured = tg.capture(step)
    at = line() + 2
    with pytest.raises(tg.CaptureError) as caught:
        captured()  # pyright: ignore[reportCallIssue]
    match(
        caught.value,
        "`step` is called with the wrong arguments: missing a required argument: 'state'",
        f"{FILE}:{at} in test_no_arguments_and_too_many, `step(state, x)`",
        "a capture is made from the arguments of its first call",
        "call it as `step(state, x)` says",
    )
    with pytest.raises(tg.CaptureError, match="too many positional arguments"):
        captured({"w": X}, 1.0, 2.0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(tg.CaptureError, match="got an unexpected keyword argument 'y'"):
        captured({"w": X}, 1.0, y=2.0)  # pyright: ignore[reportCallIssue]
    assert_same(captured({"w": X}, 2.0), jax.jit(step)({"w": X}, 2.0))


NOT_ARRAYS = [
    (np.array(["a"]), "a ndarray of <U1", "pass x.tolist()"),
    (np.array([object()]), "a ndarray of object", "pass x.tolist()"),
    (np.zeros(2, ">f4"), "a ndarray of >f4", "pass x.astype(x.dtype.newbyteorder"),
    ({1, 2}, "a set", "pass frozenset(x)"),
    (jax.new_ref(jnp.zeros(3)), "a Ref of float32", "pass the array and write the result back"),
]


@pytest.mark.parametrize(("value", "kind", "fix"), NOT_ARRAYS)
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_leaf_that_is_not_an_array(value, kind, fix, is_captured):
    captured = tg.capture(step, donate_argnums=0)
    state = {"w": jnp.ones(3)}
    if is_captured:
        state, _ = captured(state, 2.0)
    at = line() + 2
    with pytest.raises(tg.CaptureError) as caught:
        captured(state, {"x": value})
    match(
        caught.value,
        f"argument 1 `x['x']` is {kind}, not an array",
        f"{FILE}:{at} in test_a_leaf_that_is_not_an_array, argument 1 `x['x']`",
        "",
        fix,
    )
    assert float(captured(state, 2.0)[1]) == (6.0 if is_captured else 3.0)


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_number_that_is_too_large(is_captured):
    captured = tg.capture(lambda x: x + 1)
    if is_captured:
        captured(3)
    with pytest.raises(tg.CaptureError, match="argument 0 `x` is 1099511627776, which JAX's defau"):
        captured(2**40)
    assert int(captured(4)) == 5


def test_a_graph_called_with_another_shape_or_dtype_shows_only_what_differs():
    graph = tg.capture(step).lower({"w": X, "b": X}, 1.0).instantiate()
    at = line() + 2
    with pytest.raises(tg.ReplayError) as caught:
        graph({"w": X, "b": X[1:].astype(int)}, 1.0)
    match(
        caught.value,
        "the graph of `step` is called with another signature",
        f"{FILE}:{at} in test_a_graph_called_with_another_shape_or_dtype_shows_only_what_differs"
        ": state['b']: wanted f32[3], got i32[2]",
        "a graph has static shapes: its kernels and buffers fit one signature only",
        "pass what it was captured with, or call `step`",
    )
    assert caught.value.where.count("wanted") == 1
    assert_same(graph({"w": X, "b": X}, 1.0), jax.jit(step)({"w": X}, 1.0))


def test_a_graph_called_with_another_tree_shows_only_what_differs():
    graph = tg.capture(step).lower({"w": X, "b": X}, 1.0).instantiate()
    with pytest.raises(tg.ReplayError) as caught:
        graph({"w": X, "c": X}, 1.0)
    assert caught.value.where.partition(": ")[2] == (
        "state['b']: wanted f32[3], got nothing; state['c']: wanted nothing, got f32[3]"
    )


@pytest.mark.parametrize("is_captured", [False, True])
def test_the_same_array_donated_twice(is_captured):
    captured = tg.capture(lambda a, b: (a + 1, b * 2), donate_argnums=(0, 1), name="pair")
    if is_captured:
        captured(jnp.zeros(3), jnp.ones(3))
    x = jnp.ones(3)
    at = line() + 2
    with pytest.raises(tg.CaptureError) as caught:
        captured(x, x)
    match(
        caught.value,
        "argument 1 `b` is the same array as argument 0 `a`, and both are donated",
        f"{FILE}:{at} in test_the_same_array_donated_twice, argument 1 `b`",
        "a donated buffer is overwritten by the call; it cannot be another argument as well",
        "pass a copy for one of the two: jnp.array(x, copy=True)",
    )
    assert not x.is_deleted()
    assert_same(captured(x, x.copy()), (jnp.ones(3) + 1, jnp.ones(3) * 2))


def test_a_resident_leaf_donated_and_kept():
    captured = tg.capture(lambda a, b: (a + b, b.sum()), donate_argnums=0, name="pair")
    leaf, _ = captured(jnp.ones(3), X)
    with pytest.raises(tg.CaptureError, match="`a` is donated, and argument 1 `b` is the same arr"):
        captured(leaf, leaf)
    assert_same(captured(leaf, X), (X + X + 1, X.sum()))


def test_a_donated_array_used_afterwards():
    captured = tg.capture(step, donate_argnums=0)
    state = {"w": jnp.ones(3)}
    new, _ = captured(state, 2.0)
    at = line() + 2
    with pytest.raises(tg.CaptureError) as caught:
        captured(state, 2.0)
    match(
        caught.value,
        "argument 0 `state['w']` has been deleted",
        f"{FILE}:{at} in test_a_donated_array_used_afterwards, argument 0 `state['w']`",
        "its buffer was given up: donated to an earlier call, or freed by x.delete()",
        "pass what that call returned in its place",
    )
    with pytest.raises(RuntimeError, match="deleted"):
        jnp.negative(state["w"])
    assert float(captured(new, 2.0)[1]) == 6.0


OPTIONS = [
    ({"donate": 0}, "capture has no option `donate`", "the options are control_flow, "),
    ({"mode": "half"}, "mode='half' is unknown", "the modes are partial, whole"),
    ({"outputs": "new"}, "outputs='new' is unknown", "they are fresh, static"),
    ({"pool": 3}, "pool= is not a pool", "a pool is what `pool()` of a captured function, `tg."),
    ({"stream": 3}, "stream= is not a tg.Stream", "work is captured on a stream of tracegraph"),
    ({"name": 3}, "name=3 is not a text", "the name appears in messages"),
    ({"donate_argnums": 5}, "donate_argnums has 5", "the function has 2 positional arguments"),
    ({"donate_argnums": 1.5}, "donate_argnums=1.5 is not allowed", "it is one or more of int"),
    ({"donate_argnums": True}, "donate_argnums=True is not allowed", "it is one or more of int"),
    ({"static_argnames": "z"}, "static_argnames has 'z'", "the arguments are state, x"),
    ({"static_argnums": -3}, "static_argnums has -", "the function has 2 positional arguments"),
    ({"static_argnums": 0, "donate_argnums": 0}, "an argument is static and don", "a static argum"),
]


@pytest.mark.parametrize(("options", "what", "why"), OPTIONS, ids=lambda v: str(v)[:30])
def test_wrong_options(options, what, why):
    number: Any = 3
    with pytest.raises(tg.ConfigError) as caught:
        tg.capture(step, **options)
    at = step.__code__.co_firstlineno
    where = f"{FILE}:{at} in step, tg.capture"
    match(caught.value, what, where, why, "correct the keyword; help(tg.capture) lists all")
    with pytest.raises(tg.ConfigError, match="capture is given int, not a function"):
        tg.capture(number)


def test_the_default_stream_and_an_unknown_pool():
    with pytest.raises(tg.CaptureError, match="the capture is asked for on the default stream"):
        tg.capture(step, stream=tg.default_stream())
    with pytest.raises(tg.TracegraphError, match="there is no pool"):
        tg.capture(step, pool=tg.PoolId(10**6))


def test_a_static_argument_that_cannot_be_hashed():
    captured = tg.capture(lambda x, sizes: x.reshape(sizes), static_argnums=1, name="shape")
    at = line() + 2
    with pytest.raises(tg.CaptureError) as caught:
        captured(X, [1, 3])
    match(
        caught.value,
        "static argument 1 of `shape` cannot be hashed: list",
        f"{FILE}:{at} in test_a_static_argument_that_cannot_be_hashed, argument 1",
        "static values are part of the key under which a capture is found again",
        "pass tuple(x)",
    )
    assert captured(X, (1, 3)).shape == (1, 3)


@pytest.mark.parametrize("phase", ["trace", "lower", "explain"])
def test_frames_of_ours_are_hidden_at_every_phase(phase):
    def broken(x):
        raise ZeroDivisionError("the user's")

    with pytest.raises(ZeroDivisionError, match="the user's") as caught:
        getattr(tg.capture(broken), phase)(X)
    files = [str(entry.path) for entry in caught.traceback]
    inner = [file for file in files if "/tracegraph/" in file or "/runtime/" in file]
    # The frame that raises again is the only one of ours that Python keeps.
    assert len(inner) <= 1, files
    assert files[-1] == __file__
