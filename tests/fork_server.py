"""Runs Python programs in copies of this process, which has imported JAX.

tests/processes.py starts it and writes, in each line, requests for copies that run together. The
answers are the process number of each copy and, once they have ended, their exit statuses. A copy
ends as every interpreter does: it returns from here with an exit status, and what is alive is torn
down.

JAX reads ``JAX_…`` variables when it is imported, so that requests cannot change those; it starts
its backend, and the threads of that, in the copy.

What is alive before is left out of the collector's rounds: to go through all modules of JAX at its
end took a copy a fifth of a second. `gc.unfreeze` undoes that where a program tests how it ends.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import runpy
import sys
import types
from typing import Any

import jax.numpy  # noqa: F401 - what each copy would import first

import tracegraph  # noqa: F401
from tests.shared_programs import share_contexts


def receive() -> dict[str, Any]:
    """Answers requests; returns in each copy, with the request that it is for."""
    for line in sys.stdin:
        numbers = []
        for request in json.loads(line):
            number = os.fork()
            if not number:
                return request
            numbers.append(number)
            _answer(number)
        for number in numbers:
            _answer(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
    sys.exit()


def _answer(number: int) -> None:
    print(number, flush=True)


def run(request: dict[str, Any]) -> None:
    """Runs what ``python`` would with these arguments: ``-c``, ``-m`` or the path of a script."""
    for descriptor, path in enumerate((os.devnull, request["out"], request["error"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    path = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[1:1] = [entry for entry in path if entry not in sys.path]
    kind, *arguments = request["arguments"]
    if kind == "-c":
        sys.argv, sys.path[0] = [kind, *arguments[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv, sys.path[0] = arguments, request["folder"]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [kind, *arguments], str(pathlib.Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    share_contexts()
    gc.collect()
    gc.freeze()
    run(receive())
