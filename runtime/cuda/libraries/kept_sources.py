"""Kept sources: what NVRTC made of a source, in a file of the kernel cache for other processes.

NVRTC takes up to 0.3 s for a kernel with tensor cores, and a model has dozens. What it makes
follows from the source, its options and its version; where that is not known, nothing is kept.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

from tracegraph.runtime.definition.code_target import CompiledSource
from tracegraph.runtime.installed_packages import find_libraries, list_packages
from tracegraph.runtime.saving.kernel_store import KernelStore, find_store

PACKAGE, LIBRARY = "nvidia-cuda-nvrtc", "libnvrtc"


def find_or_compile(
    source: str, options: Sequence[str], compile_anew: Callable[[], CompiledSource]
) -> CompiledSource:
    """Returns what a source becomes, from its file where there is one.

    Args:
        source: of a kernel.
        options: all that NVRTC is given.
        compile_anew: makes what is then kept.
    """
    store, version = find_store(), _find_version()
    if store is None or not version:
        return compile_anew()
    text = "\0".join([version, *options, source])
    key = f"source{hashlib.sha256(text.encode()).hexdigest()}"
    found = _read(store, key)
    if found is None:
        found = compile_anew()
        store.add(key, {"key": key, "ptx": found.ptx}, [found.cubin])
    return found


def _read(store: KernelStore, key: str) -> CompiledSource | None:
    file = store.find(key)
    if file is None:
        return None
    content, blobs = file.content, file.blobs
    ptx = content.get("ptx") if isinstance(content, dict) and content.get("key") == key else None
    if isinstance(ptx, str) and len(blobs) == 1:
        return CompiledSource(bytes(blobs[0]), ptx)
    store.drop(key, "it is not what NVRTC made of this source")
    return None


@functools.cache
def _find_version() -> str:
    """Returns what names of files say of NVRTC's version; nothing where there are none."""
    packages = sorted(each for each in list_packages().items() if each[0].startswith(PACKAGE))
    library = find_libraries([LIBRARY])[LIBRARY]
    return f"{packages} {library}" if packages or library else ""
