"""Inner calls: what is traced anew, and what is kept."""

import jax
import jax.numpy as jnp

from tracegraph.options import read_options
from tracegraph.runtime.streams.stream import Stream, stream
from tracegraph.runtime.streams.stream_capture import tracing
from tracegraph.tracing.inner_call import InnerCall

X = jnp.arange(3.0)
GIVEN = {
    "static_argnums": 1,
    "static_argnames": (),
    "donate_argnums": 0,
    "donate_argnames": (),
    "mode": "whole",
    "outputs": "fresh",
    "pool": None,
    "stream": None,
    "verify": True,
    "static_leaves": "auto",
    "control_flow": "allow",
    "prefer": "auto",
    "numerics": "xla",
    "debug_nans": False,
    "warm": True,
    "name": None,
}


def make_call():
    traces = []

    def scale(x, factor):
        traces.append(factor)
        return x * factor

    return InnerCall(scale, read_options(scale, GIVEN)), traces


def test_outside_of_captures_one_jit_is_kept():
    call, traces = make_call()
    for _ in range(2):
        assert jnp.array_equal(call((X, 2), {}), X * 2)
        assert jnp.array_equal(call((X,), {"factor": 3}), X * 3)
    assert traces == [2, 3]
    assert not X.is_deleted()
    assert "name=scale" in str(jax.make_jaxpr(lambda x: call((x, 2), {}))(X))
    call.clear()
    call((X, 2), {})
    assert traces == [2, 3, 2]


def test_in_a_capture_it_is_traced_once_for_each_trace_and_stream():
    call, traces = make_call()
    call((X, 2), {})
    for _ in range(2):
        with tracing("outer", Stream()):
            for _ in range(2):
                call((X, 2), {})
            with stream(Stream()):
                call((X, 2), {})
    assert traces == [2] * 5


def test_clearing_what_was_never_traced_is_nothing():
    call, _ = make_call()
    call.clear()
    assert "_jitted" not in vars(call)
