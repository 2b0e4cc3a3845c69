"""Kernels that exchange arrays between GPUs, run by threads of this machine, all GPUs at once."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tests.fakes.kernels_on_host import align_array, compile_with_launch
from tracegraph.lowering.kernels.collectives import write_collective
from tracegraph.runtime.definition.collective_nodes import Exchange
from tracegraph.runtime.definition.placement import pack_table
from tracegraph.runtime.definition.signals import count_signal_bytes

# Blocks and threads of each GPU: fewer than there, so that elements come in several turns.
BLOCKS, THREADS = 2, 8
# Between each two of its steps a thread may be overtaken by all others.
_MEETING = """
static void send_count(unsigned *place, unsigned count) { look_later(); *place = count; }
static unsigned read_count(const unsigned *place) { look_later(); return *place; }
static void store_vector(void *global, Vector v) {
    if ((unsigned long)global % 16) abort();
    *(Vector *)global = v;
}
"""
_LAUNCH = """
static Table *tables; static char **sources, **targets; static int blocks_each, count, device;
static void enter(int rank, int index) {
    device = rank / blocks_each;
    blockIdx = {rank % blocks_each, 0, 0}; threadIdx = {index, 0, 0};
}
static void run() {
    for (int here = device * count, end = here + count; here < end; ++here) {
        SYMBOL(tables[here], sources[here], targets[here]);
        sync_block();
    }
}
extern "C" void launch_all(Table *given, char **from, char **to, int devices, int launches,
                           int each, int threads) {
    tables = given; sources = from; targets = to; blocks_each = each; count = launches;
    gridDim = {each, 1, 1}; blockDim = {threads, 1, 1};
    run_cluster(threads, each * devices, 0, enter, run);
}
"""

Edit: TypeAlias = Callable[[str], str]
Arrays: TypeAlias = Sequence[np.ndarray[Any, Any]]


class RanksOnHost:
    """The memory through which the kernels of some GPUs meet, from launch to launch.

    Args:
        members: how many GPUs.
    """

    def __init__(self, members: int) -> None:
        zeros = np.zeros(count_signal_bytes(members), np.uint8)
        self.signals = [align_array(zeros) for _ in range(members)]

    def run(
        self, exchange: Exchange, sources: Arrays, targets: Arrays, edit: Edit | None = None
    ) -> None:
        """Runs one exchange of all GPUs, in place; `run_all` with one launch."""
        self.run_all(exchange, [sources], [targets], edit)

    def run_all(
        self,
        exchange: Exchange,
        sources: Sequence[Arrays],
        targets: Sequence[Arrays],
        edit: Edit | None = None,
    ) -> None:
        """Runs an exchange several times: no GPU waits for another between two launches.

        Args:
            exchange: among all GPUs.
            sources: of each launch the array of each GPU; each begins at a multiple of 16 bytes,
                unless that is tried.
            targets: the same.
            edit: plants a fault in the source.
        """
        members, launches = range(len(self.signals)), range(len(sources))
        signals = [each.ctypes.data for each in self.signals]
        places = [
            [[each.ctypes.data for each in launch] for launch in arrays]
            for arrays in (sources, targets)
        ]
        tables = b"".join(
            pack_table(exchange, number, places[0][launch], places[1][launch], signals)
            for number in members
            for launch in launches
        )
        pointers = [
            (ctypes.c_void_p * (len(signals) * len(sources)))(
                *(given[launch][number] for number in members for launch in launches)
            )
            for given in places
        ]
        library = _compile(exchange, edit)
        library.launch_all(tables, *pointers, len(signals), len(sources), BLOCKS, THREADS)


@functools.cache
def _compile(exchange: Exchange, edit: Edit | None) -> ctypes.CDLL:
    kernel = write_collective(exchange)
    source = kernel.source if edit is None else edit(kernel.source)
    assert edit is None or source != kernel.source
    head, _, rest = source.partition("#endif\n")
    launch = _LAUNCH.replace("SYMBOL", kernel.symbol)
    return compile_with_launch(f"{head}#endif\n{_MEETING}{rest}", launch)
