"""A captured function where JAX traces: it becomes part of that program, as `jit` in `jit` does."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same

X = jnp.arange(4.0)


@functools.partial(tg.capture, static_argnames="n", donate_argnums=0)
def wave(x, y=1.5, *, n=2):
    for _ in range(n):
        x = jnp.sin(x) * y
    return x.sum()


jitted = jax.jit(wave.__wrapped__, static_argnames="n")

PLACES = {
    "jit": lambda f: jax.jit(f, static_argnames="n")(X, y=2.0, n=3),
    "jit, static, keyword": lambda f: jax.jit(lambda x: f(x, n=3) + f(x) + f(x, y=x))(X),
    "jit, values only": lambda f: jax.jit(lambda y: f(X) + f(np.ones(4), 2) + y)(1.0),
    "grad": lambda f: jax.grad(f)(X),
    "value_and_grad": lambda f: jax.value_and_grad(lambda x: f(x, n=1))(X),
    "hessian": lambda f: jax.hessian(f)(X),
    "vmap": lambda f: jax.vmap(f)(jnp.ones((3, 2))),
    "vmap, values only": lambda f: jax.vmap(lambda x: f(X) + x)(X),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "linearize": lambda f: jax.linearize(f, X)[1](X),
    "vjp": lambda f: jax.vjp(f, X)[1](1.0),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(X),
    "eval_shape": lambda f: jax.tree.map(lambda t: jnp.zeros(t.shape), jax.eval_shape(f, X)),
    "scan": lambda f: jax.lax.scan(lambda c, _: (c * f(c), None), X, None, length=2)[0],
    "while": lambda f: jax.lax.while_loop(lambda c: f(c) < 0, lambda c: c + f(c), X),
    "cond": lambda f: jax.lax.cond(X[0] > 0, f, lambda x: f(x) + 1, X),
    "capture": lambda f: tg.capture(lambda x: f(x) + f(x, n=1))(X),
    "partial capture": lambda f: tg.capture(lambda x: f(x) + f(x, n=1), mode="partial")(X),
    "capture of grad": lambda f: tg.capture(jax.grad(f))(X),
    "disable_jit": lambda f: call_with(jax.disable_jit(), lambda: f(X)),
    "partial": lambda f: jax.jit(functools.partial(f, n=1))(X),
}
# There it is a graphed callable, see tests/public/graphed_callables/test_differentiated_calls.py.
GRAPHED = ("grad", "value_and_grad", "vjp")


@pytest.fixture(scope="module", autouse=True)
def released():
    """No memory of the module's own function is left for the tests of other modules."""
    yield
    wave.reset()


def call_with(context, function):
    with context:
        return function()


@pytest.mark.parametrize("place", PLACES)
def test_a_captured_function_is_traced_into_another_program(place):
    wave.clear_cache()
    before = wave.cache_info().captures
    for _ in range(2):
        assert_same(PLACES[place](wave), PLACES[place](jitted))
        assert wave.cache_info().captures == before + (place in GRAPHED)
    # Also when it has a graph already; donation is ignored.
    x = jnp.array(X, copy=True)
    assert_same(wave(x), jitted(X))
    assert x.is_deleted()
    assert_same(PLACES[place](wave), PLACES[place](jitted))
    assert wave.cache_info().captures == before + 1 + (place in GRAPHED)
    assert not X.is_deleted()


def test_a_custom_rule_may_call_a_captured_function():
    # Outside of jit JAX computes the rule at once: donation would take X, as jit's would.
    inner = tg.capture(wave.__wrapped__, static_argnames="n")

    @jax.custom_vjp
    def double(x):
        return inner(x)

    double.defvjp(lambda x: (inner(x), x), lambda x, g: (g * inner(x) * x,))
    assert_same(jax.grad(double)(X), jitted(X) * X)


def test_jax_sees_one_call_of_it():
    jaxpr = jax.make_jaxpr(wave)(X)
    assert [eqn.params["name"] for eqn in jaxpr.eqns] == ["wave"]
    assert str(jaxpr) == str(jax.make_jaxpr(jitted)(X))
    assert jax.eval_shape(wave, X) == wave.eval_shape(X) == jax.eval_shape(jitted, X)


def test_values_in_a_trace_are_computed_at_once_where_jax_says_so():
    def outer(f, x):
        with jax.ensure_compile_time_eval():
            known = float(f(jnp.ones(4)))
        return x * known

    wanted = outer(jitted, X)
    for transform in (jax.jit, tg.capture):
        for _ in range(2):
            assert_same(transform(functools.partial(outer, wave))(X), wanted)
        wave(jnp.ones(4))


def test_static_leaves_of_arguments_and_results():
    def apply(layer, x):
        return {"activation": layer["activation"], "y": layer["activation"](layer["w"] * x)}

    captured = tg.capture(apply)
    for activation in (jnp.sin, jnp.cos):
        layer = {"w": X, "activation": activation, "name": "dense"}
        wanted = activation(X * 2.0)
        for outer in (jax.jit, tg.capture):
            # The layer is closed over, since `jax.jit` itself takes arrays only.
            assert_same(outer(lambda x, layer=layer: captured(layer, x)["y"])(2.0), wanted)
        assert tg.capture(functools.partial(captured, layer))(2.0)["activation"] is activation
        assert captured.eval_shape(layer, 2.0)["y"].shape == (4,)


def test_the_ir_shows_its_ops_with_the_users_line():
    def outer(f, x):
        return f(x, n=1) + 1

    graph, unwrapped = (
        tg.capture(functools.partial(outer, f), name="outer").trace(X)
        for f in (wave, wave.__wrapped__)
    )
    assert str(graph) == str(unwrapped)
    assert "in wave" in str(graph)


def test_state_may_be_an_argument_or_closed_over():
    step = tg.capture(lambda w: w + 1, donate_argnums=0, name="step")
    w = step(jnp.zeros(4))
    assert_same(jax.jit(lambda y: step(w) + y)(X), w + 1 + X)
    assert_same(jax.vmap(step)(w), w + 1)
    assert_same(w, jnp.ones(4))
    assert_same(step(w), jnp.ones(4) + 1)


side = tg.Stream()


@tg.capture
def forked(x):
    main = tg.current_stream()
    side.wait_stream(main)
    with tg.stream(side):
        doubled = x * 2
    main.wait_stream(side)
    return doubled + 1


def list_streams(graph):
    # The numbers of events are new in each trace.
    return [(op.name, op.origin.stream, op.params.get("stream")) for op in graph.ops]


def test_streams_inside_survive_whatever_was_traced_before():
    wanted = list_streams(tg.capture(lambda x: forked.__wrapped__(x) * 3).trace(X).graph)
    assert {stream for _, stream, _ in wanted} == {0, side.number}
    # Traces that JAX could find again: one without a capture, one for another capturing stream.
    assert_same(jax.jit(forked)(X), X * 2 + 1)
    for _ in range(2):
        outer = tg.capture(lambda x: forked(x) * 3)
        assert list_streams(outer.trace(X).graph) == wanted
        assert_same(outer(X), (X * 2 + 1) * 3)
    # Twice in one capture, on two streams.
    other = tg.Stream()

    def twice(f, x):
        first, main = f(x), tg.current_stream()
        other.wait_stream(main)
        with tg.stream(other):
            second = f(x)
        main.wait_stream(other)
        return first + second

    graphs = [tg.capture(functools.partial(twice, f)) for f in (forked, forked.__wrapped__)]
    assert_same(graphs[0](X), graphs[1](X))
    assert list_streams(graphs[0].trace(X).graph) == list_streams(graphs[1].trace(X).graph)


def test_python_work_inside_is_found_by_the_second_trace():
    calls = []
    inner = tg.capture(lambda x: calls.append(1) or x * len(calls))
    assert_same(jax.jit(inner)(X), X)
    with pytest.raises(tg.CaptureError) as caught:
        tg.capture(lambda x: inner(x) + 1)(X)
    assert caught.value.anchor == "python-work"


def test_it_is_traced_once_per_trace_of_the_outer_function():
    calls = []
    inner = tg.capture(lambda x: calls.append(1) or x * 2)
    tg.capture(lambda x: inner(inner(inner(x))), verify=False)(X)
    assert len(calls) == 2
    jax.jit(lambda x: inner(inner(x)))(X)
    jax.jit(lambda x: inner(x))(X)
    assert len(calls) == 3


def test_errors_inside_name_the_users_line():
    inner = tg.capture(lambda x: x * float(x[0]))
    with pytest.raises(tg.CaptureError) as caught:
        tg.capture(lambda x: inner(x) + 1, name="outer")(X)
    assert caught.value.anchor == "host-read"
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(inner)(X)
    assert_same(tg.capture(lambda x: x + 1)(X), X + 1)


def test_a_left_over_tracer_is_refused():
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(X)
    with pytest.raises(tg.CaptureError) as caught:
        wave(kept[0])
    assert caught.value.anchor == "leaked-tracer"


USES = {
    "jit": lambda captured: jax.jit(lambda x: captured(x))(X),
    "capture": lambda captured: tg.capture(lambda x: captured(x))(X),
    "eval_shape": lambda captured: captured.eval_shape(X),
}


@pytest.mark.parametrize("use", USES)
def test_memory_goes_with_the_last_name(use):
    held = np.ones(8, np.float32)
    captured = tg.capture(lambda x, held=held: x + held.sum())
    references = weakref.ref(held), weakref.ref(captured)
    was_on = gc.isenabled()
    gc.disable()
    try:
        USES[use](captured)
        del held, captured
        # Constants and programs of JAX's own.
        jax.clear_caches()
        assert [reference() for reference in references] == [None, None]
    finally:
        if was_on:
            gc.enable()
