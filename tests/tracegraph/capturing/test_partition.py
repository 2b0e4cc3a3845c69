"""Partition: which ops share a region, and what a region waits for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from tracegraph.capturing.partition import partition_graph
from tracegraph.lowering.request import CaptureRequest
from tracegraph.passes.pipeline import DEFAULT_PASSES, run_passes
from tracegraph.passes.resolve_donation import ResolveDonation
from tracegraph.runtime.streams.stream import Event, Stream, current_stream, stream
from tracegraph.runtime.streams.stream_capture import tracing
from tracegraph.tracing.trace import trace_function

jax.config.update("jax_platforms", "cpu")
X = jnp.arange(1.0, 5.0)


def partition(
    function: Callable[..., Any],
    *args: Any,
    donated: Collection[int] = (),
    eager: Collection[str] = ("pure_callback",),
) -> CaptureRequest:
    """Returns the request; ops with a name in ``eager`` run between graphs."""
    capturing = Stream()
    with tracing("f", capturing):
        graph = trace_function(
            function, args, {}, name="f", capturing_stream=capturing.number
        ).graph
    graph, _ = run_passes(graph, (*DEFAULT_PASSES, ResolveDonation(frozenset(donated))))
    return partition_graph(
        graph,
        input_names=[f"x{index}" for index in range(len(graph.inputs))],
        donated=donated,
        uncapturable=[index for index, op in enumerate(graph.ops) if op.name in eager],
    )


def evaluate(request: CaptureRequest, *args: Any, constants: Any = ()) -> list[Any]:
    """Runs the regions in order, as the meaning of a request says."""
    arrays = [*args, *constants]
    buffers = {spec.buffer.name: x for spec, x in zip(request.inputs, arrays, strict=True)}
    for region in request.regions:
        results = region.function(*[buffers[spec.name] for spec in region.inputs])
        buffers.update(zip((spec.name for spec in region.outputs), results, strict=True))
    return [np.asarray(buffers[output.buffer.name]) for output in request.outputs]


def describe(request: CaptureRequest) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(region.name, region.place.stream, region.place.waits) for region in request.regions]


def call_back(x: Any) -> Any:
    return jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_one_stream_is_one_region():
    request = partition(lambda x: jnp.sin(x) + jnp.cos(x), X)
    assert describe(request) == [("region0", 0, ())]
    assert [spec.name for spec in request.regions[0].inputs] == ["x0"]
    np.testing.assert_allclose(evaluate(request, X), [jnp.sin(X) + jnp.cos(X)], rtol=1e-6)


def test_regions_by_stream_wait_for_what_was_recorded():
    side = Stream()

    def fork(x):
        side.wait_stream(current_stream())
        with stream(side):
            y = jnp.sin(x)
        z = jnp.cos(x)
        current_stream().wait_stream(side)
        return y * z

    request = partition(fork, X)
    assert describe(request) == [
        ("region0", side.number, ()),
        ("region1", 0, ()),
        ("region2", 0, ("region0",)),
    ]
    np.testing.assert_allclose(evaluate(request, X), [jnp.sin(X) * jnp.cos(X)], rtol=1e-6)


def test_event_orders_only_what_came_before_it():
    side, middle = Stream(), Event()

    def record_between(x):
        side.wait_stream(current_stream())
        with stream(side):
            y = x + 1
            middle.record()
            z = x * 3
        current_stream().wait_event(middle)
        total = y * 2
        current_stream().wait_stream(side)
        return total + z

    request = partition(record_between, X)
    number = side.number
    assert describe(request) == [
        ("region0", number, ()),
        ("region1", number, ()),
        ("region2", 0, ("region0",)),
        ("region3", 0, ("region1",)),
    ]
    np.testing.assert_allclose(evaluate(request, X), [(X + 1) * 2 + X * 3])


def test_event_without_a_wait_splits_nothing():
    def record_without_wait(x):
        y = x + 1
        Event().record()
        return y * 2

    assert describe(partition(record_without_wait, X)) == [("region0", 0, ())]


def test_wait_that_orders_nothing_new_splits_nothing():
    side = Stream()

    def wait_twice(x):
        side.wait_stream(current_stream())
        with stream(side):
            y = x + 1
        current_stream().wait_stream(side)
        z = y * 2
        current_stream().wait_stream(side)
        return z + x

    assert describe(partition(wait_twice, X)) == [
        ("region0", side.number, ()),
        ("region1", 0, ("region0",)),
    ]


def test_wait_passes_through_a_stream_without_work_of_its_own():
    relay, side = Stream(), Stream()

    def pass_on(x):
        y = x + 1
        relay.wait_stream(current_stream())
        side.wait_stream(relay)
        with stream(side):
            z = x * 3
        current_stream().wait_stream(side)
        return y + z

    assert describe(partition(pass_on, X)) == [
        ("region0", 0, ()),
        ("region1", side.number, ("region0",)),
        ("region2", 0, ("region1",)),
    ]


def test_covered_use_does_not_split_the_producers_stream():
    side = Stream()

    def use_later(x):
        y = x + 1
        side.wait_stream(current_stream())
        z = x * 5
        with stream(side):
            w = y * 3
        z = z - 1
        current_stream().wait_stream(side)
        return z + w

    assert describe(partition(use_later, X)) == [
        ("region0", 0, ()),
        ("region1", 0, ()),
        ("region2", side.number, ("region0",)),
        ("region3", 0, ("region2",)),
    ]


def test_backward_ops_carry_the_stream_of_their_forward_op_and_wait_by_data():
    side = Stream()

    def loss(x):
        side.wait_stream(current_stream())
        with stream(side):
            y = jnp.sin(x)
        z = jnp.cos(x)
        current_stream().wait_stream(side)
        return jnp.sum(y * z)

    request = partition(jax.grad(loss), X)
    assert [(place, stream_) for place, stream_, _ in describe(request)] == [
        ("region0", side.number),
        ("region1", 0),
        ("region2", 0),
        ("region3", side.number),
    ]
    # The user did not write the last wait: the backward pass synchronises where its values flow.
    assert [waits for _, _, waits in describe(request)] == [(), (), ("region0",), ("region2",)]
    np.testing.assert_allclose(evaluate(request, X), [jax.grad(loss)(X)], rtol=1e-6)


def test_implicit_wait_closes_the_region_that_it_waits_for():
    side = Stream()

    def loss(x):
        side.wait_stream(current_stream())
        with stream(side):
            y = jnp.sin(x)
        current_stream().wait_stream(side)
        z = jnp.sum(y * x)
        side.wait_stream(current_stream())
        with stream(side):
            w = jnp.tanh(y * z)
        current_stream().wait_stream(side)
        return jnp.sum(w * y)

    request = partition(jax.value_and_grad(loss), X)
    value, gradient = jax.value_and_grad(loss)(X)
    got = evaluate(request, X)
    np.testing.assert_allclose(got[0], value, rtol=1e-5)
    np.testing.assert_allclose(got[1], gradient, rtol=1e-5)


def test_eager_op_is_a_region_of_its_own_after_everything_and_before_the_rest():
    side = Stream()

    def with_callback(x):
        side.wait_stream(current_stream())
        with stream(side):
            y = x + 1
        z = x * 2
        current_stream().wait_stream(side)
        called = call_back(z)
        side.wait_stream(current_stream())
        with stream(side):
            w = y - 1
        current_stream().wait_stream(side)
        return called + w

    request = partition(with_callback, X)
    number = side.number
    assert describe(request) == [
        ("region0", number, ()),
        ("region1", 0, ()),
        ("region2", 0, ("region0",)),
        ("region3", number, ("region2",)),
        ("region4", 0, ("region3",)),
    ]
    captured = [region.place.is_captured for region in request.regions]
    assert captured == [True, True, False, True, True]
    np.testing.assert_allclose(evaluate(request, X), [X * 4 + X])


def test_eager_op_on_a_side_stream_waits_for_all_streams():
    side = Stream()

    def call_back_aside(x):
        y = x + 1
        side.wait_stream(current_stream())
        with stream(side):
            z = call_back(x)
        current_stream().wait_stream(side)
        return y + z

    request = partition(call_back_aside, X)
    assert [region.place.is_captured for region in request.regions] == [True, False, True]
    np.testing.assert_allclose(evaluate(request, X), [X + 1 + X * 2])


def test_eager_ops_keep_their_order():
    order: list[str] = []

    def note(word):
        def run(x):
            order.append(word)
            return np.asarray(x)

        return run

    def two_callbacks(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        first = io_callback(note("first"), shape, x, ordered=False)
        second = io_callback(note("second"), shape, x, ordered=False)
        return second + first

    request = partition(two_callbacks, X, eager=["io_callback"])
    evaluate(request, X)
    assert order == ["first", "second"]


def test_nothing_to_compute_needs_no_region():
    assert partition(lambda x: x, X).regions == ()
