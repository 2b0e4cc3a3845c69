"""Compiling is most of what the tests cost: each program once, with few optimizations.

Lowering comes next: one context of MLIR for several programs.

Note [Kept programs]
What XLA compiled in one run is there for the next, which saves a quarter of its time. A run has the
folder for itself; one beside it, or one of other versions, has another. JAX writes a program in
place, and another worker could read half of it: so each has a part, with hard links to what all
parts had at the end of the last run. One that is killed may leave half a program: what a run leaves
that did not come to its end is thrown away.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib
import importlib.metadata
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import MutableMapping
from typing import IO, Any

from tests.paths import ROOT

# JAX reads these when it is imported.
FOLDER = "JAX_COMPILATION_CACHE_DIR"
PREFIX = "tracegraph_programs_"
KEEP_ALL = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # Else the folder's path is in the key, and no worker finds what another has compiled.
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
}
UNOPTIMIZED = "JAX_DISABLE_MOST_OPTIMIZATIONS"
# XLA compiles candidates too for a GPU that is only described, where it can measure none; to make a
# program in parts, by several threads, costs a tenth more; a model of collectives, by which one
# scheduler orders steps that a graph orders anew, costs a small program as much again.
XLA_FLAGS = (
    "--xla_gpu_autotune_level=0 --xla_gpu_force_compilation_parallelism=1 "
    "--xla_gpu_enable_latency_hiding_scheduler=false"
)
# By fewer passes, in half of the time, and not in parts, which cost more than they save where each
# worker has one core; later releases end the process at a flag they do not know.
XLA_FLAGS_OF_JAX_0_10 = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
# On a GPU most of the time goes to compiling candidates of each matmul and timing them.
XLA_FLAGS_OF_GPU = "--xla_gpu_per_fusion_autotune_cache_dir="
# See Note [Kept programs].
KEPT, MAX_KEPT_BYTES = ROOT / "build" / "programs", 1 << 30
UNFINISHED, PROGRAMS = "unfinished", "*-cache"
# A context keeps types and constants of each program that was lowered in it.
MAX_CONTEXT_USES = 20


def share_programs(environment: MutableMapping[str, str]) -> None:
    """Lets a worker and processes that it starts share what XLA compiles, without optimizations.

    The folder of compiled programs stays for the next run: Note [Kept programs]. Some tests run
    what users run, see `tests.optimized`. What the user has set stays. On a machine with a GPU all
    is compiled as for users; what is shared is which of XLA's candidates is the fastest. To be
    called before JAX is imported.
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
        environment[FOLDER] = _claim_folder() or _make_folder()
        environment.update(KEEP_ALL)
    elif worker and (whole := pathlib.Path(environment[FOLDER])).name.startswith(PREFIX):
        environment[FOLDER] = str(whole / worker)
        _link_programs(whole, whole / worker)


def finish_run() -> None:
    """Says that nothing has been cut off: what was compiled is there for the next run."""
    for folder in _claimed:
        (folder / UNFINISHED).unlink(missing_ok=True)


# Of this process, with the files that are locked.
_claimed: dict[pathlib.Path, IO[str]] = {}


def _claim_folder() -> str | None:
    """Returns the folder that is kept; None where another run has it."""
    versions = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = KEPT / f"{PREFIX}{versions}_{importlib.metadata.version('jaxlib')}"
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f"{folder.name}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    _claimed[folder] = lock
    nbytes = sum(path.stat().st_size for path in folder.glob(PROGRAMS))
    if (folder / UNFINISHED).exists() or nbytes > MAX_KEPT_BYTES:
        shutil.rmtree(folder)
        folder.mkdir()
    (folder / UNFINISHED).touch()
    for part in folder.glob("gw*"):
        _link_programs(part, folder)
    return str(folder)


def _link_programs(source: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a folder the programs of another that it lacks."""
    target.mkdir(exist_ok=True)
    known = {path.name for path in target.glob(PROGRAMS)}
    for path in source.glob(PROGRAMS):
        if path.name not in known:
            os.link(path, target / path.name)


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


def share_on_gpu(folder: pathlib.Path) -> None:
    """Lets the workers on one GPU find what XLA has compiled for others, as soon as it is whole.

    To be called before JAX compiles anything. Processes that tests start compile for themselves:
    they would write in place.

    Args:
        folder: of this run, the same for all workers.
    """
    jax: Any = importlib.import_module("jax")
    cache: Any = importlib.import_module("jax._src.lru_cache").LRUCache
    folder.mkdir(exist_ok=True)

    def put(cache: Any, key: str, value: bytes) -> None:
        path = pathlib.Path(cache.path, f"{key}-cache")
        draft = path.with_name(f"{os.getpid()}-{threading.get_ident()}.draft")
        draft.write_bytes(value)
        draft.replace(path)

    cache.put = put
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def _is_jax_0_10() -> bool:
    return importlib.metadata.version("jaxlib").startswith("0.10.")


def _make_folder() -> str:
    """Returns a folder that goes with this process."""
    folder = tempfile.mkdtemp(prefix=PREFIX)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
