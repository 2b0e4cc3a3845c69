"""Kernels of our own in C++, compiled for this machine and run by its threads."""

from __future__ import annotations

import atexit
import ctypes
import functools
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tracegraph.lowering.kernels.merged_loops import SYMBOL
from tracegraph.lowering.kernels.own_kernel import OwnKernel
from tracegraph.runtime.nodes import LaunchShape

# What the source has of its own for a GPU, between this line and the end of the condition.
_GPU_ONLY = "#ifdef __CUDACC__"
_HOST = """
#include <cmath>
#include <cstring>
struct Dim { int x, y, z; };
#define CLUSTERED(threads, blocks) extern "C" void
#define KERNEL(threads) extern "C" void
#define DEVICE static inline
struct Any { void *address; template <class T> operator T *() const { return (T *)address; } };
static float literal(unsigned bits) { float a; std::memcpy(&a, &bits, 4); return a; }
static float __uint_as_float(unsigned bits) { return literal(bits); }
static unsigned read_bits(float a) { unsigned bits; std::memcpy(&bits, &a, 4); return bits; }
static float maximum(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
static float minimum(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }
static float rsqrtf(float a) { return 1.0f / std::sqrt(a); }
static float widen(float a) { return a; }
static float widen(bfloat16 a) { return literal((unsigned)a.bits << 16); }
static float widen(float16 a) { _Float16 b; std::memcpy(&b, &a, 2); return b; }
static float widen_of_pair(unsigned short pair, int which, float8e5m2) {
    return widen(float16{(unsigned short)((pair >> which * 8 & 255) << 8)});
}
static float widen_of_pair(unsigned short pair, int which, float8e4m3) {
    unsigned bits = pair >> which * 8 & 255, size = bits & 127;
    float value = size == 127 ? NAN : std::ldexp((float)(size % 8 + (size > 7) * 8),
                                                (size > 7 ? (int)(size / 8) : 1) - 10);
    return bits > 127 ? -value : value;
}
static float narrow(float a, float) { return a; }
static bfloat16 narrow(float a, bfloat16) {
    unsigned bits = read_bits(a);
    bits = a != a ? 0x7FC00000u : bits + 0x7FFFu + (bits >> 16 & 1u);
    return bfloat16{(unsigned short)(bits >> 16)};
}
static float16 narrow(float a, float16) {
    _Float16 b = a; float16 c; std::memcpy(&c, &b, 2); return c;
}
"""
_FLAGS = ["-std=c++20", "-pthread", "-fPIC", "-O0", "-ffp-contract=off", "-w"]
_ONE_THREAD = """
static Dim blockIdx, threadIdx, gridDim, blockDim;
static void wait() {}
"""
_THREADS = """
#ifndef COPIES_AT_ONCE
#define COPIES_AT_ONCE 0
#endif
#include <barrier>
#include <memory>
#include <thread>
#include <vector>
struct Block {
    std::barrier<> barrier; std::vector<char> shared; std::vector<float> lanes;
    std::vector<std::unique_ptr<std::barrier<>>> warps;
    Block(int threads, int bytes) : barrier(threads), shared(bytes + 128), lanes(threads) {
        for (int first = 0; first < threads; first += 32)
            warps.push_back(std::make_unique<std::barrier<>>(std::min(32, threads - first)));
    }
    char *begin() {
        char *start = shared.data(); return start + (128 - (unsigned long)start % 128) % 128;
    }
};
struct Cluster { std::barrier<> barrier; std::vector<std::unique_ptr<Block>> blocks; };
static thread_local Dim blockIdx, threadIdx;
static Dim gridDim, blockDim;
static thread_local Cluster *cluster; static thread_local int rank;
struct Copy { void *to; const void *from; };
static thread_local std::vector<std::vector<Copy>> groups(1);
static Block &own() { return *cluster->blocks[rank]; }
static void wait() {}
static void start_dependents() {}
static char *shared_memory() { return own().begin(); }
static void sync_block() { own().barrier.arrive_and_wait(); }
static thread_local std::vector<std::barrier<>::arrival_token> tokens;
static void arrive_cluster() { tokens.push_back(cluster->barrier.arrive()); }
static void await_cluster() {
    cluster->barrier.wait(std::move(tokens.back())); tokens.pop_back();
}
static void sync_cluster() { arrive_cluster(); await_cluster(); }
static int find_cluster_rank() { return rank; }
static float read_peer(const float *mine, int peer) {
    return *(const float *)(cluster->blocks[peer]->begin() + ((char *)mine - own().begin()));
}
static Vector load_vector(const void *global) {
    if ((unsigned long)global % 16) std::abort();
    return *(const Vector *)global;
}
static void write_peer(float *mine, int peer, float value) {
    *(float *)(cluster->blocks[peer]->begin() + ((char *)mine - own().begin())) = value;
}
/* A copy is made as late as it may be, or at once. */
static void copy_async(void *shared, const void *global) {
    if ((unsigned long)shared % 16 || (unsigned long)global % 16) std::abort();
    if (COPIES_AT_ONCE) std::memcpy(shared, global, 16);
    else groups.back().push_back({shared, global});
}
static unsigned long long find_stream_policy() { return 0; }
static void copy_streamed(void *shared, const void *global, unsigned long long) {
    copy_async(shared, global);
}
static void commit_copies() { groups.push_back({}); }
template <int count> static void await_copies() {
    while ((int)groups.size() - 1 > count) {
        for (auto &copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
        groups.erase(groups.begin());
    }
}
static float shuffle_xor(float value, int mask) {
    int lane = threadIdx.x; auto &warp = *own().warps[lane / 32];
    own().lanes[lane] = value; warp.arrive_and_wait();
    float other = own().lanes[lane ^ mask]; warp.arrive_and_wait();
    return other;
}
"""
_LAUNCH_HEAD = """
extern "C" void launch(void **given, const int *grid, const int *block, int size, int bytes) {
    gridDim = {grid[0], grid[1], grid[2]}; blockDim = {block[0], block[1], block[2]};
    for (int z = 0; z < grid[2]; ++z) for (int y = 0; y < grid[1]; ++y)
"""
_LAUNCH_ONE = """
    for (int x = 0; x < grid[0]; ++x) { blockIdx = {x, y, z}; SYMBOL(ARGUMENTS); }
}
"""
# Blocks of a cluster run at the same time, clusters one after another.
_LAUNCH_THREADS = """
    for (int x = 0; x < grid[0]; x += size) {
        int threads = block[0];
        Cluster all{std::barrier<>(threads * size), {}};
        for (int each = 0; each < size; ++each)
            all.blocks.push_back(std::make_unique<Block>(threads, bytes));
        auto run = [&](int thread) {
            cluster = &all; rank = thread / threads; groups.assign(1, {});
            blockIdx = {x + rank, y, z}; threadIdx = {thread % threads, 0, 0};
            SYMBOL(ARGUMENTS);
        };
        std::vector<std::thread> running;
        for (int thread = 0; thread < threads * size; ++thread) running.emplace_back(run, thread);
        for (auto &each : running) each.join();
    }
}
"""


def run_kernel_on_host(
    kernel: OwnKernel,
    arrays: Sequence[np.ndarray[Any, Any]],
    cluster: int = 1,
    *,
    copies_at_once: bool = False,
) -> None:
    """Runs a launch of a kernel on arrays, one per parameter, in place.

    Args:
        kernel: its threads have one dimension.
        arrays: its parameters; each begins at a multiple of 16 bytes.
        cluster: blocks of a cluster, along the first axis of the grid.
        copies_at_once: make asynchronous copies when they are asked for, not when they are needed.
    """
    source = kernel.source
    if copies_at_once:
        source = source.replace(_GPU_ONLY, f"#define COPIES_AT_ONCE 1\n{_GPU_ONLY}", 1)
    _launch(source, kernel.symbol, kernel.shape, arrays, cluster)


def call_on_host(
    kernel: OwnKernel,
    machine: Any,
    results: Sequence[Any],
    operands: Sequence[Any],
    aliases: Mapping[int, int] | None = None,
    run: Callable[..., None] | None = None,
) -> list[np.ndarray[Any, Any]]:
    """Returns what `call_kernel` does on a GPU; results are NaN where a kernel writes nothing."""
    del machine
    arrays = [align_array(np.asarray(each)) for each in operands]
    stored = [align_array(np.full(each.shape, np.nan, each.dtype)) for each in results]
    for operand, result in (aliases or {}).items():
        stored[result] = arrays[operand]
    split = int(kernel.source.partition("SPLIT = ")[2].partition(";")[0])
    (run or run_kernel_on_host)(kernel, [*arrays, *stored], split)
    return stored


def run_on_host(source: str, loops: int, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    """Runs all loops of a merged kernel on arrays, one per parameter, in place."""
    # One thread does the work of all.
    _launch(source, SYMBOL, LaunchShape((1, loops, 1), (1, 1, 1)), arrays, 1)


def align_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a copy that begins at a multiple of 256 bytes, as arrays of a GPU do."""
    block = np.zeros(array.nbytes + 256, np.uint8)
    start = -block.ctypes.data % 256
    aligned = block[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    aligned[...] = array
    return aligned


def _launch(
    source: str,
    symbol: str,
    shape: LaunchShape,
    arrays: Sequence[np.ndarray[Any, Any]],
    cluster: int,
) -> None:
    library = _compile(source, symbol, len(arrays), has_threads=shape.block != (1, 1, 1))
    addresses = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    grid, block = ((ctypes.c_int * 3)(*sizes) for sizes in (shape.grid, shape.block))
    library.launch(addresses, grid, block, cluster, shape.shared_bytes)


@functools.cache
def _compile(source: str, symbol: str, count: int, *, has_threads: bool) -> ctypes.CDLL:
    """Returns a kernel's library; skips the test where there is no compiler of C++."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a compiler of C++: there is no g++ or clang++ on the path")
    arguments = ", ".join(f"Any{{given[{index}]}}" for index in range(count))
    world, launch = (_THREADS, _LAUNCH_THREADS) if has_threads else (_ONE_THREAD, _LAUNCH_ONE)
    launch = launch.replace("SYMBOL", symbol).replace("ARGUMENTS", arguments)
    text = source.replace(_GPU_ONLY, f"{_HOST}{world}\n{_GPU_ONLY}", 1) + _LAUNCH_HEAD + launch
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        file, library = pathlib.Path(folder, "kernel.cc"), pathlib.Path(folder, "kernel.so")
        file.write_text(text)
        header = _compile_headers(compiler)
        command = [compiler, *_FLAGS, "-shared", "-include", str(header), "-o", str(library)]
        subprocess.run([*command, str(file)], check=True, timeout=60)
        return ctypes.CDLL(str(library))


@functools.cache
def _compile_headers(compiler: str) -> pathlib.Path:
    """Returns a file that includes what sources include, compiled beside it: half of the time."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = folder / "headers.h"
    lines = [line for line in f"{_HOST}{_THREADS}".split("\n") if line.startswith("#include")]
    header.write_text("\n".join(lines))
    command = [compiler, *_FLAGS, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
    subprocess.run(command, check=True, timeout=60)
    return header
