"""Element reader: what it reads, computed in Python, is what JAX computes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.tracegraph.replacements.few_rows.test_rule import build
from tracegraph.lowering.kernels.element_functions import ElementFunction, ElementLines
from tracegraph.replacements.element_reader import ElementReader, UnreadableError
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.indices import make_variable

SHAPE = (3, 8)
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
    "min": min,
    "neg": lambda a: -a,
    "abs": abs,
    "square": lambda a: a * a,
    "sqrt": math.sqrt,
    "int_add": lambda a, b: a + b,
    "int_mul": lambda a, b: a * b,
    "int_div": lambda a, b: a // b,
    "int_rem": lambda a, b: a % b,
    "int_max": max,
    "int_min": min,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "not": lambda a: not a,
    "select": lambda a, b, c: b if a else c,
    "to_float": float,
}


def run(function: ElementFunction, variables: dict[str, int], arrays: list[Any]) -> Any:
    """Computes a function in Python; an index out of bounds is an error."""
    values: list[Any] = []
    for op in function.ops:
        operands = [values[number] for number in op.operands]
        if op.opcode == "variable":
            values.append(variables[op.detail])
        elif op.opcode == "constant":
            values.append(read_constant(op.type, op.detail))
        elif op.opcode == "load":
            (index,) = operands
            array = np.asarray(arrays[int(op.detail)]).ravel()
            assert 0 <= index < array.size
            values.append(array[index])
        else:
            values.append(OPERATIONS[op.opcode](*operands))
    return values[function.results[0]]


def read_constant(kind: str, text: str) -> Any:
    if kind == "float":
        return np.uint32(int(text, 16)).view(np.float32)
    return int(text) if kind == "int" else text == "true"


def turn_halves(x: Any, y: Any, n: Any) -> Any:
    del n
    return jnp.concatenate((x[:, :4] - y[:, 4:], x[:, 4:] + y[:, :4]), 1)


def turn_pairs(x: Any, y: Any, n: Any) -> Any:
    del n
    even, odd = x[:, ::2], y[:, 1::2]
    return jnp.stack((even - odd, odd + even), -1).reshape(SHAPE)


def join_three(x: Any, y: Any, n: Any) -> Any:
    del n
    return jnp.concatenate((x[:, 5:], y[:, 1:3], x[:, :3]), 1)


def mask(x: Any, y: Any, n: Any) -> Any:
    places = jnp.arange(SHAPE[1])
    is_seen = (places <= n) & ~(places == 2) | (places > n + 3)
    return jnp.where(is_seen, x, jnp.maximum(y, 0.5))


def move(x: Any, y: Any, n: Any) -> Any:
    del n
    return (x.T.reshape(4, 6).T.ravel().reshape(8, 3).T + y[::-1])[:, ::-1]


def move_in_fortran_order(x: Any, y: Any, n: Any) -> Any:
    del n
    cube = lax.reshape(x.reshape(2, 3, 4), (4, 6), (1, 2, 0))
    return jnp.ravel(cube, order="F").reshape(SHAPE) + y


def count(x: Any, y: Any, n: Any) -> Any:
    places = lax.broadcasted_iota(jnp.int32, SHAPE, 1)
    near = jnp.minimum(jnp.maximum(places - n, -2), 2 * n)
    return jnp.where(places - places < 0, y, x) * near.astype(jnp.float32)


def power(x: Any, y: Any, n: Any) -> Any:
    del n
    return jnp.sqrt(jnp.abs(x**3)) + jnp.square(y.astype(jnp.bfloat16).astype(jnp.float32)) ** 2


def load_rest(x: Any, y: Any, n: Any) -> Any:
    del n
    return jnp.exp(x) + jnp.cumsum(y, 1)


def repeat(x: Any, y: Any, n: Any) -> Any:
    slopes = (jnp.arange(SHAPE[0]) + 1).astype(jnp.float32)[:, None]
    return x - slopes * (n - jnp.arange(SHAPE[1])).astype(jnp.float32)[None] + y[:, :1] * y[:1]


PROGRAMS = [
    move_in_fortran_order,
    repeat,
    turn_halves,
    turn_pairs,
    join_three,
    mask,
    move,
    count,
    power,
    load_rest,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("n", [0, 4])
def test_elements_are_what_jax_computes(program: Any, n: int) -> None:
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=SHAPE) + 1, jnp.bfloat16) for _ in range(2))
    args = x.astype(jnp.float32), y.astype(jnp.float32), jnp.int32(n)
    graph = build(program, *args)
    arrays: dict[Any, int] = {}
    reader = ElementReader(GraphView(graph).makers, arrays)
    place = make_variable("i", SHAPE[0]), make_variable("j", SHAPE[1])
    function = reader.finish(reader.read(graph.outputs[0], place))
    given = dict(zip(graph.inputs, args, strict=True))
    given |= {
        value: value_of(program, value, graph, args) for value in arrays if value not in given
    }
    wanted = program(*args)
    for i, j in itertools.product(*map(range, SHAPE)):
        found = run(function, {"i": i, "j": j}, [given[value] for value in arrays])
        assert found == pytest.approx(float(wanted[i, j]), rel=1e-2 if program is power else 1e-6)


def value_of(program: Any, value: Any, graph: Any, args: Any) -> Any:
    """Returns what a value of the graph is that is loaded, as what takes long to compute is."""
    assert program is load_rest
    ops = {op.results[0]: op.name for op in graph.ops}
    return jnp.exp(args[0]) if ops[value] == "exp" else jnp.cumsum(args[1], 1)


def test_what_is_loaded_instead_leaves_nothing_behind() -> None:
    """Half of an op was read when the other half could not be."""

    def program(x: Any, y: Any, n: Any) -> Any:
        return x.astype(jnp.float32) + jnp.where(n > 0, y, y.astype(jnp.int8).astype(jnp.float32))

    args = jnp.ones(SHAPE), jnp.ones(SHAPE), jnp.int32(1)
    graph = build(program, *args)
    arrays: dict[Any, int] = {}
    reader = ElementReader(GraphView(graph).makers, arrays)
    place = make_variable("i", 3), make_variable("j", 8)
    function = reader.finish(reader.read(graph.outputs[0], place))
    assert sorted(arrays.values()) == [*range(len(arrays))]
    assert function.list_loads() == {*arrays.values()}


def test_other_types_are_not_read() -> None:
    graph = build(lambda x: x + 1, jnp.ones(4, jnp.int8))
    reader = ElementReader(GraphView(graph).makers, {})
    with pytest.raises(UnreadableError):
        reader.read(graph.outputs[0], (make_variable("i", 4),))


def test_lines_come_as_soon_as_their_variables_are_known() -> None:
    graph = build(lambda x, n: jnp.where(jnp.arange(8) < n, x, 0.0), jnp.ones(8), jnp.int32(3))
    reader = ElementReader(GraphView(graph).makers, {})
    function = reader.finish(reader.read(graph.outputs[0], (make_variable("i", 8),)))
    lines = ElementLines(function, "e")
    ahead, inside = lines.write({}), lines.write({"i": "place"})
    assert [line for line in ahead if "p0[0]" in line or "p1[0]" in line]
    assert not [line for line in ahead if "place" in line]
    assert [line for line in inside if "[place]" in line]
    assert lines.write({"i": "place"}) == []
    assert lines.name_results()[0].startswith("e")
