"""Compiling is most of what the tests cost: each program once in a run, with few optimizations."""

from __future__ import annotations

import atexit
import importlib.metadata
import pathlib
import shutil
import tempfile
from collections.abc import MutableMapping

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
# By fewer passes, in half of the time; later releases end the process at a flag they do not know.
XLA_FLAGS_OF_JAX_0_10 = "--xla_cpu_use_fusion_emitters=false"


def share_programs(environment: MutableMapping[str, str]) -> None:
    """Lets a worker and processes that it starts share what XLA compiles, without optimizations.

    The folder of compiled programs goes with the run. Each worker has a part of its own, for JAX
    writes a program in place, and another worker could read half of it. Some tests run what users
    run, see `tests.optimized`. What the user has set stays, and on a machine with a GPU nothing is
    set. To be called before JAX is imported.
    """
    if shutil.which("nvidia-smi"):
        return
    environment.setdefault(UNOPTIMIZED, "1")
    is_early = importlib.metadata.version("jaxlib").startswith("0.10.")
    flags = f"{XLA_FLAGS} {XLA_FLAGS_OF_JAX_0_10}" if is_early else XLA_FLAGS
    environment.setdefault("XLA_FLAGS", flags)
    worker = environment.get("PYTEST_XDIST_WORKER")
    if FOLDER not in environment:
        environment[FOLDER] = tempfile.mkdtemp(prefix=PREFIX)
        atexit.register(shutil.rmtree, environment[FOLDER], ignore_errors=True)
        environment.update(KEEP_ALL)
    elif worker and pathlib.Path(environment[FOLDER]).name.startswith(PREFIX):
        environment[FOLDER] = str(pathlib.Path(environment[FOLDER], worker))
