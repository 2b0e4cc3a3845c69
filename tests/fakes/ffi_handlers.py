"""Compiles ffi_handlers.c against the headers of the installed jaxlib, and calls what is in it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax.ffi
import pytest

from tracegraph.runtime.ffi.c_api import ExecutionStage
from tracegraph.runtime.ffi.context import MAX_ALIGNMENT
from tracegraph.runtime.ffi.handler import Handler

SOURCE = pathlib.Path(__file__).with_suffix(".c")


@functools.cache
def load_handlers() -> ctypes.CDLL:
    """Returns the compiled library; skips the test where there is no compiler of C."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a compiler of C: there is no cc, gcc or clang on the path")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "ffi_handlers.so")
        include = f"-I{jax.ffi.include_dir()}"
        subprocess.run([compiler, "-shared", "-fPIC", include, "-o", path, SOURCE], check=True)
        return ctypes.CDLL(os.fspath(path))


def find_address(function: str) -> int:
    return ctypes.cast(getattr(load_handlers(), function), ctypes.c_void_p).value or 0


def make_handler(execute: str, **others: str) -> Handler:
    """Returns a handler of functions of the library, by stage."""
    functions = {**others, "execute": execute}
    stages = tuple(
        (ExecutionStage[name.upper()], find_address(each)) for name, each in functions.items()
    )
    return Handler(execute, stages)


def make_capsule(symbol: str) -> Any:
    """Returns a function or a variable of the library for jax.ffi."""
    return jax.ffi.pycapsule(getattr(load_handlers(), symbol))


def take_report() -> str:
    """Returns what the handlers have written since the last time."""
    memory: Any = (ctypes.c_char * (1 << 16)).in_dll(load_handlers(), "report")
    text = memory.value.decode(errors="replace")
    memory.value = b""
    return text


def read_number(name: str) -> int:
    return ctypes.c_int.in_dll(load_handlers(), name).value


class BytesScratch:
    """Scratch in host memory, which counts what is not freed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.blocks: dict[int, Any] = {}
        self.asked: list[int] = []

    def allocate(self, nbytes: int) -> int:
        if self.error:
            raise self.error
        self.asked.append(nbytes)
        block = ctypes.create_string_buffer(nbytes + MAX_ALIGNMENT)
        start = ctypes.addressof(block)
        address = start + -start % MAX_ALIGNMENT
        self.blocks[address] = block
        return address

    def free(self, address: int) -> None:
        del self.blocks[address]


@contextlib.contextmanager
def aligning(nbytes: int) -> Iterator[None]:
    """Lets the handlers ask for scratch of another alignment."""
    slot = ctypes.c_size_t.in_dll(load_handlers(), "scratch_alignment")
    before, slot.value = slot.value, nbytes
    try:
        yield
    finally:
        slot.value = before


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Lets the handler `fill_or_fail` return an error."""
    slot = ctypes.c_int.in_dll(load_handlers(), "is_failing")
    slot.value = 1
    try:
        yield
    finally:
        slot.value = 0


@contextlib.contextmanager
def enqueuing(act: Callable[[int, int], None]) -> Iterator[None]:
    """Lets the handler `enqueue` call a function with its stream and its first operand."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    function = kind(act)
    slot = ctypes.c_void_p.in_dll(load_handlers(), "on_enqueue")
    slot.value = ctypes.cast(function, ctypes.c_void_p).value
    try:
        yield
    finally:
        slot.value = 0
