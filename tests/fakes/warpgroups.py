"""Instructions of warpgroups and barriers in shared memory, for kernels that run on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.fakes.kernels_on_host import run_kernel_on_host
from tracegraph.lowering.kernels.own_kernel import OwnKernel

# A product is made as late as it may be: when it is waited for.
_HOST = """
struct Place { const char *at; };
static Place find_place(const char *shared) { return {shared}; }
static Place move_place(Place place, int bytes) { return {place.at + bytes}; }
static float find_part(Place place, int line, int depth, int turned) {
    const char *at = place.at + line / 8 * LINE_BYTES + depth / 8 * DEPTH_BYTES;
    at += turned ? depth % 8 * 16 + line % 8 * 2 : line % 8 * 16 + depth % 8 * 2;
    return widen(*(const bfloat16 *)at);
}
struct Product { float *sums; Place left, right; int adds, left_turned, right_turned; };
struct Queue { Product products[64]; int count, committed[8], groups; bool is_open; };
static Queue queues[MULTIPLIERS];
static void open_products() { queues[threadIdx.x].is_open = true; }
template <int left_turned, int right_turned>
static void multiply_async(float (&sums)[64], Place left, Place right, int adds) {
    Queue &queue = queues[threadIdx.x];
    if (!queue.is_open) abort();
    queue.products[queue.count++] = {sums, left, right, adds, left_turned, right_turned};
}
static void commit_products() {
    Queue &queue = queues[threadIdx.x];
    queue.committed[queue.groups++] = queue.count;
    queue.is_open = false;
}
static void multiply(const Product &product) {
    int thread = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16 + thread / 4;
    for (int each = 0; each < 64; ++each) {
        int row = first + each / 2 % 2 * 8, column = each / 4 * 8 + thread % 4 * 2 + each % 2;
        float sum = product.adds ? product.sums[each] : 0;
        for (int depth = 0; depth < 16; ++depth)
            sum += find_part(product.left, row, depth, product.left_turned)
                   * find_part(product.right, column, depth, product.right_turned);
        product.sums[each] = sum;
    }
}
template <int count> static void await_products() {
    Queue &queue = queues[threadIdx.x];
    int done = 0;
    look_later();
    while (queue.groups > count) {
        for (; done < queue.committed[0]; ++done) multiply(queue.products[done]);
        memmove(queue.committed, queue.committed + 1, sizeof queue.committed - sizeof(int));
        --queue.groups;
    }
    memmove(queue.products, queue.products + done, (queue.count - done) * sizeof(Product));
    queue.count -= done;
    for (int group = 0; group < queue.groups; ++group) queue.committed[group] -= done;
    sync_lanes();
}
struct Barrier { short expected, missing; int phase; };
static void open_barrier(Barrier *barrier, int count) {
    *barrier = {(short)count, (short)count, 0};
}
static void arrive_at(Barrier *barrier) {
    if (--barrier->missing > 0) return;
    barrier->missing = barrier->expected; barrier->phase ^= 1;
}
static void await_phase(Barrier *barrier, int phase) {
    while (barrier->phase == phase) look_later();
}
static void show_stored() {}
template <int count> static void take_registers() {}
template <int count> static void give_registers() {}
static unsigned narrow_pair(float low, float high) {
    return narrow(low, bfloat16()).bits | (unsigned)narrow(high, bfloat16()).bits << 16;
}
"""
_GPU_ONLY = "#ifdef __CUDACC__"


def run_warpgroups_on_host(kernel: OwnKernel, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    """Runs a launch of a kernel of warpgroups on arrays, one per parameter, in place.

    Args:
        kernel: its instructions are in the second section that is for a GPU only.
        arrays: its parameters; each begins at a multiple of 16 bytes.
    """
    head, _, rest = kernel.source.partition(_GPU_ONLY)
    common, _, own = rest.partition(_GPU_ONLY)
    source = f"{head}{_GPU_ONLY}{common}{_HOST}{_GPU_ONLY}{own}"
    run_kernel_on_host(dataclasses.replace(kernel, source=source), arrays)
