"""Recording a function part by part: what ends a part, and what the part returns."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.breaks.part_capture import compute_part, trace_part
from tracegraph.breaks.part_trace import PartTrace, TracedValue
from tracegraph.decorator import capture
from tracegraph.jax_internals import make_array_aval, send_ops_to
from tracegraph.runtime.errors import InternalError


def make_argument(trace: PartTrace, shape: tuple[int, ...] = (3,), dtype: Any = np.float32) -> Any:
    return trace.make_argument(make_array_aval(shape, np.dtype(dtype), weak_type=False), 0)


@pytest.fixture
def reads():
    return []


@pytest.fixture
def trace(reads):
    def read(value: TracedValue, kind: str) -> Any:
        reads.append((value.aval.str_short(), kind))
        values = {"array": np.asarray(2.5), "bool": True, "float": 2.5, "complex": 2j}
        return values.get(kind, 2)

    return PartTrace(read)


def test_only_values_that_python_holds_are_alive(trace):
    x = make_argument(trace)
    with send_ops_to(trace):
        held = x + 1
        temporary: Any = jnp.sin(held)
        last: Any = temporary * 2
        del temporary
    alive = trace.list_alive()
    assert [value.index for value in alive] == [held.value.index, last.value.index]
    recorded = trace.close([value.tracer for value in alive])
    assert recorded.inputs == (x.value,)
    results = compute_part(recorded.jaxpr, [jnp.zeros(3)])
    np.testing.assert_array_equal(results[0], jnp.ones(3))
    np.testing.assert_array_equal(results[1], jnp.sin(jnp.ones(3)) * 2)


def test_a_value_of_an_earlier_part_becomes_an_input(trace):
    x = make_argument(trace)
    with send_ops_to(trace):
        y = x + 1
        trace.close([trace.find(y.value)])
        z = y * x
        recorded = trace.close([trace.find(z.value)])
    assert recorded.inputs == (y.value, x.value)
    (product,) = compute_part(recorded.jaxpr, [jnp.full(3, 2.0), jnp.full(3, 3.0)])
    assert (product == 6).all()


def test_an_input_that_is_added_is_the_last_one_and_there_once(trace):
    x, y = make_argument(trace), make_argument(trace)
    with send_ops_to(trace):
        z = x - y
        trace.add_input(x.value)
        recorded = trace.close([trace.find(z.value)])
    assert recorded.inputs == (y.value, x.value)
    (difference,) = compute_part(recorded.jaxpr, [jnp.full(3, 1.0), jnp.full(3, 3.0)])
    assert (difference == 2).all()


def test_a_tracer_of_another_part_is_found(trace):
    """The planted fault: a part that uses a value which is no input of it."""
    x = make_argument(trace)
    with send_ops_to(trace):
        y = x + 1
        stale = trace.find(y.value)
        trace.close([stale])
        recorded = trace.close([trace.find((stale * 2).value)])
    captured: Any = capture(lambda x: x, name="f")
    with pytest.raises(InternalError, match="value of another part"):
        trace_part(captured._prepare((jnp.zeros(3),), {}), recorded.jaxpr)


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (bool, "bool"),
        (int, "int"),
        (float, "float"),
        (complex, "complex"),
        (np.asarray, "array"),
        (lambda value: value.item(), "array"),
        (lambda value: value.tolist(), "array"),
        (lambda value: value.tobytes(), "array"),
        (lambda value: f"{value}", "array"),
        (lambda value: np.add(value, 1), "array"),
    ],
)
def test_every_read_goes_through_one_door(trace, reads, read, kind):
    read(make_argument(trace, ()))
    assert reads == [("float32[]", kind)]


@pytest.mark.parametrize("read", [operator.index, range, hex, oct, [4, 5, 6].__getitem__])
def test_an_index_is_read_of_integers(trace, reads, read):
    read(make_argument(trace, (), np.int32))
    assert {kind for _, kind in reads} == {"index"}


@pytest.mark.parametrize("read", [bool, int, float, operator.index])
def test_what_is_no_scalar_is_refused_by_jax(trace, reads, read):
    with pytest.raises((TypeError, ValueError, jax.errors.TracerBoolConversionError)):
        read(make_argument(trace))
    assert reads == []


def test_looks_of_libraries_are_no_reads(trace, reads):
    x, index = make_argument(trace), make_argument(trace, (), np.int32)
    with send_ops_to(trace):
        _ = x[index], jnp.power(x, index), x.at[index].set(0), jnp.arange(3) + index
        _ = jax.lax.fori_loop(0, index, lambda _, y: y * 2, x), x.cumsum(), str(x), repr(x)
    assert reads == []


def test_nothing_is_read_after_the_end(trace):
    x = make_argument(trace, ())
    trace.end()
    with pytest.raises(jax.errors.UnexpectedTracerError):
        bool(x)
