"""tg.comm on real GPUs; the values on one device are checked wherever there is a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg

pytestmark = pytest.mark.usefixtures("gpu")
HOST = np.arange(12_000, dtype=np.float32).reshape(3, 4000)


@pytest.fixture(params=[1, 2], ids=["one GPU", "two GPUs"])
def gpus(gpu, request):
    """One GPU, twice, and two of them where there are as many."""
    found = jax.local_devices()
    if len(found) < request.param:
        pytest.skip(f"needs {request.param} GPUs; there is {len(found)}")
    return [found[0], found[request.param - 1]]


def check(found, wanted, device):
    assert found.devices() == {device}
    np.testing.assert_array_equal(found, wanted)


def test_copies_pieces_and_sums(gpus):
    second = gpus[1]
    copies = tg.comm.broadcast(HOST, gpus)
    for copy, device in zip(copies, gpus, strict=True):
        check(copy, HOST, device)
    check(tg.comm.reduce_add(copies, second), HOST * 2, second)
    pieces = tg.comm.scatter(copies[0], gpus, dim=1)
    check(pieces[1], HOST[:, 2000:], second)
    check(tg.comm.gather(pieces, dim=1, destination=second), HOST, second)


def test_coalesced(gpus):
    arrays = [
        jnp.full((n, 3), n, dtype)
        for n in range(1, 30)
        for dtype in ("float32", "bfloat16", "int32")
    ]
    rows = tg.comm.broadcast_coalesced(arrays, gpus, buffer_size=1000)
    sums = tg.comm.reduce_add_coalesced(rows, gpus[1], buffer_size=1000)
    for index, array in enumerate(arrays):
        for row, device in zip(rows, gpus, strict=True):
            check(row[index], array, device)
        check(sums[index], np.asarray(array) + np.asarray(array), gpus[1])


def test_copies_wait_for_graphs_and_graphs_for_copies(gpus):
    """Results of a long replay are copied at once, and a replay reads what is still on its way."""
    first, second = (jax.local_devices().index(each) for each in gpus)

    @tg.capture
    def work(x):
        # Without matmuls, whose bits may differ from GPU to GPU.
        for _ in range(20):
            x = jnp.sin(x + jnp.flip(x, 0))
        return x

    x = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32)
    with tg.device(first):
        wanted = np.asarray(work(np.asarray(work(x))))
    for _ in range(3):
        with tg.device(first):
            (there,) = tg.comm.broadcast(work(x), [second])
        with tg.device(second):
            found = work(there)
        check(found, wanted, gpus[1])
