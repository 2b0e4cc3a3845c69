"""One start for `cold_start.py`, in a process of its own: prints what it took as JSON.

    PYTHONPATH=.:benchmarks python benchmarks/cold_start_process.py SIDE CASE [--file FILE]
        [--numerics NUMERICS] [--host] [--dry-run]

A first capture writes the file, if one is named, when it has been measured; a load reads it.

The clock starts when the arguments are on the device: the JAX client and, on a GPU, the CUDA
context exist, and both packages are imported. It stops when the results of the last signature's
first call are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import bucket_decoder
import jax
import numpy as np
from gpu_models import GptShape, make_batches, make_gpt_step, make_state
from gpu_sides import find_captured

import tracegraph as tg
from tracegraph.capturing import pipeline
from tracegraph.runtime.definition.graph_nodes import list_nested
from tracegraph.tracing import checked_graph

FIRST, HIT, LOAD = "first capture", "cache hit", "tg.load"
JIT, WARM_JIT = "jax.jit", "jax.jit, warm cache"
SIDES = (FIRST, HIT, LOAD, JIT, WARM_JIT)
DECODE, GPT = "decode", "gpt"
STARTS = (GPT, DECODE)
# Of `whole_programs.py`, whose libraries take a second to import.
LOOPS = ("gpt_scan_12", "lstm_100", "diffrax")
CASES = (*STARTS, *LOOPS)
BLOCKS = 5


class TraceTimer:
    """Counts the seconds in which JAX traces for a capture: once, and again to check.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        # A capture moves the clocks that modules name while it traces again.
        self._read_clock = time.perf_counter
        callers: tuple[Any, ...] = (pipeline, checked_graph)
        for module in callers:
            module.trace_call = functools.partial(self._run, module.trace_call)

    def _run(self, trace: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = self._read_clock()
        try:
            return trace(*args, **kwargs)
        finally:
            self.seconds += self._read_clock() - start


@dataclasses.dataclass(frozen=True)
class Program:
    """What is started.

    Attributes:
        function: of the calls.
        calls: the arguments of one call of each signature.
        donated: its first argument is a state, which it returns first.
        replays: calls of one timed block.
    """

    function: Callable[..., Any]
    calls: list[tuple[Any, ...]]
    donated: bool
    replays: int


def make_program(case: str, *, is_host: bool, is_dry: bool) -> Program:
    """Returns a case in its size, with arguments on the device.

    Args:
        case: a train step of one signature, a decode step of many, or a program with loops.
        is_host: of a size that a CPU compiles in seconds.
        is_dry: of a size that a CPU runs in a moment.
    """
    if case == GPT:
        layers, width = (1, 8) if is_dry else (4, 128) if is_host else (12, 128)
        shape = GptShape(layers, width, 2 if is_dry else 4, 256, 64, (2, 4) if is_dry else (4, 64))
        (batch,) = jax.device_put(make_batches(shape, 1))
        arguments = (make_state(shape), *batch)
        return Program(make_gpt_step(shape.heads), [arguments], True, 3 if is_dry else 20)
    if case in LOOPS:
        programs = importlib.import_module("whole_models").PROGRAMS
        (program,) = (each for each in programs if each.name == case)
        setup = program.make(is_dry)
        arguments = jax.device_put((setup.state, *setup.batch))
        return Program(setup.function, [arguments], True, 3 if is_dry else program.calls)
    count, width = (2, 16) if is_dry else (8, 256) if is_host else (64, 256)
    weights = bucket_decoder.make_weights(width, 2)
    calls = [(weights, *bucket_decoder.make_arguments(size + 1, width)) for size in range(count)]
    return Program(bucket_decoder.decode, calls, False, 3 if is_dry else 100)


def run_start(side: str, program: Program, file: str | None, numerics: str) -> dict[str, Any]:
    """Makes the first calls and returns what they took, and what shows that they were right."""
    jax.block_until_ready((program.calls, jax.live_arrays()))
    timer = TraceTimer()
    start = time.perf_counter()
    call = make_call(side, program, file, numerics)
    results = [call(*arguments) for arguments in program.calls]
    jax.block_until_ready(jax.tree.leaves(results)[-1:])
    seconds = time.perf_counter() - start
    arguments = program.calls[-1]
    if program.donated:
        arguments = (results[-1][0], *arguments[1:])
    replay = time_replays(call, arguments, program)
    found = {"seconds": seconds, "replay us": replay, "device": jax.devices()[0].device_kind}
    # Of a train step the loss: XLA adds its gradients of the embedding in no fixed order.
    firsts = [result[1:] for result in results] if program.donated else results
    found |= {"digest": read_digest(firsts)}
    found["trace seconds"] = timer.seconds
    if side in (JIT, WARM_JIT):
        return found
    if side == FIRST and file is not None:
        call.save(file)
        found["file bytes"] = pathlib.Path(file).stat().st_size
    return found | read_capture(call)


def make_call(side: str, program: Program, file: str | None, numerics: str) -> Any:
    """Returns what is called like the program's function."""
    if side == LOAD:
        return tg.load(str(file))
    wrap: Any = jax.jit if side in (JIT, WARM_JIT) else tg.capture
    options = {"numerics": numerics} if wrap is tg.capture else {}
    return wrap(program.function, donate_argnums=(0,) if program.donated else (), **options)


def time_replays(call: Callable[..., Any], arguments: tuple[Any, ...], program: Program) -> float:
    """Returns the median microseconds of a call in a long loop."""
    samples, result = [], None
    # One block more: it makes this code and the clocks of the device the current ones.
    for _ in range(BLOCKS + 1):
        start = time.perf_counter()
        for _ in range(program.replays):
            result = call(*arguments)
            if program.donated:
                arguments = (result[0], *arguments[1:])
        jax.block_until_ready(jax.tree.leaves(result)[-1:])
        samples.append(1e6 * (time.perf_counter() - start) / program.replays)
    return statistics.median(samples[1:])


def read_digest(results: Any) -> str:
    """Returns a digest of all bits of the results."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(results):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def read_capture(call: Any) -> dict[str, Any]:
    """Returns the phases of the last signature's capture, and what the kernel cache did."""
    info = tg.kernel_cache.info()
    phases = call.timings() if hasattr(call, "timings") else {}
    found: dict[str, Any] = {"phases": dict(phases), "hits": info.hits, "stores": info.stores}
    return found | {"kernel bytes": count_kernel_bytes(find_captured(call).lowered.definition)}


def count_kernel_bytes(definition: Any) -> int:
    """Returns the bytes of a graph's kernels, each counted once; 0 on the host device."""
    nodes = [node for stage in definition.stages for node in list_nested(stage.nodes)]
    codes = {code.cubin for node in nodes if (code := getattr(node, "code", None)) is not None}
    return sum(map(len, codes))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one start and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--file")
    parser.add_argument("--numerics", default="xla")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(arguments)
    program = make_program(given.case, is_host=given.host, is_dry=given.dry_run)
    print(json.dumps(run_start(given.side, program, given.file, given.numerics)))


if __name__ == "__main__":
    main()
