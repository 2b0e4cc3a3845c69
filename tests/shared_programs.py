"""Compiling is most of what the tests cost: each program once in a run, with few optimizations.

Lowering comes next: one context of MLIR for several programs.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import pathlib
import shutil
import tempfile
import threading
from collections.abc import MutableMapping
from typing import Any

# JAX reads these when it is imported.
FOLDER = "JAX_COMPILATION_CACHE_DIR"
PREFIX = "tracegraph_programs_"
KEEP_ALL = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
UNOPTIMIZED = "JAX_DISABLE_MOST_OPTIMIZATIONS"
# XLA compiles candidates too for a GPU that is only described, where it can measure none.
XLA_FLAGS = "--xla_gpu_autotune_level=0"
# By fewer passes, in half of the time, and not in parts, which cost more than they save where each
# worker has one core; later releases end the process at a flag they do not know.
XLA_FLAGS_OF_JAX_0_10 = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
# On a GPU most of the time goes to compiling candidates of each matmul and timing them.
XLA_FLAGS_OF_GPU = "--xla_gpu_per_fusion_autotune_cache_dir="
# A context keeps types and constants of each program that was lowered in it.
MAX_CONTEXT_USES = 20


def share_programs(environment: MutableMapping[str, str]) -> None:
    """Lets a worker and processes that it starts share what XLA compiles, without optimizations.

    The folder of compiled programs goes with the run. Each worker has a part of its own, for JAX
    writes a program in place, and another worker could read half of it. Some tests run what users
    run, see `tests.optimized`. What the user has set stays. On a machine with a GPU all is compiled
    as for users; what is shared is which of XLA's candidates is the fastest. To be called before
    JAX is imported.
    """
    if shutil.which("nvidia-smi"):
        if "XLA_FLAGS" not in environment:
            environment["XLA_FLAGS"] = f"{XLA_FLAGS_OF_GPU}{_make_folder()}"
        return
    environment.setdefault(UNOPTIMIZED, "1")
    flags = f"{XLA_FLAGS} {XLA_FLAGS_OF_JAX_0_10}" if _is_jax_0_10() else XLA_FLAGS
    environment.setdefault("XLA_FLAGS", flags)
    worker = environment.get("PYTEST_XDIST_WORKER")
    if FOLDER not in environment:
        environment[FOLDER] = _make_folder()
        environment.update(KEEP_ALL)
    elif worker and pathlib.Path(environment[FOLDER]).name.startswith(PREFIX):
        environment[FOLDER] = str(pathlib.Path(environment[FOLDER], worker))


def share_contexts() -> None:
    """Lets JAX 0.10 lower several programs in one context of MLIR, as JAX 0.12 does by itself.

    To make and to destroy one for each program is a fifth of what the tests cost.
    """
    if not _is_jax_0_10():
        return
    mlir: Any = importlib.import_module("jax._src.interpreters.mlir")
    make, known = mlir.make_ir_context, threading.local()
    if make.__module__ == __name__:
        return

    def find_context() -> Any:
        if mlir.ir.Context.current is not None:
            # What a rule computes while a program is lowered must not become a part of that.
            return make()
        if getattr(known, "uses", MAX_CONTEXT_USES) >= MAX_CONTEXT_USES:
            known.context, known.uses = make(), 0
        known.uses += 1
        return known.context

    mlir.make_ir_context = find_context


def _is_jax_0_10() -> bool:
    return importlib.metadata.version("jaxlib").startswith("0.10.")


def _make_folder() -> str:
    """Returns a folder that goes with this process."""
    folder = tempfile.mkdtemp(prefix=PREFIX)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
