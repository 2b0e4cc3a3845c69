"""Kernels of our own in C++, compiled for this machine: one thread does the work of all."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tracegraph.lowering.kernels.merged_loops import SYMBOL

# What the source has of its own for a GPU, between this line and the end of the condition.
_GPU_ONLY = "#ifdef __CUDACC__"
_HOST = """
#include <cmath>
#include <cstring>
struct Dim { int x, y, z; };
static Dim blockIdx, threadIdx;
static const Dim gridDim = {1, 1, 1}, blockDim = {1, 1, 1};
#define KERNEL extern "C" void
extern "C" void choose_loop(int number) { blockIdx.y = number; }
static void wait() {}
static float literal(unsigned bits) { float a; std::memcpy(&a, &bits, 4); return a; }
static unsigned read_bits(float a) { unsigned bits; std::memcpy(&bits, &a, 4); return bits; }
static float maximum(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
static float minimum(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }
static float rsqrtf(float a) { return 1.0f / std::sqrt(a); }
static float widen(bfloat16 a) { return literal((unsigned)a.bits << 16); }
static float widen(float16 a) { _Float16 b; std::memcpy(&b, &a, 2); return b; }
static bfloat16 narrow(float a, bfloat16) {
    unsigned bits = read_bits(a);
    bits = a != a ? 0x7FC00000u : bits + 0x7FFFu + (bits >> 16 & 1u);
    return bfloat16{(unsigned short)(bits >> 16)};
}
static float16 narrow(float a, float16) {
    _Float16 b = a; float16 c; std::memcpy(&c, &b, 2); return c;
}
"""


@functools.cache
def compile_on_host(source: str) -> ctypes.CDLL:
    """Returns a kernel's library; skips the test where there is no compiler of C++."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a compiler of C++: there is no g++ or clang++ on the path")
    text = source.replace(_GPU_ONLY, f"{_HOST}\n{_GPU_ONLY}", 1)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kernels-"))
    (folder / "kernel.cc").write_text(text)
    command = [compiler, "-shared", "-fPIC", "-O0", "-ffp-contract=off", "-w", "-o"]
    subprocess.run(
        [*command, str(folder / "kernel.so"), str(folder / "kernel.cc")], check=True, timeout=60
    )
    library = ctypes.CDLL(str(folder / "kernel.so"))
    shutil.rmtree(folder)
    return library


def run_on_host(source: str, loops: int, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    """Runs all loops of a merged kernel on arrays, one per parameter, in place."""
    library = compile_on_host(source)
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    for number in range(loops):
        library.choose_loop(number)
        getattr(library, SYMBOL)(*addresses)
