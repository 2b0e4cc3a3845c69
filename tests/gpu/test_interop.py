"""Order between replays and JAX's own work, with races made likely: nothing here waits by itself.

Each input is still being computed, transferred or overwritten when the replay is enqueued, and each
output is used before the replay can have ended.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import assert_replayed

pytestmark = pytest.mark.usefixtures("gpu")
# A chain of matmuls that keeps a GPU busy for a tenth of a second or more.
WIDTH = 4096
ROUNDS = 200
SIZE = 1 << 20


@jax.jit
def compute_slowly(x, seed):
    """Returns an array of SIZE elements all equal to 1.5 * seed, after a long computation."""
    weight = jnp.eye(x.shape[0], dtype=x.dtype)
    x = jax.lax.fori_loop(0, ROUNDS, lambda _, y: y @ weight, x)
    return jnp.full((SIZE,), seed * 1.5) + x[0, 0]


@pytest.fixture(scope="module")
def make_pending(gpu):
    """Returns what enqueues a long computation and returns its result before it is there."""
    zeros = jnp.zeros((WIDTH, WIDTH))
    compute_slowly(zeros, 1.0).block_until_ready()

    def make(seed):
        return compute_slowly(zeros, float(seed))

    return make


def full(seed):
    return np.full(SIZE, 1.5 * seed, np.float32)


def expected(seed):
    return np.full(SIZE, 3.0 * seed + 1, np.float32)


def make_captured(**options):
    captured = tg.capture(lambda x: x * 2 + 1, **options)
    captured(jnp.zeros(SIZE))
    return captured


@pytest.mark.usefixtures("alone_on_gpu")
def test_the_host_does_not_wait(make_pending):
    captured = make_captured()
    pending = make_pending(2)
    result = captured(pending)
    # Still pending after the call: so the call cannot have waited, and the race was a real one.
    assert not pending.is_ready()
    assert np.array_equal(result, expected(2))


def test_a_replay_waits_for_pending_work_on_its_input(make_pending):
    captured = make_captured()
    for seed in range(5):
        pending = make_pending(seed)
        assert_replayed(captured, captured(pending), (full(seed),))


def test_jax_work_on_an_output_waits_for_the_replay(make_pending):
    captured = make_captured()
    halve = jax.jit(lambda y: (y - 1) / 2)
    for seed in range(5):
        assert np.array_equal(halve(captured(make_pending(seed))), full(seed))


def test_an_operator_on_an_output_waits_for_the_replay(make_pending):
    captured = make_captured()
    for seed in range(3):
        result = captured(make_pending(seed))
        assert float((result + 1).max()) == 3.0 * seed + 2


def test_a_chain_of_replays_and_jax_work(make_pending):
    captured = make_captured()
    shrink = jax.jit(lambda y: (y - 1) / 2)
    x = make_pending(3)
    for _ in range(50):
        x = shrink(captured(x))
    assert np.array_equal(x, full(3))


@pytest.mark.parametrize("poison_count", [1, 8])
def test_an_input_deleted_right_after_the_call(make_pending, poison_count):
    captured = make_captured()
    for seed in range(3):
        pending = make_pending(seed)
        result = captured(pending)
        pending.delete()
        # The next owner of the memory writes NaN over it.
        poison = [jnp.full((SIZE,), jnp.nan) for _ in range(poison_count)]
        assert np.array_equal(result, expected(seed))
        assert all(bool(jnp.isnan(each).all()) for each in poison)


def test_an_input_donated_to_jax_right_after_the_call(make_pending):
    captured = make_captured()
    overwrite = jax.jit(lambda x: x * jnp.nan, donate_argnums=0)
    for seed in range(3):
        pending = make_pending(seed)
        result = captured(pending)
        overwritten = overwrite(pending)
        assert np.array_equal(result, expected(seed))
        assert bool(jnp.isnan(overwritten).all())


@pytest.mark.parametrize("size", [3, SIZE, 16 * SIZE])
def test_a_numpy_input_changed_right_after_the_call(make_pending, size):
    captured = tg.capture(lambda x, y: x * 2 + y[0])
    host = np.zeros(size, np.float32)
    captured(host, make_pending(0))
    for seed in range(1, 4):
        host[:] = seed
        result = captured(host, make_pending(0))
        host[:] = np.nan
        assert np.array_equal(result, np.full(size, 2.0 * seed, np.float32))


def test_many_numpy_inputs_follow_each_other_at_once(make_pending):
    captured = make_captured()
    make_pending(0)
    host = np.zeros(SIZE, np.float32)
    results = []
    for seed in range(20):
        host[:] = 1.5 * seed
        results.append(captured(host))
    for seed, result in enumerate(results):
        assert np.array_equal(result, expected(seed))


def test_a_transfer_that_is_still_pending(make_pending):
    captured = tg.capture(lambda x: x * 2 + 1)
    captured(np.zeros(32 * SIZE, np.float32))
    for seed in range(3):
        host = np.full(32 * SIZE, seed, np.float32)
        result = captured(jax.device_put(host))
        assert float(result.min()) == float(result.max()) == 2.0 * seed + 1


def test_results_read_on_the_host_at_once(make_pending):
    captured = make_captured()
    for seed in range(3):
        assert np.array_equal(np.asarray(captured(make_pending(seed))), expected(seed))
        assert np.array_equal(jax.device_get(captured(make_pending(seed))), expected(seed))


def test_state_given_while_it_is_pending(make_pending):
    captured = tg.capture(lambda s, x: (s + x, s * 1), donate_argnums=0)
    state, _ = captured(jnp.zeros(SIZE), 0.0)
    for seed in range(3):
        pending = make_pending(seed)
        state, before = captured(pending, 1.0)
        after = jax.jit(lambda s: s * 2)(state)
        state, _ = captured(state, 1.0)
        assert np.array_equal(before, full(seed))
        assert np.array_equal(after, (full(seed) + 1) * 2)
        assert np.array_equal(state, full(seed) + 2)
        assert pending.is_deleted()


def test_an_old_result_survives_replays_behind_pending_work(make_pending):
    captured = make_captured()
    old = captured(make_pending(7))
    for seed in range(4):
        captured(make_pending(seed))
    assert np.array_equal(old, expected(7))


def test_results_go_to_another_framework_through_dlpack(make_pending):
    captured = make_captured()
    result = captured(make_pending(4))
    assert np.array_equal(jax.dlpack.from_dlpack(jnp.asarray(result)), expected(4))
