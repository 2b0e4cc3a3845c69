"""Compiles the recorded programs anew and writes them beside this file. Needs a GPU.

Run from the top of the tree, with the CUDA plugin whose form the tests shall read:
``python -m tests.data.xla.record``. The files are of jax 0.11.2 with its CUDA 13 plugin on
an H200. `tests/fakes/xla_recordings.py` reads them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from tests.paths import DATA
from tracegraph.lowering.xla.descriptors import find_closure, scan_library
from tracegraph.lowering.xla.schema import ROOTS, find_plugin

FOLDER = DATA / "xla"
# One kernel, and one matmul of cublasLt.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
    "mul2": (lambda x: x * 2, ((5,),), "float32"),
    "mm_f64": (lambda x, y: x @ y, ((512, 512), (512, 512)), "float64"),
}


def record_programs() -> None:
    """Writes each program as XLA serialized it, and the schema that describes them."""
    jax.config.update("jax_enable_x64", True)
    for name, (function, shapes, dtype) in PROGRAMS.items():
        arrays = [jnp.ones(shape, dtype) for shape in shapes]
        compiled: Any = jax.jit(function, keep_unused=True).lower(*arrays).compile()
        (FOLDER / f"{name}.bin").write_bytes(compiled.runtime_executable().serialize())
    files = FileDescriptorSet(file=find_closure(scan_library(find_plugin()), ROOTS))
    (FOLDER / "schema.bin").write_bytes(zlib.compress(files.SerializeToString(), 9))


if __name__ == "__main__":
    record_programs()
