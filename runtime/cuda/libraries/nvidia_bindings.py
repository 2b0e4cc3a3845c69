"""The door to NVIDIA's Python bindings of the CUDA libraries, and the check of what they load."""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

from tracegraph.runtime.errors import CudaError, UnsupportedError


def load_nvmath() -> Any:
    """Imports NVIDIA's bindings.

    Raises:
        UnsupportedError: they are not installed.
    """
    try:
        # The import is slow and loads CUDA libraries: only captures with such a call pay for it.
        return importlib.import_module("nvmath")
    except ImportError as error:
        raise UnsupportedError(
            "the package `nvmath` is missing",
            where="the first call of a CUDA library in a capture",
            why=f"CUDA libraries are called through NVIDIA's Python bindings: {error}",
            fix="pip install nvmath-python",
            anchor="unsupported",
        ) from error


def read_memory_map() -> str:
    """Returns the text of ``/proc/self/maps``: which file is mapped where in this process."""
    return pathlib.Path("/proc/self/maps").read_text()


def check_one_library(name: str, maps: str) -> None:
    """Checks that exactly one copy of a library is loaded.

    Args:
        name: the library's, as ``libcublasLt``.
        maps: text of ``/proc/self/maps``.

    Raises:
        CudaError: none is loaded, or several: XLA and the bindings would each use their own.
    """
    paths = find_loaded_libraries(name, maps)
    if len(paths) == 1:
        return
    raise CudaError(
        f"{len(paths)} copies of {name} are loaded, not one",
        where=f"the memory map of this process: {', '.join(paths) or 'no such file'}",
        why="XLA's choice of an algorithm holds for the library that XLA has loaded",
        fix="unset LD_LIBRARY_PATH, and keep only the CUDA wheels that JAX was installed with",
        anchor="cuda",
    )


def find_loaded_libraries(name: str, maps: str) -> list[str]:
    """Returns the path of each file of a library in the text of a ``/proc/self/maps``.

    Example:
        >>> maps = "7f00-7f10 r-xp 0 08:01 42   /opt/libcublasLt.so.13"
        >>> find_loaded_libraries("libcublasLt", maps)
        ['/opt/libcublasLt.so.13']
    """
    libraries = {}
    for line in maps.splitlines():
        # Address range, permissions, offset, device, inode, path.
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and f"/{name}.so" in parts[5]:
            libraries[parts[3], parts[4]] = parts[5]
    return sorted(libraries.values())
