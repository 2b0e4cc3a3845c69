"""Two traces of one signature must give the same graph."""

import itertools
import random
import re
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from tracegraph.constraints import compare_traces
from tracegraph.constraints.traces import is_same_array, is_same_param, show_arrays
from tracegraph.ir.graph import Graph, Op, Origin
from tracegraph.passes.pipeline import DEFAULT_PASSES, run_passes
from tracegraph.tracing.trace import trace_function

X = np.arange(4, dtype=np.float32)


def compare(function, *args):
    graphs = [trace_function(function, args, {}, name="step").graph for _ in range(2)]
    first, second = (run_passes(graph, DEFAULT_PASSES)[0] for graph in graphs)
    return compare_traces(first, second)


def to_text(violation):
    return re.sub(r"[\w/]*/(\w+\.py):\d+", r"\1:N", str(violation))


def test_python_number_that_changes():
    numbers = iter([0.75, 0.125])

    def step(x):
        return jnp.sin(x) * next(numbers)

    (violation,) = compare(step, X)
    assert to_text(violation) == (
        "`step` does Python work that changes from one trace to the next\n"
        "  where: test_traces.py:N in step, %2 = mul %1, 0.75:f32[]\n"
        "  why:   0.75 in the first trace, 0.125 in the second; a CUDA graph would freeze one of "
        "them (a counter, or other state of Python that a call changes)\n"
        "  fix:   pass the value as an argument, and draw random numbers with jax.random from a "
        "key argument          python -m tracegraph error python-work"
    )


def test_array_that_changes_shows_its_first_difference():
    arrays = iter([np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 5.0, 3.0, 9.0])])

    def step(x):
        return x + next(arrays)

    (violation,) = compare(step, X)
    assert "[1] = 2.0 in the first trace, [1] = 5.0 in the second" in violation.why


def test_random_numbers_of_numpy_and_of_python():
    generator, python = np.random.default_rng(0), random.Random(0)

    def step(x):
        return x * generator.normal(size=4) + python.random()

    assert [violation.op and violation.op.name for violation in compare(step, X)] == [
        "mul",
        "add",
    ]


def test_parameter_that_changes():
    lengths = itertools.count(3)

    def step(x):
        return lax.fori_loop(0, next(lengths), lambda i, c: c * 2, x)

    (violation,) = compare(step, X)
    assert "length=3 in the first trace, length=4 in the second" in violation.why


def test_number_in_a_subgraph_that_changes():
    numbers = itertools.count(3.0)

    def step(x):
        factor = next(numbers)
        return lax.scan(lambda c, y: (c * factor, y), 1.0, x)

    (violation,) = compare(step, X)
    assert violation.op is not None
    assert violation.op.name == "mul"
    assert "3.0 in the first trace, 4.0 in the second" in violation.why


def test_op_that_changes_ends_the_comparison():
    functions = iter([jnp.sin, jnp.cos])

    def step(x):
        return next(functions)(x) * 2 + 1

    (violation,) = compare(step, X)
    assert "%1 = sin %0 in the first trace, %1 = cos %0 in the second" in violation.why


def test_ops_that_are_missing():
    counts = iter([1, 3])

    def step(x):
        for _ in range(next(counts)):
            x = jnp.sin(x)
        return x

    (violation,) = compare(step, X)
    assert "1 ops in the first trace, 3 ops in the second" in violation.why


def test_operand_that_changes():
    order = iter([True, False])

    def step(x, y):
        return x - y if next(order) else y - x

    (violation,) = compare(step, X, X)
    assert "%0 in the first trace, %1 in the second" in violation.why


def test_result_that_changes():
    order = iter([True, False])

    def step(x, y):
        return (x, y) if next(order) else (y, x)

    (violation,) = compare(step, X, X)
    assert violation.where == "the results of `step`"
    assert violation.op is None


def test_shape_that_changes():
    sizes = iter([2, 3])
    (violation,) = compare(lambda x: x[0] + np.ones(next(sizes)), X)
    assert violation.rule == "python-work"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2.0 + float("nan"),
        lambda x: x + jnp.array([1.0, float("nan"), 0.0, 2.0]),
        lambda x: x + np.arange(4),
        lambda x: jax.grad(lambda y: jax.nn.relu(y).sum())(x),
        lambda x: lax.scan(lambda c, y: (c + y, c * y), 0.0, x),
        lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.checkpoint(jnp.sin)(x),
        lambda x: x + jax.random.normal(jax.random.key(3), (4,)),
        lambda x: jax.random.split(jax.random.key(3)),
        lambda x: jax.pure_callback(lambda v: v, x, x),
        lambda x: jax.scipy.sparse.linalg.cg(lambda v: 2.0 * v, x)[0],
        lambda x: x.astype(jnp.bfloat16) + jnp.bfloat16(1.5),
        lambda x: jnp.sort(x) @ jnp.ones((4, 3)),
    ],
)
def test_pure_functions_trace_the_same(function):
    assert compare(function, X) == ()


def make_marked(*marks):
    """A graph of nothing but marks, each a name, a stream and an event."""
    ops = [
        Op(
            (),
            types.SimpleNamespace(name=f"tg_{name}"),
            (),
            {"stream": stream, "event": event},
            (),
            Origin("a.py:1 in step"),
        )
        for name, stream, event in marks
    ]
    return Graph("step", (), (), tuple(ops), ())


def test_streams_and_events_made_while_tracing_have_new_numbers():
    first = make_marked(("record", 1, 1), ("wait", 2, 1), ("record", 2, 2), ("wait", 1, 2))
    same = make_marked(("record", 1, 7), ("wait", 3, 7), ("record", 3, 8), ("wait", 1, 8))
    assert compare_traces(first, same) == ()


@pytest.mark.parametrize(
    "second",
    [
        make_marked(("record", 1, 1), ("record", 1, 1), ("wait", 2, 1)),
        make_marked(("record", 1, 1), ("record", 1, 2), ("wait", 2, 2)),
        make_marked(("record", 1, 1), ("record", 1, 2), ("wait", 1, 1)),
    ],
)
def test_order_of_streams_that_changes(second):
    first = make_marked(("record", 1, 1), ("record", 1, 2), ("wait", 2, 1))
    (violation,) = compare_traces(first, second)
    assert violation.rule == "python-work"


def test_key_closed_over_is_compared_by_its_words():
    seeds = iter([0, 0, 1])
    keys = [jax.random.key(next(seeds)) for _ in range(3)]
    assert is_same_array(keys[0], keys[1])
    assert not is_same_array(keys[0], keys[2])


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        (np.float32("nan"), np.float32("nan"), True),
        (0.0, -0.0, False),
        (1, True, False),
        (1, 1.0, False),
        (np.zeros(2), np.zeros(3), False),
        (np.zeros((0, 2)), np.zeros((0, 2)), True),
        (np.ones(2, ml_dtypes.bfloat16), np.ones(2, ml_dtypes.bfloat16), True),
        (np.ones(2, ml_dtypes.bfloat16), np.zeros(2, ml_dtypes.bfloat16), False),
        (np.ones((3, 3))[:, ::2], np.ones((3, 2)), True),
    ],
)
def test_arrays_are_the_same_by_type_and_bytes(first, second, is_same):
    assert is_same_array(first, second) == is_same


def test_parameters():
    assert is_same_param(lambda: 1, lambda: 2)
    assert not is_same_param(np.float32, np.float64)
    assert not is_same_param((1, 2), (1, 2, 3))
    assert not is_same_param((1, (0.0,)), (1, (-0.0,)))
    assert is_same_param([np.zeros(2), "a"], [np.zeros(2), "a"])
    assert not is_same_param([np.zeros(2)], [np.ones(2)])
    # Equal, but printed in the order that they were made in.
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert repr(one) != repr(other)
    assert is_same_param(one, other)
    assert not is_same_param(one, frozenset([0, 9]))


def test_arrays_of_other_types_are_shown_by_type():
    assert show_arrays(np.zeros(2), np.zeros(3)) == ("f64[2]", "f64[3]")
