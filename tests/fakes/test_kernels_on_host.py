"""Threads of a kernel on the host: barriers hold, and a missing one shows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fakes.kernels_on_host import align_array, run_kernel_on_host
from tracegraph.lowering.kernels.own_kernel import OwnKernel
from tracegraph.runtime.definition.nodes import LaunchShape

_SIZE = 256
# Each thread reads what the one across from it wrote, in its block or in the cluster's other one.
_SOURCE = """
struct bfloat16 { unsigned short bits; };
struct float16 { unsigned short bits; };
struct float8e5m2 { unsigned char bits; };
struct float8e4m3 { unsigned char bits; };
struct Vector { unsigned words[4]; };
#ifdef __CUDACC__
#endif
KERNEL(256) CLUSTERED(2) crossed(float *from, float *to) {
    float *mine = (float *)shared_memory();
    int thread = threadIdx.x, rank = find_cluster_rank();
    mine[thread] = from[rank * 256 + thread];
    BARRIER;
    float other = READ;
    sync_cluster();
    to[rank * 256 + thread] = other;
}
"""


@pytest.mark.parametrize(
    ("barrier", "read", "holds"),
    [
        ("sync_cluster()", "read_peer(mine + 255 - thread, 1 - rank)", True),
        ("sync_block()", "mine[255 - thread]", True),
        ("arrive_cluster(); await_cluster()", "mine[255 - thread]", True),
        ("sync_block()", "read_peer(mine + 255 - thread, 1 - rank)", False),
        ("(void)0", "mine[255 - thread]", False),
    ],
)
def test_what_others_wrote_is_read_after_a_barrier(barrier: str, read: str, *, holds: bool) -> None:
    source = _SOURCE.replace("BARRIER", barrier).replace("READ", read)
    given = np.arange(2 * _SIZE, dtype=np.float32) + 1
    halves = given.reshape(2, _SIZE)[:, ::-1]
    arrays = [align_array(given), align_array(np.zeros(2 * _SIZE, np.float32))]
    shape = LaunchShape((2, 1, 1), (_SIZE, 1, 1), (2, 1, 1), 4 * _SIZE)
    run_kernel_on_host(OwnKernel("crossed", source, shape), arrays, 2)
    expected = halves[::-1] if "peer" in read else halves
    assert np.array_equal(arrays[1], expected.ravel()) == holds
