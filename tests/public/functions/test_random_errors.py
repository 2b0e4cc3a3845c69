"""`tg.random` in the wrong place, on several threads, and with faults planted in it."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.draws import X, assert_same, draw, list_eager, read_words
from tests.raw_graphs import record
from tracegraph.randomness import random_calls
from tracegraph.randomness.generator_state import GeneratorState

# Of no type that a checker knows.
ANYTHING: Any = None
TRACED = {
    "jit": lambda gen: jax.jit(lambda: draw(gen))(),
    "scan": lambda gen: jax.lax.scan(lambda c, _: (c + draw(gen), None), X, None, length=2)[0],
    "checkpoint": lambda gen: jax.checkpoint(lambda x: x + draw(gen))(X),
}


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("name", TRACED)
def test_a_function_that_jax_traces_on_its_own_gets_no_constant(name, is_captured):
    gen = tg.random.Generator(0)
    run = tg.capture(lambda: TRACED[name](gen)) if is_captured else lambda: TRACED[name](gen)
    with pytest.raises(tg.CaptureError, match="traces on its own") as caught:
        run()
    assert read_words(caught.value) == ["where", "why", "fix"]
    assert "draws.py" in str(caught.value)
    assert_same([draw(gen)], list_eager(0, 1))


def test_a_captured_function_under_jit_gets_no_constant():
    gen = tg.random.Generator(0)
    step = tg.capture(lambda x: x + draw(gen))
    step(X)
    with pytest.raises(tg.CaptureError, match="traces on its own"):
        jax.jit(step)(X)


def test_a_graphed_callable_takes_keys_as_arguments():
    gen = tg.random.Generator(0)
    with pytest.raises(tg.TracegraphError, match="take no generator") as caught:
        tg.make_graphed_callables(lambda x: x + draw(gen), (X,))
    assert read_words(caught.value) == ["where", "why", "fix"]
    assert_same([draw(gen)], list_eager(0, 1))


def test_g24_a_failed_capture_leaves_the_state():
    gen = tg.random.Generator(7)
    for body in (lambda: float(draw(gen)[0]), lambda: draw(gen) + jnp.zeros(3)):
        with pytest.raises((tg.CaptureError, TypeError)):
            tg.capture(body)()
        with pytest.raises((tg.CaptureError, TypeError)):
            record(body)
    assert_same([tg.capture(lambda: draw(gen))(), draw(gen)], list_eager(7, 2))


@pytest.mark.parametrize(
    "call",
    [
        lambda gen: gen.manual_seed(0),
        lambda gen: gen.seed(),
        lambda gen: gen.get_state(),
        lambda gen: gen.set_state(None),
        lambda gen: gen.clone_state(),
    ],
)
def test_g18_states_are_neither_read_nor_set_inside_a_capture(call):
    gen = tg.random.Generator(0)
    with pytest.raises(tg.CaptureError, match="inside a capture") as caught:
        tg.capture(lambda: (draw(gen), call(gen))[0])()
    assert read_words(caught.value) == ["where", "why", "fix"]
    with pytest.raises(tg.CaptureError, match="inside a capture"):
        record(lambda: (draw(gen), call(gen))[0])


def run_in_thread(function):
    raised = []

    def run():
        try:
            function()
        except tg.TracegraphError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def test_a_generator_used_by_two_captures_at_once_is_refused():
    gen = tg.random.Generator(0)
    step = tg.capture(lambda: draw(gen))
    g = tg.CUDAGraph()
    with tg.graph(g):
        y = draw(gen)
        raised = run_in_thread(step)
    (error,) = raised
    assert "another thread captures `graph`" in str(error)
    assert read_words(error) == ["where", "why", "fix"]
    g.replay()
    assert run_in_thread(step) == []
    assert_same([y, draw(gen)], list_eager(0, 3)[::2])


def test_g23_captures_with_generators_of_their_own_run_at_once():
    first, second = tg.random.Generator(1), tg.random.Generator(2)
    step = tg.capture(lambda: draw(second))
    g = tg.CUDAGraph()
    with tg.graph(g):
        y = draw(first)
        assert run_in_thread(step) == []
    g.replay()
    assert_same([y, step()], [list_eager(1, 1)[0], list_eager(2, 2)[1]])


def test_threads_draw_each_key_once():
    gen = tg.random.Generator(1)
    step = tg.capture(lambda: jax.random.bits(gen.next_key()))
    step()
    found = []
    threads = [
        threading.Thread(target=lambda: found.extend([int(step()) for _ in range(5)]))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gen.manual_seed(1)
    jax.random.bits(gen.next_key())
    assert sorted(found) == sorted(int(jax.random.bits(gen.next_key())) for _ in range(15))


@pytest.mark.parametrize("seed", [1.5, "1", None, True, 2**64, -(2**63) - 1])
def test_seeds_are_ints_of_64_bits(seed):
    with pytest.raises(tg.ConfigError, match="seed"):
        tg.random.Generator(seed)


@pytest.mark.parametrize("state", [np.zeros(3, np.uint32), np.zeros(6, np.int32), "state"])
def test_states_are_what_get_state_returns(state):
    gen = tg.random.Generator(1)
    with pytest.raises(tg.ConfigError, match="uint32 array of shape"):
        gen.set_state(state)
    assert_same([draw(gen)], list_eager(1, 1))


def test_only_generators_are_registered():
    g, gen = tg.CUDAGraph(), tg.random.Generator(1)
    other: Any = 1
    with pytest.raises(tg.ConfigError, match="generator is expected, not int"):
        g.register_generator_state(other)
    with pytest.raises(tg.ConfigError, match="generator is expected"):
        gen.graphsafe_set_state(other)
    with pytest.raises(tg.ConfigError, match="generator is expected"), tg.random.fork_rng([other]):
        pass
    g.register_generator_state(gen)
    with tg.graph(g):
        y = draw(gen)
    with pytest.raises(tg.CaptureError, match="holds a graph already"):
        g.register_generator_state(gen)
    g.replay()
    assert_same([y], list_eager(1, 1))


def enter_fork(given):
    with tg.random.fork_rng(given):
        pass


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tg.random.Generator(0, "gpu7"), "device='gpu7' is not a device of JAX"),
        (lambda: tg.random.Generator(0, 0), "device=0 is not a device of JAX"),
        (lambda: tg.random.set_rng_state_all(ANYTHING), "cannot be NoneType"),
        (lambda: tg.random.set_rng_state_all([]), "cannot be 0 states"),
        (lambda: enter_fork(tg.random.Generator(0)), "a list of generators is expected"),
        (lambda: enter_fork(1), "a list of generators is expected, not int"),
        (lambda: enter_fork([1]), "a generator is expected, not int"),
    ],
)
def test_what_is_no_device_state_or_generator_is_refused(call, words):
    before = tg.random.get_rng_state()
    with pytest.raises(tg.ConfigError, match=words) as caught:
        call()
    assert read_words(caught.value) == ["where", "why", "fix"]
    np.testing.assert_array_equal(tg.random.get_rng_state(), before)


def test_a_platform_is_a_device_too():
    gen = tg.random.Generator(3, "cpu")
    assert gen.device == "cpu"
    assert_same([draw(gen)], list_eager(3, 1))


def test_planted_a_replay_that_does_not_count_is_caught(monkeypatch):
    gen = tg.random.Generator(5)
    step = tg.capture(lambda: draw(gen))
    monkeypatch.setattr(GeneratorState, "advance", lambda self, count: None)
    found = [step(), step()]
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        assert_same(found, list_eager(5, 2))


def test_planted_a_state_that_is_baked_in_is_caught(monkeypatch):
    gen = tg.random.Generator(5)
    make_input = random_calls.binding

    def bake(states):
        return make_input({state: state.read_input() for state in states})

    monkeypatch.setattr(random_calls, "binding", bake)
    step = tg.capture(lambda: draw(gen))
    found = [step(), step()]
    with pytest.raises(AssertionError):
        assert_same(found, list_eager(5, 2))
