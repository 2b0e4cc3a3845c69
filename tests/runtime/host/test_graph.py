"""HostGraph: calls and copies in an arena, whatever the dtype, aliasing or failure."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.fakes.definitions import (
    FLOATS,
    compile_call,
    make_call,
    make_copy,
    make_definition,
    make_replay,
    make_stage,
    replay_once,
)
from tracegraph.runtime.definition.nodes import CallNode

jax.config.update("jax_platforms", "cpu")
X = np.arange(4, dtype=np.float32)


def test_one_call():
    double = make_call("a", lambda x: x * 2, "x", "y")
    (y,) = replay_once(make_replay(make_definition(make_stage(double))), X)
    np.testing.assert_array_equal(y, X * 2)


def test_calls_pass_values_through_the_arena():
    first = make_call("a", lambda x: (x * 2, x + 1), "x", "t u")
    second = make_call("b", lambda t, u: t - u, "t u", "y")
    replay = make_replay(make_definition(make_stage(first, second, edges=[(0, 1)])))
    for value in (X, X + 5):
        (y,) = replay_once(replay, value)
        np.testing.assert_array_equal(y, value * 2 - (value + 1))


def test_results_may_trade_places_with_arguments():
    swap = make_call("a", lambda s, r: (r, s), "s r", "s r")
    definition = make_definition(
        make_stage(swap), inputs="s r", outputs="s r", residents=["s", "r"]
    )
    replay = make_replay(definition)
    replay.load([(0, X), (1, X * 10)])
    for expected in ((X * 10, X), (X, X * 10), (X * 10, X)):
        replay.launch()
        np.testing.assert_array_equal(replay.copy_outputs(), expected)


def test_a_copy_node_moves_a_whole_buffer():
    compute = make_call("a", lambda s: s + 1, "s", "n")
    definition = make_definition(
        make_stage(compute, make_copy("n", "s"), edges=[(0, 1)]),
        inputs="s",
        outputs="s",
        residents=["s"],
    )
    replay = make_replay(definition)
    replay.load([(0, X)])
    for count in (1, 2, 3):
        replay.launch()
        np.testing.assert_array_equal(replay.copy_outputs(), [X + count])


@pytest.mark.parametrize(
    "dtype",
    [
        np.bool_,
        np.int8,
        np.uint32,
        np.float16,
        np.complex64,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.int4,
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,), (3, 0)])
def test_every_dtype_and_shape(dtype: Any, shape: tuple[int, ...]):
    kind = jax.ShapeDtypeStruct(shape, dtype)
    node = CallNode("a", compile_call(lambda x: (x, jnp.flip(x)), kind), ("x",), ("y", "z"))
    definition = make_definition(make_stage(node), outputs="y z", types=dict.fromkeys("xyz", kind))
    values = np.asarray(np.random.default_rng(0).integers(0, 2, shape)).astype(dtype)
    y, z = replay_once(make_replay(definition), values)
    for got, expected in ((y, values), (z, np.flip(values))):
        assert (got.dtype, got.shape) == (values.dtype, shape)
        assert got.tobytes() == expected.tobytes()


def test_an_eager_call_gets_copies_that_it_may_keep():
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x)
        return x

    node = CallNode("e", keep, ("x",), ("y",))
    replay = make_replay(make_definition(make_stage(node, is_captured=False)))
    replay_once(replay, X)
    replay_once(replay, X + 1)
    np.testing.assert_array_equal(kept, [X, X + 1])


def test_an_eager_call_without_results_runs():
    seen: list[Any] = []

    def look(x: Any) -> tuple[()]:
        seen.append(np.asarray(x))
        return ()

    first = make_call("a", lambda x: x + 1, "x", "y")
    definition = make_definition(
        make_stage(first), make_stage(CallNode("e", look, ("y",), ()), is_captured=False)
    )
    replay_once(make_replay(definition), X)
    np.testing.assert_array_equal(seen, [X + 1])


def test_an_eager_call_that_raises_leaves_its_results_and_the_state_alone():
    fails = False

    def work(s: Any) -> tuple[Any, Any]:
        if fails:
            raise ZeroDivisionError("in eager code")
        return s * 2, s + 1

    node = CallNode("e", work, ("s",), ("s", "y"))
    definition = make_definition(
        make_stage(node, is_captured=False), inputs="s", outputs="s y", residents=["s"]
    )
    replay = make_replay(definition)
    replay_once(replay, X)
    fails = True
    with pytest.raises(ZeroDivisionError, match="in eager code"):
        replay.launch()
    np.testing.assert_array_equal(replay.copy_outputs(), [X * 2, X + 1])


def test_a_later_stage_does_not_overwrite_what_a_running_call_still_reads():
    # `t` is dead once `b` is done, so a memory plan may let `w` have its bytes.
    size = 600
    square = jax.ShapeDtypeStruct((size, size), np.float32)

    def take_long(t: Any, u: Any) -> Any:
        for _ in range(12):
            u = jnp.tanh(u @ u)
        return t + u

    def subtract(x: Any) -> Any:
        return np.asarray(x) - 1

    stages = [
        make_stage(CallNode("a", compile_call(lambda x: x + 1, square), ("x",), ("t",))),
        make_stage(CallNode("e", lambda x: x, ("x",), ("u",)), is_captured=False),
        make_stage(CallNode("b", compile_call(take_long, square, square), ("t", "u"), ("y",))),
        make_stage(CallNode("g", subtract, ("x",), ("w",)), is_captured=False),
    ]
    offsets = {name: 1_500_160 * index for index, name in enumerate("xtuy")}
    definition = make_definition(
        *stages,
        outputs="y w",
        types=dict.fromkeys("xtuyw", square),
        offsets={**offsets, "w": offsets["t"]},
        arena_bytes=4 * 1_500_160,
    )
    x = np.zeros((size, size), np.float32)
    y, w = replay_once(make_replay(definition), x)
    np.testing.assert_array_equal(y, x + 1)
    np.testing.assert_array_equal(w, x - 1)


def test_a_call_of_many_results_fills_each():
    node = CallNode(
        "a",
        compile_call(lambda x: tuple(x + index for index in range(20)), FLOATS),
        ("x",),
        tuple(f"y{index}" for index in range(20)),
    )
    definition = make_definition(make_stage(node), outputs=" ".join(node.results))
    results = replay_once(make_replay(definition), X)
    np.testing.assert_array_equal(results, [X + index for index in range(20)])
