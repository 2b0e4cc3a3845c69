"""Who keeps what alive: delete in the wrong order, force the collector, and count the bytes."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tests.processes import run_program
from tracegraph.lowering import compile as compile_module
from tracegraph.runtime.memory.private_pool import find_pool
from tracegraph.runtime.memory.providers.segment import Segment

X = jnp.arange(1000.0)


def step(state, x):
    return {"w": state["w"] + x}, state["w"] * 2


def list_segments():
    """Returns all segments of this process that anything can still reach."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Segment)]


@pytest.fixture
def count_segment_bytes():
    """Counts the bytes of segments that are newer than the test: older ones may go at any time."""
    # Held, so that no new one has the identity of one of them.
    older = list_segments()

    def count():
        identities = {*map(id, older)}
        return sum(each.nbytes for each in list_segments() if id(each) not in identities)

    return count


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_memory_goes_back_when_function_and_results_are_dropped(outputs, count_segment_bytes):
    captured = tg.capture(step, donate_argnums=0, outputs=outputs)
    state, y = captured({"w": X * 1}, 1.0)
    state, y = captured(state, 1.0)
    assert count_segment_bytes() >= captured.pool_bytes > 0
    assert float(y[1]) == 4.0
    del captured, state, y
    assert count_segment_bytes() == 0


def test_state_outlives_its_graph_and_keeps_the_pool(count_segment_bytes):
    captured = tg.capture(step, donate_argnums=0)
    state, _ = captured({"w": X * 1}, 1.0)
    pool = captured.pool()
    del captured
    assert count_segment_bytes() > 0
    assert_same(state["w"] + 0, X + 1)
    living = find_pool(pool)
    assert living is not None
    assert living.reserved_bytes > 0
    del living
    del state
    assert count_segment_bytes() == 0
    with pytest.raises(tg.TracegraphError, match="there is no pool"):
        find_pool(pool)


def test_read_results_outlive_the_pool(count_segment_bytes):
    captured = tg.capture(step)
    _, unread = captured({"w": X}, 1.0)
    _, read = captured({"w": X}, 2.0)
    read.block_until_ready()
    # A computation of JAX that has not ended holds what it reads.
    values = [(read + 0).block_until_ready(), np.asarray(read)]
    del captured
    gc.collect()
    assert_same(read, X * 2)
    assert_same(unread, X * 2)
    assert count_segment_bytes() == 0
    assert np.array_equal(values[0], values[1])


def test_reset_gives_the_memory_back_once_the_state_is_gone(count_segment_bytes):
    captured = tg.capture(step, donate_argnums=0)
    state, _ = captured({"w": X * 1}, 1.0)
    captured.reset()
    assert_same(state["w"] + 0, X + 1)
    held = count_segment_bytes()
    assert held > 0
    again, _ = captured(state, 1.0)
    assert state["w"].is_deleted()
    assert_same(again["w"] + 0, X + 2)
    del state
    assert count_segment_bytes() == held
    captured.reset()
    del again
    assert count_segment_bytes() == 0


def test_reset_while_results_are_alive():
    captured = tg.capture(lambda x: (x, x * 2))
    results = [captured(X * i) for i in range(3)]
    captured.reset()
    captured(X * 9)
    del captured
    gc.collect()
    for i, (same, double) in enumerate(results):
        assert_same((same, double), (X * i, X * i * 2))


def test_memory_does_not_grow_from_call_to_call():
    captured = tg.capture(step, donate_argnums=0)
    state, y = captured({"w": X * 1}, 1.0)
    size = captured.pool_bytes
    history = []
    for _ in range(50):
        state, y = captured(state, 1.0)
        history.append(y)
    assert captured.pool_bytes == size
    assert all(float(y[0]) == 2.0 * (i + 1) for i, y in enumerate(history))


def test_a_failed_verification_gives_the_memory_back(count_segment_bytes, monkeypatch):
    captured = tg.capture(lambda x: (x * 2, x + 1))
    make_call = compile_module.make_call

    def exchange(*given, **options):
        call = make_call(*given, **options)
        return dataclasses.replace(call, writes=call.writes[::-1])

    monkeypatch.setattr(compile_module, "make_call", exchange)
    with pytest.raises(tg.VerificationError):
        captured(X)
    assert captured.pool_bytes <= captured.lower(X).pool_bytes + 2048
    del captured
    assert count_segment_bytes() == 0


def test_functions_share_a_pool(count_segment_bytes):
    first = tg.capture(lambda x: x * 2)
    second = tg.capture(lambda x: x + 1, pool=first.pool())
    assert first.pool() == second.pool() == tg.PoolId(first.pool().number)
    a, b = first(X), second(X)
    c = first(b)
    assert first.pool_bytes == second.pool_bytes
    del first
    gc.collect()
    d = second(c)
    values = (X * 2, X + 1, (X + 1) * 2, (X + 1) * 2 + 1)
    assert_same((a, b, c, d), values)
    pool = second.pool()
    third = tg.capture(lambda x: -x, pool=pool)
    del second
    assert_same(third(X), -X)
    del third, a, b, c, d, values
    assert count_segment_bytes() == 0


def test_the_users_function_and_arrays_are_let_go():
    class Table:
        values = jnp.ones(3)

    def capture_and_call():
        table = Table()
        captured = tg.capture(lambda x: x + table.values)
        captured(X[:3])
        return weakref.ref(table)

    reference = capture_and_call()
    gc.collect()
    assert reference() is None


def test_plain_arguments_are_let_go_when_they_are_replaced():
    captured = tg.capture(lambda x, tree: x * 2 + tree["a"])
    x, tree = X * 1, {"a": X * 1}
    captured(x, tree)
    references = [weakref.ref(x), weakref.ref(tree["a"])]
    del x, tree
    captured(X * 2, {"a": X * 2})
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_the_collector_may_run_at_any_time():
    program = """
import gc, jax, jax.numpy as jnp
import tracegraph as tg
x = jnp.arange(12.0).reshape(3, 4)
gc.collect()
gc.set_threshold(200, 2, 2)
for index in range(12):
    def make(index):
        def function(x):
            return jax.hessian(lambda v: (v**3).sum() * index)(x), x * 2, cycle
        cycle = x * index
        captured = tg.capture(function, verify=bool(index % 2))
        function.captured = captured
        return captured
    captured = make(index)
    for scale in range(3):
        result = captured(x * scale)
    assert float(result[1][0, 1]) == 4.0
print("done")
"""
    assert run_program(program) == "done\n"


def test_results_at_interpreter_exit():
    program = """
import jax.numpy as jnp, tracegraph as tg
captured = tg.capture(lambda s: (s * 2, s.sum()), donate_argnums=0)
state, total = captured(jnp.ones(1000))
state, total = captured(state)
"""
    assert run_program(program) == ""


def test_jax_arrays_made_of_state_keep_nothing(count_segment_bytes):
    captured = tg.capture(step, donate_argnums=0)
    state, _ = captured({"w": X * 1}, 1.0)
    value = state["w"].jax()
    assert type(value) is not type(state["w"])
    del captured, state, _
    assert count_segment_bytes() == 0
    assert_same(value, X + 1)
    assert isinstance(value, jax.Array)


def test_a_lowered_capture_keeps_no_argument_alive():
    captured = tg.capture(lambda state, x: (state["w"] + x, x), donate_argnums=0)
    state, x = {"w": jnp.ones(1000)}, jnp.ones(1000)
    given = [weakref.ref(state["w"]), weakref.ref(x)]
    lowered = captured.lower(state, x)
    del state, x
    assert [each() for each in given] == [None, None]
    result, _ = lowered.instantiate()({"w": jnp.ones(1000)}, jnp.ones(1000))
    assert np.array_equal(result, np.full(1000, 2.0))
