"""Graphs of one pool: what they share, and that nothing of it shows, whatever the order."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.devices import add_in_two_regions
from tracegraph.runtime.memory.private_pool import find_pool

N = 1000


@pytest.fixture
def chain():
    """Three graphs of one pool, each of which has scratch."""
    first = tg.capture(add_in_two_regions(1.0))
    others = [tg.capture(add_in_two_regions(a), pool=first.pool()) for a in (2.0, 3.0)]
    for graphed in (first, *others):
        graphed(jnp.zeros(N))
    return (first, *others)


def find_graph(graphed) -> Any:
    """Returns the graph that was used last."""
    return graphed._latest


def read_sizes(graphed) -> tuple[int, int]:
    size = find_graph(graphed).lowered.definition.arena_size
    return size.kept_bytes, size.scratch_bytes


def test_graphs_of_one_pool_have_their_scratch_in_the_same_memory(chain):
    sizes = [read_sizes(graphed) for graphed in chain]
    assert all(scratch_bytes >= 4 * N for _, scratch_bytes in sizes)
    assert len({find_graph(graphed).replay.arena.ranges[1] for graphed in chain}) == 1
    apart = [tg.capture(add_in_two_regions(a)) for a in (1.0, 2.0, 3.0)]
    for graphed in apart:
        graphed(jnp.zeros(N))
    saved = sum(each.pool_bytes for each in apart) - join_bytes(chain[0])
    assert saved == 2 * find_block_bytes(chain[0])


def join_bytes(graphed) -> int:
    """Returns the bytes of the pool of a captured function, shared or not."""
    pool = find_pool(graphed.pool())
    assert pool is not None
    return pool.reserved_bytes


def find_block_bytes(graphed) -> int:
    arena = find_graph(graphed).replay.arena
    return arena.find_block(arena.size.kept_bytes).nbytes


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_graphs_of_one_pool_may_be_replayed_in_any_order(order, outputs):
    first = tg.capture(add_in_two_regions(1.0), outputs=outputs)
    chain = [first]
    chain += [
        tg.capture(add_in_two_regions(a), pool=first.pool(), outputs=outputs) for a in (2.0, 3.0)
    ]
    x = np.random.default_rng(0).normal(size=N).astype(np.float32)
    for graphed in chain:
        graphed(x)
    results = {index: chain[index](x) for index in order}
    for index, amount in enumerate((1.0, 2.0, 3.0)):
        np.testing.assert_allclose(np.asarray(results[index]), x + amount, rtol=1e-6)


def test_two_successive_graphs_with_eager_work_between_them(chain):
    first, second, _ = chain
    total = jnp.zeros(N)
    for step in range(5):
        y = first(total + step)
        z = second(y)
        total = z.jax() if isinstance(z, tg.Array) else z
        total = total * 0.5
    wanted = np.zeros(N, np.float32)
    for step in range(5):
        wanted = (wanted + step + 3) * 0.5
    np.testing.assert_allclose(np.asarray(total), wanted, rtol=1e-6)


def test_replays_at_once_follow_one_another(chain):
    """The lock of the pool is what keeps two replays from the scratch of each other."""
    first, second, _ = chain
    finished = threading.Event()

    def replay() -> None:
        second(jnp.ones(N))
        finished.set()

    with find_graph(first).lock:
        thread = threading.Thread(target=replay)
        thread.start()
        assert not finished.wait(0.2)
    thread.join()
    assert finished.is_set()


def test_threads_replay_graphs_of_one_pool(chain):
    wrong: list[tuple[int, float]] = []

    def replay(index: int) -> None:
        for step in range(100):
            value = float(jnp.max(chain[index](jnp.full(N, float(step)))))
            if value != step + index + 1:
                wrong.append((step, value))

    threads = [threading.Thread(target=replay, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_signatures_of_one_function_share_scratch():
    graphed = tg.capture(add_in_two_regions(1.0))
    graphed(jnp.zeros(N))
    large = find_graph(graphed)
    graphed(jnp.zeros(N // 2))
    small = find_graph(graphed)
    assert large is not small
    assert large.replay.arena.ranges[1][0] == small.replay.arena.ranges[1][0]
    assert large.lock is small.lock
    np.testing.assert_array_equal(np.asarray(graphed(jnp.ones(N))), np.full(N, 2.0))
    np.testing.assert_array_equal(np.asarray(graphed(jnp.ones(N // 2))), np.full(N // 2, 2.0))


def test_a_graph_with_eager_parts_may_call_another_of_its_pool():
    inner = tg.capture(add_in_two_regions(1.0))
    inner(jnp.zeros(N))

    @tg.capture(mode="partial", pool=inner.pool())
    def outer(x):
        y = x * 2
        z = jnp_callback(y)
        return y + z

    def jnp_callback(y):
        return jax.pure_callback(
            lambda v: np.asarray(inner(jnp.asarray(v))), jax.ShapeDtypeStruct((N,), jnp.float32), y
        )

    for step in range(3):
        x = jnp.full(N, float(step))
        np.testing.assert_array_equal(np.asarray(outer(x)), np.asarray(x) * 4 + 1)
    arenas = [find_graph(outer).replay.arena, find_graph(inner).replay.arena]
    assert arenas[0].lock is not arenas[1].lock
