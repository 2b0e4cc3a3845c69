"""Lets a benchmark that starts processes make copies of its own: those have imported JAX."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import flags

from tests import fork_server

FORK = multiprocessing.get_context("fork")


def copy_later_starts() -> None:
    """Lets a benchmark start its first script as it does, and runs later ones in copies.

    Wherever it starts them: `subprocess.run` itself is replaced, in the test's own process.

    To be called before JAX has a backend. A script is given its arguments and its environment, and
    ends with its exit status, but not as an interpreter does.
    """
    start = subprocess.run
    runs: list[Callable[..., Any]] = [start]

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[0] != sys.executable:
            return start(command, **options)
        return (runs.pop() if runs else run_in_copy)(command, **options)

    subprocess.__dict__["run"] = run


def copy_workers(module: types.ModuleType) -> None:
    """Lets a benchmark's module start its workers as copies, before JAX has a backend."""
    # Python 3.12 warns of threads: there is one, of a queue that is made for being copied.
    warnings.filterwarnings("ignore", ".*is multi-threaded", DeprecationWarning)
    module.__dict__["multiprocessing"] = types.SimpleNamespace(get_context=lambda _: FORK)


def run_in_copy(
    command: Sequence[str],
    *,
    stdout: int,
    text: bool,
    timeout: float,
    check: bool,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a script of Python; the arguments are those of `subprocess.run`."""
    assert (command[0], stdout, text) == (sys.executable, subprocess.PIPE, True)
    with tempfile.TemporaryDirectory() as texts:
        out, error = (pathlib.Path(texts, name) for name in ("out", "error"))
        request = {
            "arguments": command[1:],
            "folder": str(pathlib.Path.cwd()),
            "variables": dict(os.environ if env is None else env),
            "out": str(out),
            "error": str(error),
        }
        process = FORK.Process(target=_run, args=(request,))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
        assert error.exists(), "it has not come to its script"
        sys.stderr.write(error.read_text())
        assert process.exitcode is not None
        done = subprocess.CompletedProcess(command, process.exitcode, out.read_text())
    if check:
        done.check_returncode()
    return done


def _run(request: dict[str, Any]) -> None:
    # JAX has read it when it was imported.
    folder = request["variables"].get("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_compilation_cache_dir", folder)
    # The script defines its flags again.
    own = pathlib.Path(request["arguments"][0]).stem
    known = flags.FLAGS.flags_by_module_dict().get(own, [])
    flags.FLAGS.remove_flag_values([each.name for each in known])
    fork_server.run(request)
