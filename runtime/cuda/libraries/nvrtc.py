"""NVRTC: source of a kernel in C++ → machine code, with NVIDIA's compiler at run time."""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from tracegraph.runtime.cuda.libraries.kept_sources import find_or_compile
from tracegraph.runtime.definition.code_target import CompiledSource
from tracegraph.runtime.errors import CudaError, UnsupportedError

_guard = threading.Lock()
_locks: weakref.WeakValueDictionary[Hashable, threading.Lock] = weakref.WeakValueDictionary()


def compile_source(architecture: str, source: str, options: tuple[str, ...]) -> CompiledSource:
    """Compiles a source, unless the kernel cache has it; threads compile each one once.

    Args:
        architecture: compute capability, as ``9.0``.
        source: in C++; its kernels are ``extern "C"``.
        options: further ones of NVRTC.

    Raises:
        UnsupportedError: NVRTC is not installed.
        CudaError: it does not take the source.
    """
    key = architecture, source, options
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        return _compile_cached(*key)


@functools.lru_cache(maxsize=256)
def _compile_cached(architecture: str, source: str, options: tuple[str, ...]) -> CompiledSource:
    """Does what `compile_source` does; two threads may do the same at once."""
    flags = (f"--gpu-architecture={_name_target(architecture)}", *options)
    return find_or_compile(source, flags, functools.partial(_compile, source, flags))


def _compile(source: str, options: Sequence[str]) -> CompiledSource:
    nvrtc = _load()
    flags = [option.encode() for option in options]
    program = _call(nvrtc, nvrtc.nvrtcCreateProgram, source.encode(), b"kernel.cu", 0, [], [])
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_call(nvrtc, nvrtc.nvrtcGetProgramLogSize, program))
            _call(nvrtc, nvrtc.nvrtcGetProgramLog, program, log)
            raise _make_nvrtc_error("nvrtcCompileProgram", log.rstrip(b"\0\n").decode(), flags)
        cubin = bytearray(_call(nvrtc, nvrtc.nvrtcGetCUBINSize, program))
        _call(nvrtc, nvrtc.nvrtcGetCUBIN, program, cubin)
        ptx = bytearray(_call(nvrtc, nvrtc.nvrtcGetPTXSize, program))
        _call(nvrtc, nvrtc.nvrtcGetPTX, program, ptx)
        return CompiledSource(bytes(cubin), ptx.rstrip(b"\0").decode())
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _name_target(architecture: str) -> str:
    """Returns NVRTC's name of an architecture, with the instructions that only 9.0 has."""
    return f"sm_{architecture.replace('.', '')}{'a' if architecture == '9.0' else ''}"


@functools.cache
def _load() -> Any:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        # The library itself is loaded by the first call.
        _call(nvrtc, nvrtc.nvrtcVersion)
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedError(
            "NVRTC is missing",
            where="the compilation of a kernel of tracegraph's own",
            why=f"kernels are compiled for the GPU that is there: {reason}",
            fix='pip install "jax[cuda13]", which brings it, or nvidia-cuda-nvrtc',
            anchor="unsupported",
        ) from error
    return nvrtc


def _call(nvrtc: Any, function: Any, *arguments: Any) -> Any:
    result, *values = function(*arguments)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise _make_nvrtc_error(function.__name__, str(result), ())
    return values[0] if values else None


def _make_nvrtc_error(call: str, text: str, options: Sequence[bytes]) -> CudaError:
    return CudaError(
        f"{call} failed: {text.splitlines()[0] if text else 'no reason is given'}",
        where=f"a kernel of tracegraph's own, options {b' '.join(options).decode()}",
        why=f"NVRTC says: {'; '.join(text.splitlines())}",
        fix="report this text: the source was written by tracegraph",
        anchor="cuda",
    )
