"""Breaks of `mode="partial"`: donation, effects, errors, generators, threads, other captures."""

import gc
import threading
import time
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tests.public.breaks.test_breaks import (
    branch,
    find_tree,
    make_vector,
    use_bool_of_a_float,
    use_several,
)


def train(state, x):
    state = jax.tree.map(lambda leaf: leaf + x.sum(), state)
    if x[0] > 0:
        return jax.tree.map(lambda leaf: leaf * 2, state), x.max()
    return state, x.min()


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_donated_state_is_taken_by_the_last_part(outputs):
    captured = tg.capture(train, mode="partial", donate_argnums=0, outputs=outputs)
    state = first = {"w": jnp.ones(3), "b": jnp.zeros(())}
    expected = {"w": jnp.ones(3), "b": jnp.zeros(())}
    for value in (1.0, 2.0, -5.0, 1.0, -5.0, -5.0, 1.0):
        x = make_vector(value)
        state, peak = captured(state, x)
        expected, top = train(expected, x)
        assert_same((state, peak), (expected, top))
    assert first["w"].is_deleted()
    # Resident: the same leaves come back.
    again, _ = captured(state, make_vector(1.0))
    address = again["w"].data_ptr()
    after, _ = captured(again, make_vector(1.0))
    assert after["w"].data_ptr() == address


def test_a_donated_argument_of_an_uncaptured_rest_is_consumed():
    def scale(state, x):
        return state * float(x.sum())

    captured = tg.capture(scale, mode="partial", donate_argnums=0)
    state, x = jnp.ones(3), make_vector(1.0)
    assert_same(captured(state, x), scale(jnp.ones(3), x))
    assert state.is_deleted()
    with pytest.raises(tg.CaptureError, match="deleted"):
        captured(state, x)
    assert_same(captured(jnp.ones(3), x), scale(jnp.ones(3), x))


def test_an_error_in_a_later_part_loses_nothing():
    def fail(state, x):
        state = state + 1
        if x[0] > 0:
            raise KeyError("mine")
        return state

    captured = tg.capture(fail, mode="partial", donate_argnums=0)
    state = jnp.ones(3)
    with pytest.raises(KeyError, match="mine"):
        captured(state, make_vector(1.0))
    assert not state.is_deleted()
    with pytest.raises(KeyError, match="mine"):
        captured(state, make_vector(1.0))
    assert_same(captured(state, make_vector(-1.0)), jnp.ones(3) + 1)
    assert state.is_deleted()


def test_python_work_that_differs_is_refused():
    def use_clock(x):
        return x * time.time() if x[0] > 0 else x

    captured = tg.capture(use_clock, mode="partial")
    with pytest.raises(tg.CaptureError, match="changes from one trace to the next"):
        captured(make_vector(1.0))
    assert_same(captured(make_vector(-1.0)), make_vector(-1.0))


def test_another_order_of_reads_is_refused():
    runs = []

    def unsteady(x):
        runs.append(None)
        y = x + 1
        if len(runs) % 2:
            return y if y[0] > 0 else x
        return y + int(y[0])

    with pytest.raises(tg.CaptureError) as caught:
        tg.capture(unsteady, mode="partial")(make_vector(1.0))
    assert "python-work" in str(caught.value)


NESTED = {
    "jit": lambda x: jax.jit(lambda y: y if y.sum() > 0 else -y)(x),
    "scan": lambda x: jax.lax.scan(lambda c, y: (c + float(y), y), 0.0, x),
    "vmap": lambda x: jax.vmap(lambda y: y if y > 0 else -y)(x),
}


@pytest.mark.parametrize("name", sorted(NESTED))
def test_reads_in_traced_bodies_are_refused(name):
    captured: Any = tg.capture(NESTED[name], mode="partial")
    with pytest.raises(tg.CaptureError) as caught:
        captured(make_vector(1.0))
    assert "test_breaks" in str(caught.value)


def test_effects_happen_once_per_call():
    seen = []

    def note(x):
        io_callback(lambda value: seen.append(float(value)), None, x[0], ordered=True)
        if x[0] > 0:
            io_callback(lambda value: seen.append(float(value)), None, x[1], ordered=True)
        return x * 2

    captured = tg.capture(note, mode="partial")
    for value in (1.0, -4.0, 1.0):
        assert_same(captured(make_vector(value)), make_vector(value) * 2)
    jax.effects_barrier()
    assert seen == [1.0, 2.0, -4.0, 1.0, 2.0]


def test_gradients_of_eager_code_and_of_jit():
    captured = tg.capture(use_bool_of_a_float, mode="partial")
    x = make_vector(1.0)
    assert_same(
        jax.grad(lambda v: captured(v * 3).sum())(x),
        jax.grad(lambda v: use_bool_of_a_float(v * 3).sum())(x),
    )
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(captured)(x)


def test_captured_functions_inside_are_cut_too():
    inner = tg.capture(branch, mode="partial")
    captured = tg.capture(lambda x: inner(x + 1), mode="partial", name="outer")
    for value in (1.0, -9.0, 2.0):
        x = make_vector(value)
        assert_same(captured(x), branch(x + 1))
    assert find_tree(captured).part_count == 3


def test_graphed_callables_inside_are_parts():
    inner = tg.make_graphed_callables(lambda x: jnp.sin(x) * 2, (make_vector(1.0),))

    def outer(x):
        y = inner(x)
        return inner(y) if y.sum() > 0 else y

    captured = tg.capture(outer, mode="partial")
    for value in (0.5, -3.0, 0.5):
        x = make_vector(value)
        assert_same(captured(x), outer(x))


def test_keys_and_generators():
    generator, twin = tg.random.Generator(3), tg.random.Generator(3)

    def draw(x, source):
        noise = jax.random.normal(source.next_key(), (2,))
        if x[0] > 0:
            return noise, jax.random.split(source.next_key())
        return noise, jax.random.split(jax.random.key(1))

    captured = tg.capture(lambda x: draw(x, generator), mode="partial")
    for value in (1.0, -2.0, 1.0):
        x = make_vector(value)
        assert_same(captured(x), draw(x, twin))
    assert (generator.get_state() == twin.get_state()).all()


def test_memory_goes_with_the_function_without_the_collector():
    gc.collect()
    gc.disable()
    try:
        captured = tg.capture(branch, mode="partial")
        results = [captured(make_vector(value)) for value in (1.0, -9.0)]
        graph = find_tree(captured).root.part.find()
        gone = weakref.ref(graph)
        del captured, results, graph
        assert gone() is None
    finally:
        gc.enable()


def test_two_threads_take_different_branches():
    captured = tg.capture(use_several, mode="partial")
    barrier = threading.Barrier(2)
    failures = []

    def work(value):
        x = make_vector(value)
        barrier.wait(timeout=120)
        try:
            for _ in range(3):
                assert_same(captured(x), use_several(x))
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1.0, -3.0)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
    assert find_tree(captured).calls == 6


def test_objects_of_nnx_are_updated():
    nnx = pytest.importorskip("flax.nnx")

    class Counter(nnx.Module):
        def __init__(self):
            self.total = nnx.Variable(jnp.zeros(3))

    def step(model, x):
        model.total[...] = model.total[...] + x
        if model.total[...].sum() > 4:
            model.total[...] = model.total[...] * 0.5
        return model.total[...].max()

    model, twin = Counter(), Counter()
    captured = tg.capture(step, mode="partial")
    for value in (1.0, 2.0, -9.0, 2.0):
        x = make_vector(value)
        assert_same(captured(model, x), step(twin, x))
        assert_same(model.total[...], twin.total[...])


def test_keywords_statics_and_other_spellings():
    def scale(x, *, factor=2.0, name="a"):
        y = x * factor if name == "a" else x
        return y + 1 if y[0] > 0 else y

    captured = tg.capture(scale, mode="partial", static_argnames="name")
    calls: list[dict[str, Any]] = [
        {},
        {"factor": 3.0},
        {"name": "b"},
        {"factor": jnp.ones(3), "name": "a"},
    ]
    for kwargs in calls:
        for value in (1.0, -3.0):
            x = make_vector(value)
            assert_same(captured(x, **kwargs), scale(x, **kwargs))
            assert_same(captured(x=x, **kwargs), scale(x, **kwargs))


def test_large_and_small_arrays_that_are_closed_over():
    small, large = jnp.arange(3.0), jnp.ones((512, 1024))

    def add(x):
        y = x + small
        return y + large[0, :3] if y[0] > 0 else y - large[1, :3]

    captured = tg.capture(add, mode="partial")
    for value in (1.0, -3.0, 1.0):
        assert_same(captured(make_vector(value)), add(make_vector(value)))


def test_the_results_of_earlier_calls_keep_their_values():
    captured = tg.capture(branch, mode="partial")
    results = [captured(make_vector(value)) for value in (1.0, 2.0, -9.0, 3.0)]
    for result, value in zip(results, (1.0, 2.0, -9.0, 3.0), strict=True):
        assert_same(result, branch(make_vector(value)))


def test_reset_gives_the_memory_back_and_captures_anew():
    captured = tg.capture(branch, mode="partial")
    assert_same(captured(make_vector(1.0)), branch(make_vector(1.0)))
    captured.reset()
    assert captured.pool_bytes == 0
    assert_same(captured(make_vector(-9.0)), branch(make_vector(-9.0)))
    assert find_tree(captured).part_count == 2


def test_a_reference_that_lives_across_a_read_is_refused():
    def hold(x):
        ref = jax.new_ref(x)
        if x[0] > 0:
            ref[...] = x * 2
        return ref[...]

    with pytest.raises(tg.CaptureError, match="mutable array"):
        tg.capture(hold, mode="partial")(make_vector(1.0))


def test_a_derivative_of_a_captured_function_with_reads_in_forward_mode():
    captured = tg.capture(use_bool_of_a_float, mode="partial")
    x = make_vector(1.0)
    assert_same(jax.jvp(captured, (x,), (x,)), jax.jvp(use_bool_of_a_float, (x,), (x,)))


def test_probes_show_what_the_parts_of_the_last_call_computed():
    def step(x):
        y = tg.probe("doubled", x * 2)
        return tg.probe("more", y + 1) if y[0] > 0 else y - 1

    captured = tg.capture(step, mode="partial")
    for value, names in ((1.0, {"doubled", "more"}), (-3.0, {"doubled"})) * 2:
        x = make_vector(value)
        assert_same(captured(x), step(x))
        shown = captured.probes()
        assert shown.keys() == names
        assert_same(shown["doubled"], x * 2)
