"""Partition: what is an input of a region, what is stored, what is made again in each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.tracegraph.capturing.test_partition import X, call_back, describe, evaluate, partition
from tracegraph.capturing import partition as partition_module
from tracegraph.lowering.request import Role
from tracegraph.runtime.streams.stream import Stream, current_stream, stream


@pytest.fixture
def constants_are_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every array were a large one."""
    monkeypatch.setattr(partition_module, "LARGE_CONSTANT_BYTES", 1)


@pytest.mark.usefixtures("constants_are_inputs")
def test_roles_and_constants():
    table = jnp.arange(4.0)
    request = partition(lambda x, y: (x + table, y * 2), X, X, donated=[1])
    assert [(spec.buffer.name, spec.role) for spec in request.inputs] == [
        ("x0", Role.COPIED),
        ("x1", Role.DONATED),
        ("%c0", Role.CONSTANT),
    ]
    got = evaluate(request, X, X, constants=[table])
    np.testing.assert_allclose(got, [X + table, X * 2])


@pytest.mark.parametrize(
    ("function", "donated", "outputs"),
    [
        (lambda x, y: (x, y), (), [("x0", None), ("x1", None)]),
        (lambda x, y: (x, y), (0, 1), [("x0", "x0"), ("x1", "x1")]),
        (lambda x, y: (y, x), (0, 1), [("%out0", "x0"), ("%out1", "x1")]),
        # A plain copy of a donated input needs a buffer of its own: the input is overwritten.
        (lambda x, y: (x + y, x), (0,), [("%out0", "x0"), ("%out1", None)]),
        (lambda x, y: (x + y,) * 2, (0, 1), [("%out0", "x0"), ("%out1", "x1")]),
        (lambda x, y: (x + y,) * 2, (0,), [("%out0", "x0"), ("%2", None)]),
        (lambda x, y: (x + y,) * 2, (), [("%2", None), ("%2", None)]),
        (lambda x, y: 2.5, (), [("%out0", None)]),
    ],
)
def test_where_results_are(function: Any, donated: Any, outputs: Any):
    request = partition(function, X, X * 10, donated=donated)
    assert [(output.buffer.name, output.alias) for output in request.outputs] == outputs
    expected = jax.tree.leaves(function(X, X * 10))
    for got, wanted in zip(evaluate(request, X, X * 10), expected, strict=True):
        np.testing.assert_allclose(got, wanted)


@pytest.mark.parametrize("size", [1, 2**18 - 1, 2**18])
def test_up_to_a_size_constants_are_embedded(size: int):
    table = jnp.ones(size)
    request = partition(lambda x: x + table.sum(), X)
    names = [spec.buffer.name for spec in request.inputs]
    assert names == (["x0", "%c0"] if size == 2**18 else ["x0"])
    np.testing.assert_allclose(
        evaluate(request, X, constants=[table][: len(names) - 1])[0], X + size
    )


def test_where_jax_makes_inputs_of_arrays_only_scalars_are_embedded(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(partition_module, "embeds_arrays", lambda: False)
    table, scale = jnp.arange(4.0), jnp.float32(3.0)
    request = partition(lambda x: x * scale + table, X)
    assert [spec.buffer.name for spec in request.inputs] == ["x0", "%c1"]


@pytest.mark.usefixtures("constants_are_inputs")
def test_a_constant_that_is_a_result_keeps_its_own_buffer():
    table = jnp.arange(4.0)
    request = partition(lambda x: (x * 1, table), X)
    assert [output.buffer.name for output in request.outputs] == ["%2", "%out1"]
    np.testing.assert_array_equal(evaluate(request, X, constants=[table])[1], table)


def test_writing_to_a_static_result_does_not_change_a_constant():
    table = jnp.arange(4.0)
    captured: Any = tg.capture(lambda x: (x * 1, table), outputs="static")
    captured(X)[1].copy_(table + 9)
    np.testing.assert_array_equal(captured(X)[1], table)


def test_swap_beside_several_regions_gets_an_epilogue_that_waits_for_all_streams():
    side = Stream()

    def swap(x, y):
        side.wait_stream(current_stream())
        with stream(side):
            z = jnp.sin(x)
        w = jnp.cos(y)
        current_stream().wait_stream(side)
        return y, x, z, w

    request = partition(swap, X, X * 10, donated=[0, 1])
    assert describe(request)[-1] == ("epilogue", 0, ("region0",))
    np.testing.assert_allclose(evaluate(request, X, X * 10)[:2], [X * 10, X])


def test_literals_keep_their_dtype():
    def literals(x):
        return 1, 2.5, True, jnp.int8(3), jnp.bfloat16(2), x

    request = partition(literals, X)
    dtypes = [str(output.buffer.dtype) for output in request.outputs]
    assert dtypes == ["int32", "float32", "bool", "int8", "bfloat16", "float32"]
    assert [float(each) for each in evaluate(request, X)[:5]] == [1, 2.5, 1, 3, 2]


def test_typed_keys_are_physical_between_regions():
    side = Stream()

    def draw(key):
        side.wait_stream(current_stream())
        with stream(side):
            used, kept = jax.random.split(key)
        current_stream().wait_stream(side)
        return jax.random.normal(used, (3,)), kept

    key = jax.random.key(3)
    request = partition(draw, key)
    assert request.inputs[0].buffer.shape == (2,)
    drawn, kept = evaluate(request, jax.random.key_data(key))
    used, left = jax.random.split(key)
    np.testing.assert_allclose(drawn, jax.random.normal(used, (3,)))
    np.testing.assert_array_equal(kept, jax.random.key_data(left))


def test_what_is_made_of_literals_is_made_again_in_each_region():
    def function(x):
        table = jnp.arange(4.0) * 2
        return call_back(x + table) + table

    request = partition(function, X)
    first, eager, last = request.regions
    assert [spec.name for spec in first.inputs] == ["x0"]
    assert [spec.name for spec in last.inputs] == [spec.name for spec in eager.outputs]
    table = np.arange(4.0) * 2
    np.testing.assert_array_equal(evaluate(request, X)[0], (X + table) * 2 + table)


def test_literals_that_make_a_result_are_stored_once():
    def function(x):
        table = jnp.arange(4.0) * 2
        return table, call_back(x) + table, table

    request = partition(function, X)
    table = request.outputs[0].buffer.name
    assert request.outputs[2].buffer.name == table
    stored = [spec.name for region in request.regions for spec in region.outputs]
    assert stored.count(table) == 1
    assert table not in [spec.name for region in request.regions for spec in region.inputs]
    wanted = np.arange(4.0) * 2
    np.testing.assert_array_equal(evaluate(request, X), [wanted, X * 2 + wanted, wanted])


def test_what_jax_reads_op_by_op_is_stored():
    def function(x):
        return call_back(jnp.full(4, 3.0)) + x

    request = partition(function, X)
    first, eager, _ = request.regions
    assert [spec.name for spec in eager.inputs] == [spec.name for spec in first.outputs]
    np.testing.assert_array_equal(evaluate(request, X)[0], X + 6)


def test_nothing_waits_for_literals():
    side = Stream()

    def fork(x):
        table = jnp.arange(4.0)
        side.wait_stream(current_stream())
        with stream(side):
            y = x + table
        z = x * table
        current_stream().wait_stream(side)
        return y * z * table

    request = partition(fork, X)
    assert [waits for _, _, waits in describe(request)] == [(), (), ("region0",)]
    table = np.arange(4.0)
    np.testing.assert_array_equal(evaluate(request, X)[0], (X + table) * (X * table) * table)
