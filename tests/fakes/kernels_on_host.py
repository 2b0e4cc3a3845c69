"""Kernels of our own in C++, compiled for this machine and run by its threads."""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tracegraph.lowering.kernels.loops.merged_loops import SYMBOL
from tracegraph.lowering.kernels.own_kernel import OwnKernel
from tracegraph.runtime.definition.nodes import LaunchShape

_SCHEDULER = pathlib.Path(__file__).with_name("thread_scheduler.cc")
# What the source has of its own for a GPU, between this line and the end of the condition.
_GPU_ONLY = "#ifdef __CUDACC__"
# To read the headers of C takes a third of the time that a kernel does.
_HOST = """
extern "C" {
void *memcpy(void *, const void *, unsigned long) noexcept;
void *memmove(void *, const void *, unsigned long) noexcept;
void abort() noexcept;
}
#define ONE(name) extern "C" double name(double) noexcept; extern "C" float name##f(float) noexcept;
#define TWO(name) extern "C" double name(double, double) noexcept; \\
    extern "C" float name##f(float, float) noexcept;
ONE(exp) ONE(exp2) ONE(expm1) ONE(log) ONE(log1p) ONE(log2) ONE(sqrt) ONE(cbrt) ONE(fabs)
ONE(sin) ONE(cos) ONE(tan) ONE(tanh) ONE(erf) ONE(erfc) ONE(ceil) ONE(floor) ONE(trunc) ONE(rint)
TWO(pow) TWO(fmod) TWO(atan2) TWO(fmax) TWO(fmin) TWO(copysign)
extern "C" float fmaf(float, float, float) noexcept;
extern "C" double fma(double, double, double) noexcept;
extern "C" float ldexpf(float, int) noexcept;
#define NAN __builtin_nanf("")
#define INFINITY __builtin_inff()
struct Dim { int x, y, z; };
#define KERNEL(...) extern "C" void
#define CLUSTERED(blocks)
#define DEVICE static inline
#define FUNCTION static
#define TABLE static const
struct Any { void *address; template <class T> operator T *() const { return (T *)address; } };
static float literal(unsigned bits) { float a; memcpy(&a, &bits, 4); return a; }
static float __uint_as_float(unsigned bits) { return literal(bits); }
static unsigned read_bits(float a) { unsigned bits; memcpy(&bits, &a, 4); return bits; }
static float maximum(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
static float minimum(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }
static float rsqrtf(float a) { return 1.0f / sqrtf(a); }
static float widen(float a) { return a; }
static float widen(bfloat16 a) { return literal((unsigned)a.bits << 16); }
static float widen(float16 a) { _Float16 b; memcpy(&b, &a, 2); return b; }
static float widen_of_pair(unsigned short pair, int which, float8e5m2) {
    return widen(float16{(unsigned short)((pair >> which * 8 & 255) << 8)});
}
static float widen_of_pair(unsigned short pair, int which, float8e4m3) {
    unsigned bits = pair >> which * 8 & 255, size = bits & 127;
    float value = size == 127 ? NAN : ldexpf((float)(size % 8 + (size > 7) * 8),
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
    _Float16 b = a; float16 c; memcpy(&c, &b, 2); return c;
}
template <class Half> static unsigned pack_pair(float low, float high, Half) {
    return narrow(low, Half()).bits | (unsigned)narrow(high, Half()).bits << 16;
}
static float exp_fast(float a) { return expf(a); }
static float invert(float a) { return 1 / a; }
"""
_FLAGS = [
    "-std=c++20",
    "-fPIC",
    "-O0",
    "-ffp-contract=off",
    "-w",
    "-pipe",
]
# The process has those of C and C++: to link with the latter takes as long as to compile a kernel,
# with the former an eighth of that.
_LIBRARIES = ["-nodefaultlibs", "-lgcc"]
_ONE_THREAD = """
static Dim blockIdx, threadIdx, gridDim, blockDim;
static void wait() {}
"""
_THREADS = """
#ifndef COPIES_AT_ONCE
#define COPIES_AT_ONCE 0
#endif
static Dim blockIdx, threadIdx, gridDim, blockDim;
extern "C" {
char *find_shared(int peer); int find_cluster_rank(); float *find_lane(int lane);
void sync_block(); void sync_warp(int lane); void arrive_cluster(); void await_cluster();
void copy_late(void *shared, const void *global); void commit_copies(); void end_copies(int count);
void run_cluster(int threads, int blocks, int bytes, void (*enter)(int, int), void (*run)());
void look_later();
}
static void wait() {}
static void start_dependents() {}
static char *shared_memory() { return find_shared(find_cluster_rank()); }
static void sync_cluster() { arrive_cluster(); await_cluster(); }
static float *find_peers(const float *mine, int peer) {
    return (float *)(find_shared(peer) + ((char *)mine - shared_memory()));
}
static float read_peer(const float *mine, int peer) { return *find_peers(mine, peer); }
static void write_peer(float *mine, int peer, float value) { *find_peers(mine, peer) = value; }
static Vector load_vector(const void *global) {
    if ((unsigned long)global % 16) abort();
    return *(const Vector *)global;
}
/* A copy is made as late as it may be, or at once. */
struct Slot { Vector *vector; };
static Slot hold_slot(Vector *shared) { return {shared}; }
static void copy_async(Slot slot, int vectors, const void *global) {
    void *shared = slot.vector + vectors;
    if ((unsigned long)shared % 16 || (unsigned long)global % 16) abort();
    if (COPIES_AT_ONCE) memcpy(shared, global, 16);
    else copy_late(shared, global);
}
static unsigned long long find_stream_policy() { return 0; }
static void copy_streamed(Slot slot, int vectors, const void *global, unsigned long long) {
    copy_async(slot, vectors, global);
}
template <int count> static void await_copies() { end_copies(count); }
static float shuffle_xor(float value, int mask) {
    int lane = threadIdx.x;
    *find_lane(lane) = value; sync_warp(lane);
    float other = *find_lane(lane ^ mask); sync_warp(lane);
    return other;
}
static void sync_lanes() { sync_warp(threadIdx.x); }
static bool sync_any(bool is_true) {
    *find_lane(threadIdx.x) = is_true; sync_block();
    bool any = false;
    for (int each = 0; each < blockDim.x; ++each) any |= *find_lane(each) != 0;
    sync_block();
    return any;
}
static Vector load_rows(const Vector *own) {
    int lane = threadIdx.x, group = lane % 32 / 4, quarter = lane % 4;
    if ((unsigned long)own % 16) abort();
    memcpy(find_lane(lane), own, 16); sync_lanes();
    Vector v;
    for (int each = 0; each < 4; ++each)
        memcpy(&v.words[each], find_lane(lane / 32 * 32 + each * 8 + group) + quarter, 4);
    sync_lanes();
    return v;
}
static Vector load_turned(const Vector *own) {
    int lane = threadIdx.x, group = lane % 32 / 4, quarter = lane % 4;
    if ((unsigned long)own % 16) abort();
    memcpy(find_lane(lane), own, 16); sync_lanes();
    Vector v;
    for (int each = 0; each < 4; ++each) {
        auto *row = (unsigned short *)find_lane(lane / 32 * 32 + each * 8 + quarter * 2);
        auto *next = (unsigned short *)find_lane(lane / 32 * 32 + each * 8 + quarter * 2 + 1);
        v.words[each] = row[group] | (unsigned)next[group] << 16;
    }
    sync_lanes();
    return v;
}
/* As PTX lays out the operands of m16n8k16: words of two values, the low half first. */
template <class Half>
static void multiply_tile(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], Half) {
    int lane = threadIdx.x, first = lane / 32 * 32, group = lane % 32 / 4, quarter = lane % 4;
    memcpy(find_lane(lane), a, 16); memcpy(find_lane(lane) + 4, b, 8); sync_warp(lane);
    auto find = [&](int owner, int word, int half) {
        unsigned bits; memcpy(&bits, find_lane(first + owner) + word, 4);
        return widen(Half{(unsigned short)(bits >> half * 16)});
    };
    for (int each = 0; each < 4; ++each) {
        int row = group + each / 2 * 8, column = quarter * 2 + each % 2;
        for (int k = 0; k < 16; ++k)
            sums[each] += find(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2)
                          * find(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
    }
    sync_warp(lane);
}
/* As PTX lays out the operands of m16n8k8, which have been rounded. */
static void multiply_tile(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], float) {
    int lane = threadIdx.x, first = lane / 32 * 32, group = lane % 32 / 4, quarter = lane % 4;
    for (unsigned word : a) if (word & 0x1FFFu && literal(word) == literal(word)) abort();
    for (unsigned word : b) if (word & 0x1FFFu && literal(word) == literal(word)) abort();
    memcpy(find_lane(lane), a, 16); memcpy(find_lane(lane) + 4, b, 8); sync_warp(lane);
    for (int each = 0; each < 4; ++each) {
        int row = group + each / 2 * 8, column = quarter * 2 + each % 2;
        for (int k = 0; k < 8; ++k)
            sums[each] += find_lane(first + row % 8 * 4 + k % 4)[row / 8 + k / 4 * 2]
                          * find_lane(first + column * 4 + k % 4)[4 + k / 4];
    }
    sync_warp(lane);
}
"""
_LAUNCH_ONE = """
extern "C" void launch(void **given, const int *grid, const int *block, int size, int bytes) {
    gridDim = {grid[0], grid[1], grid[2]}; blockDim = {block[0], block[1], block[2]};
    for (int z = 0; z < grid[2]; ++z) for (int y = 0; y < grid[1]; ++y)
    for (int x = 0; x < grid[0]; ++x) { blockIdx = {x, y, z}; SYMBOL(ARGUMENTS); }
}
"""
# Blocks of a cluster run at the same time, clusters one after another.
_LAUNCH_THREADS = """
static void **given; static Dim first;
static void enter(int rank, int index) {
    blockIdx = {first.x + rank, first.y, first.z}; threadIdx = {index, 0, 0};
}
static void run() { SYMBOL(ARGUMENTS); }
extern "C" void launch(void **arrays, const int *grid, const int *block, int size, int bytes) {
    gridDim = {grid[0], grid[1], grid[2]}; blockDim = {block[0], block[1], block[2]};
    given = arrays;
    for (int z = 0; z < grid[2]; ++z) for (int y = 0; y < grid[1]; ++y)
    for (int x = 0; x < grid[0]; x += size) {
        first = {x, y, z}; run_cluster(block[0], size, bytes, enter, run);
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
    """Returns what `call_kernel` does on a GPU.

    Results are NaN, or the lowest integer, where a kernel writes nothing.
    """
    del machine
    arrays = [align_array(np.asarray(each)) for each in operands]
    stored = [align_array(np.full(each.shape, _find_poison(each.dtype))) for each in results]
    for operand, result in (aliases or {}).items():
        stored[result] = arrays[operand]
    split = int(kernel.source.partition("SPLIT = ")[2].partition(";")[0] or 1)
    (run or run_kernel_on_host)(kernel, [*arrays, *stored], split)
    return stored


def _find_poison(dtype: Any) -> Any:
    dtype = np.dtype(dtype)
    return dtype.type(np.iinfo(dtype).min if dtype.kind == "i" else np.nan)


def run_on_host(source: str, loops: int, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    """Runs all loops of a merged kernel on arrays, one per parameter, in place."""
    # One thread does the work of all.
    _launch(source, SYMBOL, LaunchShape((1, loops, 1), (1, 1, 1)), arrays, 1)


def align_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a copy that begins at a multiple of 256 bytes, as arrays of a GPU do.

    Behind it are zeros, so that what a kernel reads there is the same each time.
    """
    block = np.zeros(array.nbytes + 8192, np.uint8)
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
    arguments = ", ".join(f"Any{{given[{index}]}}" for index in range(count))
    launch = _LAUNCH_THREADS if has_threads else _LAUNCH_ONE
    launch = launch.replace("SYMBOL", symbol).replace("ARGUMENTS", arguments)
    return compile_with_launch(source, launch, has_threads=has_threads)


def compile_with_launch(source: str, launch: str, *, has_threads: bool = True) -> ctypes.CDLL:
    """Returns the library of a kernel's source and of what launches it.

    It skips the test where there is no compiler of C++.

    Args:
        source: of a kernel.
        launch: in C++, with the functions that are called from outside.
        has_threads: False for a kernel whose one thread does the work of all.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a compiler of C++: there is no g++ or clang++ on the path")
    world = _THREADS if has_threads else _ONE_THREAD
    text = source.replace(_GPU_ONLY, f"{_HOST}{world}\n{_GPU_ONLY}", 1) + launch
    scheduler = [_compile_scheduler(compiler)] if has_threads else []
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        file, library = pathlib.Path(folder, "kernel.cc"), pathlib.Path(folder, "kernel.so")
        file.write_text(text)
        parts = [str(file), *scheduler, *_LIBRARIES]
        command = [compiler, *_FLAGS, "-shared", "-o", str(library), *parts]
        run_compiler(command)
        return ctypes.CDLL(str(library))


@functools.cache
def _compile_scheduler(compiler: str) -> str:
    """Returns what runs threads, compiled once: its headers take longer than a kernel.

    It is optimized, for threads change places often.
    """
    # Whose functions it calls, see `_LIBRARIES`.
    ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compiled = folder / "scheduler.o"
    # A jump to another stack, as all of its jumps are, would be taken for a fault.
    flags = [*_FLAGS, "-O2", "-U_FORTIFY_SOURCE"]
    command = [compiler, *flags, "-c", "-o", str(compiled), str(_SCHEDULER)]
    run_compiler(command)
    return str(compiled)


def run_compiler(command: Sequence[str]) -> None:
    """Runs a compiler to its end; what it says is in the error, if it fails.

    With its output in a pipe: without one Python would look for the end every 50 ms.
    """
    ran = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def plant_fault(
    kernels: tuple[OwnKernel, OwnKernel], right: str, wrong: str
) -> tuple[OwnKernel, OwnKernel]:
    """Returns two kernels with a fault in the place of what is right, in one of them at least."""
    assert any(right in each.source for each in kernels)
    first, second = (
        dataclasses.replace(each, source=each.source.replace(right, wrong)) for each in kernels
    )
    return first, second
