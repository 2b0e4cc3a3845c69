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
    const char *at = place.at + line / 8 * COLUMN_BYTES + depth / 8 * DEPTH_BYTES;
    at += turned ? depth % 8 * 16 + line % 8 * 2 : line % 8 * 16 + depth % 8 * 2;
    return widen(*(const bfloat16 *)at);
}
struct Product { float *sums; unsigned left[4]; Place right; int adds, turned; };
struct Queue { Product products[64]; int count, committed[8], groups; bool is_open; };
static Queue queues[MULTIPLIERS];
static void open_products() { queues[threadIdx.x].is_open = true; }
template <int turned>
static void multiply_async(float (&sums)[64], const unsigned (&left)[4], Place right, int adds) {
    Queue &queue = queues[threadIdx.x];
    if (!queue.is_open) abort();
    Product product = {sums, {left[0], left[1], left[2], left[3]}, right, adds, turned};
    queue.products[queue.count++] = product;
}
static void commit_products() {
    Queue &queue = queues[threadIdx.x];
    queue.committed[queue.groups++] = queue.count;
    queue.is_open = false;
}
/* As PTX lays out the left side: words of two values, of two rows and then of eight depths on. */
static float find_left(int number, int upper, int depth) {
    const Product &product = queues[threadIdx.x / 4 * 4 + depth % 8 / 2].products[number];
    return widen(bfloat16{(unsigned short)(product.left[depth / 8 * 2 + upper] >> depth % 2 * 16)});
}
static void multiply(int number) {
    const Product &product = queues[threadIdx.x].products[number];
    for (int each = 0; each < 64; ++each) {
        int column = each / 4 * 8 + threadIdx.x % 4 * 2 + each % 2;
        float sum = product.adds ? product.sums[each] : 0;
        for (int depth = 0; depth < 16; ++depth)
            sum += find_left(number, each / 2 % 2, depth)
                   * find_part(product.right, column, depth, product.turned);
        product.sums[each] = sum;
    }
}
template <int count> static void await_products() {
    Queue &queue = queues[threadIdx.x];
    int done = 0;
    look_later();
    sync_lanes();
    while (queue.groups > count) {
        for (; done < queue.committed[0]; ++done) multiply(done);
        memmove(queue.committed, queue.committed + 1, sizeof queue.committed - sizeof(int));
        --queue.groups;
    }
    sync_lanes();
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
static Halves load_pair(const void *global) {
    if ((unsigned long)global % 8) abort();
    return *(const Halves *)global;
}
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
