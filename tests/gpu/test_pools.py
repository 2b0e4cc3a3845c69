"""Pools on a GPU: shared by captures to the byte, with every provider, and what users allocate."""

from __future__ import annotations

import concurrent.futures
import gc
import pathlib
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import assert_replayed
from tests.gpu.subprocesses import run_python
from tracegraph.memory import MemPool, empty_cache, memory_allocated, memory_reserved, use_mem_pool
from tracegraph.runtime.definition.graph import ArenaSize
from tracegraph.runtime.memory.sizes import round_exact

pytestmark = pytest.mark.usefixtures("gpu")
N = 512
SETTINGS = {
    "jax": "",
    "cuda": "provider:cuda",
    "cuda_vmm": "expandable_segments:True",
    "cuda_async": "backend:cudaMallocAsync",
}


@pytest.fixture(autouse=True)
def clean(gpu: Any) -> Iterator[None]:
    gc.collect()
    empty_cache()
    before = memory_reserved(), memory_allocated()
    yield
    gc.collect()
    empty_cache()
    assert (memory_reserved(), memory_allocated()) == before


def chain(x: jax.Array) -> jax.Array:
    """Has a matmul between two others, which a graph has in scratch."""
    return (x @ x @ x + 1) @ x / N


def read_size(captured: tg.GraphedFunction) -> ArenaSize:
    assert captured._latest is not None
    return captured._latest.lowered.definition.arena_size


@pytest.mark.parametrize("way", ["function", "handle", "MemPool", "id of a MemPool"])
def test_three_captures_share(way: str) -> None:
    before = memory_reserved()
    owner = MemPool() if "MemPool" in way else None
    pool: Any = {"handle": tg.graph_pool_handle(), "MemPool": owner}.get(way)
    pool = owner.id if owner is not None and way != "MemPool" else pool
    functions = []
    for index in range(3):
        captured = tg.capture(lambda x, n=index: chain(x) + n, pool=pool)
        captured(jnp.ones((N, N)))
        functions.append(captured)
        pool = captured.pool() if way == "function" else pool
    sizes = [read_size(each) for each in functions]
    kept = sum(round_exact(size.kept_bytes) for size in sizes)
    scratch = max(size.scratch_bytes for size in sizes)
    shared = round_exact(scratch) if scratch else 0
    assert memory_reserved() - before == kept + shared == functions[0].pool_bytes
    x = jnp.asarray(np.random.default_rng(0).normal(size=(N, N)).astype(np.float32))
    for index in (2, 0, 1, 1, 2, 0):
        assert_replayed(functions[index], functions[index](x), (x,))


@pytest.mark.parametrize("count", [1, 1000, 1 << 20, 40_000_000])
def test_the_bytes_before_a_capture(count: int) -> None:
    captured = tg.capture(lambda s, x: (s + x, jnp.sort(s)), donate_argnums=0, verify=False)
    arguments = jnp.ones(count), jnp.ones(count)
    lowered = captured.lower(*arguments)
    before = memory_reserved()
    graph = lowered.instantiate()
    assert memory_reserved() - before == lowered.pool_bytes
    state, y = graph(*arguments)
    assert (float(state[-1]), float(y[0])) == (2.0, 1.0)


def test_what_users_allocate_in_a_pool() -> None:
    pool = MemPool()
    with use_mem_pool(pool):
        address = tg.memory.caching_allocator_alloc(1 << 20)
    assert [each["total_size"] for each in pool.snapshot()] == [2 << 20]
    captured = tg.capture(lambda s: s * 2, donate_argnums=0, pool=pool)
    state = captured(jnp.ones(N))
    assert len(pool.snapshot()) == 2
    tg.memory.caching_allocator_delete(address)
    del captured
    gc.collect()
    assert float(state[0]) == 2.0


def test_statistics_of_a_train_loop_stand_still() -> None:
    captured = tg.capture(lambda s, x: (s * 0.5 + x, (s * x).sum()), donate_argnums=0)
    state, loss = captured(jnp.ones((N, N)), 1.0)
    before = tg.memory.memory_stats()
    for _ in range(100):
        state, loss = captured(state, 1.0)
    assert tg.memory.memory_stats() == before
    assert float(loss) > 0


PROGRAM = """
    import gc, jax, jax.numpy as jnp, numpy as np, os, pathlib, time, tracegraph as tg
    from tracegraph.runtime.default_device import find_any_device
    print(find_any_device().allocator.provider.name)
    step = tg.capture(lambda s, x: ({"w": s["w"] @ x}, s["w"].sum()), donate_argnums=0)
    shared = tg.capture(lambda x: (x @ x @ x, x + 1), pool=step.pool())
    state, eye = {"w": jnp.ones((300, 300))}, jnp.eye(300)
    state, total = step(state, eye)
    for _ in range(100):
        state, total = step(state, eye)
        y, z = shared(state["w"].jax())
    assert float(total) == 90000.0, total
    assert np.array_equal(z, np.full((300, 300), 2.0))
    assert np.allclose(y, 300.0 * 300.0), y
    assert tg.memory.memory_allocated() == step.pool_bytes > 0
    pool, side = tg.memory.MemPool(), tg.Stream()
    with tg.memory.use_mem_pool(pool), tg.stream(side):
        address = tg.memory.caching_allocator_alloc(30 << 20)
    tg.memory.caching_allocator_delete(address)
    kept = state
    del step, shared, state, pool
    gc.collect()
    assert np.array_equal(kept["w"], np.ones((300, 300)))
    del kept
    gc.collect()
    tg.memory.empty_cache()
    assert tg.memory.memory_reserved() == 0, tg.memory.memory_summary()
    gate = pathlib.Path(os.environ["GATE"])
    while not gate.exists():
        time.sleep(0.01)
    if gate.read_text() == "end":
        raise SystemExit
    big = tg.capture(lambda x: (x, x * 2), verify=False)
    free = tg.memory.mem_get_info()[0]
    try:
        big.lower(jax.ShapeDtypeStruct((free // 4,), jnp.float32)).instantiate()
    except tg.OutOfMemoryError as error:
        print(error.anchor)
    assert float(big(jnp.ones(1000))[1][0]) == 2.0
"""


def run_with_provider(name: str, gate: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs the program; it waits for a file before it takes all memory that is free on the GPU.

    Args:
        name: of the provider.
        gate: the file; with the text "end" in it the program ends there.
    """
    return run_python(
        ["-X", "faulthandler", "-c", textwrap.dedent(PROGRAM)],
        variables={"TRACEGRAPH_ALLOC_CONF": SETTINGS[name], "GATE": str(gate)},
    )


def open_gate(gate: pathlib.Path, text: str) -> None:
    """Makes a file with a text in it, at once."""
    before = gate.with_suffix(".new")
    before.write_text(text)
    before.rename(gate)


def check_provider(name: str, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [name, "out-of-memory"]
    for trouble in ("Exception ignored", "Fatal Python error"):
        assert trouble not in done.stderr, done.stderr


def test_jax_as_the_provider_under_captures(tmp_path: pathlib.Path) -> None:
    """Not alone: it has no more than its part of the GPU, and JAX waits for memory twice."""
    gate = tmp_path / "gate"
    open_gate(gate, "go on")
    check_provider("jax", run_with_provider("jax", gate))


@pytest.fixture(scope="module")
def finish_provider(
    gpu: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    """Opens the gate of a provider of CUDA's; the programs of all begin beside each other.

    Those whose tests another worker has end at the gate: nothing would keep the GPU free for them.
    """
    folder = tmp_path_factory.mktemp("gates")
    gates = {name: folder / name for name in SETTINGS if name != "jax"}
    with concurrent.futures.ThreadPoolExecutor(len(gates)) as pool:
        running = {name: pool.submit(run_with_provider, name, gate) for name, gate in gates.items()}

        def finish(name: str) -> subprocess.CompletedProcess[str]:
            open_gate(gates[name], "go on")
            return running[name].result()

        yield finish
        for gate in gates.values():
            if not gate.exists():
                open_gate(gate, "end")


@pytest.mark.usefixtures("alone_on_gpu")
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "jax"])
def test_every_provider_of_cuda_under_captures(
    name: str, finish_provider: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    """Alone, because it takes all memory that is free on the GPU."""
    check_provider(name, finish_provider(name))
