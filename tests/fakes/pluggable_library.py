"""Compiles pluggable_library.c, and reads its counters."""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tracegraph.runtime.memory.providers.pluggable import PluggableAllocator

SOURCE = pathlib.Path(__file__).with_suffix(".c")
MEMORY = (3 << 30, 4 << 30)


class PluggableLibrary:
    """A compiled library in a folder of its own, so that each test has fresh counters."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = compile_library(folder)
        self._library = ctypes.CDLL(os.fspath(self.path))

    def read(self, name: str) -> int:
        """Returns a counter."""
        return ctypes.c_ssize_t.in_dll(self._library, name).value

    def limit(self, nbytes: int) -> None:
        """Lets the library refuse what goes beyond so many bytes."""
        ctypes.c_ssize_t.in_dll(self._library, "limit_bytes").value = nbytes

    def read_last(self) -> tuple[int, int]:
        """Returns device and stream of the last allocation."""
        device = ctypes.c_int.in_dll(self._library, "last_device").value
        return device, ctypes.c_void_p.in_dll(self._library, "last_stream").value or 0

    def open(self) -> PluggableAllocator:
        """Returns the allocator of the library."""
        return PluggableAllocator(self.path, "test_allocate", "test_free")


def compile_library(folder: pathlib.Path) -> pathlib.Path:
    """Returns the path of the library; skips the test where there is no compiler of C."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a compiler of C: there is no cc, gcc or clang on the path")
    path = folder / ("allocator.dylib" if sys.platform == "darwin" else "allocator.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, SOURCE], check=True)
    return path
