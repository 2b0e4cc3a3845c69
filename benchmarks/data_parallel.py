"""A step over several devices: captured, against `jax.jit` with the same shardings.

    PYTHONPATH=.:benchmarks python benchmarks/data_parallel.py [--devices N] [--dry-run]
    PYTHONPATH=.:benchmarks python benchmarks/data_parallel.py --processes 2 [--dry-run]

Three cases: a train step of a GPT of 12 layers of 128, its batch split and its state whole on each
device; a sum of 64 KiB over the devices; and chains of sums of several sizes in one call, of which
the time of one more sum is told. The sides take turns, and their results are compared first. Where
a side is refused, its error stands in its place.
With `--processes` each process has one device, and only the train step is timed: cut at what
crosses processes, always with the graphs ("graphs") and as the comparison at capture decides.
Without a GPU, JAX makes the CPU devices; prints one JSON object.
"""

from __future__ import annotations

import datetime
import functools
import json
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags
from gpu_models import make_batches, make_cases, make_state
from gpu_timing import time_total
from machine import read_processor, read_version

import tracegraph as tg

_DEVICES = flags.DEFINE_integer("devices", 2, "of how many devices the mesh is", 2)
_PROCESSES = flags.DEFINE_integer("processes", 1, "with one device each", 1)
_RANK = flags.DEFINE_integer("rank", None, "which of the processes this is")
_PORT = flags.DEFINE_integer("port", 0, "where they meet")
_REPEATS = flags.DEFINE_integer("repeats", 7, "turns of each side", 1)
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "tiny sizes")
# Of jax.jit's time; and microseconds of a sum.
LIMIT, SUM_LIMIT, SUM_BYTES = 0.6, 8.0, 64 << 10
# Sums in a chain, and the bytes that each device adds.
SHORT, LONG = 10, 60
CHAINED_BYTES = (64 << 10, 256 << 10, 1 << 20, 16 << 20)


class Side:
    """One way to run a case.

    Args:
        call: takes the state and a batch, and returns both anew.
        state: that it begins with; the side's own.
        batch: the same at each call.
    """

    def __init__(self, call: Callable[..., Any], state: Any, batch: tuple[Any, ...]) -> None:
        self._call, self._state, self._batch = call, state, batch
        self.result: Any = None

    def advance(self) -> None:
        """Makes one call and waits for nothing."""
        self._state, self.result = self._call(self._state, *self._batch)

    def synchronise(self) -> None:
        """Waits until the devices are idle."""
        jax.block_until_ready((self._state, self.result))


def _make_reader(call: Callable[..., Any], given: jax.Array) -> Side:
    """Returns a side that calls a function of the same array again and again."""
    return Side(lambda state: (state, call(state)), given, ())


def make_gpt_sides(
    mesh: jax.sharding.Mesh, is_dry: bool, **wraps: Callable[..., Any]
) -> dict[str, Callable[[], Side]]:
    """Returns what makes each side of the train step: captured, or wrapped by others."""
    case = next(case for case in make_cases(is_dry=is_dry) if case.name == "gpt_12x128")
    whole, split = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("data"))
    batch = jax.device_put(make_batches(case.shape, 1)[0], split)
    wraps = {"tracegraph": tg.capture, **wraps, "jax.jit": jax.jit}

    def make(wrap: Callable[..., Any]) -> Side:
        # Through the host: a copy that shares memory would be donated with the original.
        state = jax.device_put(jax.device_get(make_state(case.shape, is_smooth=True)), whole)
        return Side(wrap(case.function, donate_argnums=0), state, batch)

    return {name: functools.partial(make, wrap) for name, wrap in wraps.items()}


def make_sum_sides(mesh: jax.sharding.Mesh) -> dict[str, Callable[[], Side]]:
    """Returns what makes each side of the sum; what a device adds are 64 KiB."""
    shape = (len(mesh.devices) * SUM_BYTES // 4,)
    split = jax.NamedSharding(mesh, jax.P("data"))

    over = {"mesh": mesh, "in_specs": jax.P("data"), "out_specs": jax.P()}
    add = jax.shard_map(lambda x: jax.lax.psum(x, "data"), **over)

    def make(wrap: Callable[..., Any]) -> Side:
        return _make_reader(wrap(add), jax.device_put(np.ones(shape, np.float32), split))

    return {"tracegraph": lambda: make(tg.capture), "jax.jit": lambda: make(jax.jit)}


def measure_chain(mesh: jax.sharding.Mesh, nbytes: int, calls: int, repeats: int) -> dict[str, Any]:
    """Returns the microseconds of one sum among others that follow one another."""
    shape = (len(mesh.devices) * nbytes // 4,)
    split = jax.NamedSharding(mesh, jax.P("data"))

    def make_sides(count: int) -> dict[str, Callable[[], Side]]:
        def add_all(x: jax.Array) -> jax.Array:
            for _ in range(count):
                x = jax.lax.psum(x, "data")
            return x

        over = {"mesh": mesh, "in_specs": jax.P("data"), "out_specs": jax.P("data")}
        run = jax.shard_map(add_all, check_vma=False, **over)

        def make(wrap: Callable[..., Any]) -> Side:
            return _make_reader(wrap(run), jax.device_put(np.ones(shape, np.float32), split))

        return {"tracegraph": lambda: make(tg.capture), "jax.jit": lambda: make(jax.jit)}

    short, long = (measure(make_sides(count), calls, repeats) for count in (SHORT, LONG))
    names = [name for name in short if isinstance(short[name], float) and name in long]
    row = {
        name: round((long[name] - short[name]) / (LONG - SHORT), 2)
        for name in names
        if name != "of jax.jit"
    }
    return row if row else short


def measure(sides: dict[str, Callable[[], Side]], calls: int, repeats: int) -> dict[str, Any]:
    """Returns the median microseconds per call of each side, or why it was refused."""
    made: dict[str, Side] = {}
    row: dict[str, Any] = {}
    for name, make in sides.items():
        side = make()
        try:
            side.advance()
        except tg.TracegraphError as error:
            row[name] = str(error).splitlines()[0]
            continue
        made[name] = side
    results = [np.asarray(side.result) for side in made.values()]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(repeats):
        for name, side in made.items():
            times[name].append(time_total(side.advance, side.synchronise, calls))
    row |= {name: round(statistics.median(found), 1) for name, found in times.items()}
    if len(made) == len(sides):
        row["of jax.jit"] = round(row["tracegraph"] / row["jax.jit"], 3)
    return row


def start_processes(count: int) -> None:
    """Runs this program in so many processes; the first one prints."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    command = [sys.executable, *sys.argv, f"--port={port}"]
    started = [subprocess.Popen([*command, f"--rank={rank}"]) for rank in range(count)]
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise app.UsageError("a process has failed")


def measure_processes(count: int, rank: int, port: int, *, is_dry: bool) -> None:
    """Measures the train step in one of several processes."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, rank, local_device_ids=[rank])
    mesh = jax.make_mesh((count,), ("data",), (jax.sharding.AxisType.Auto,))
    calls, repeats = (2, 1) if is_dry else (40, _REPEATS.value)
    capture = functools.partial(tg.capture, mode="partial")
    wraps = {"tracegraph": capture, "graphs": functools.partial(capture, prefer="graph")}
    row = measure(make_gpt_sides(mesh, is_dry, **wraps), calls, repeats)
    if rank == 0:
        print(json.dumps({**_describe(jax.devices()), "train step, microseconds": row}, indent=1))


def _describe(devices: Sequence[Any]) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
        "device": f"{len(devices)} x {devices[0].device_kind}, {read_processor()}",
        "versions": {name: read_version(name) for name in ("jax", "jaxlib", "tracegraph")},
    }


def main(_: list[str]) -> None:
    """Measures all cases and prints them."""
    count, is_dry = _DEVICES.value, _DRY_RUN.value
    if _RANK.value is not None:
        measure_processes(_PROCESSES.value, _RANK.value, _PORT.value, is_dry=is_dry)
        return
    if _PROCESSES.value > 1:
        start_processes(_PROCESSES.value)
        return
    # Has no effect where there are GPUs.
    jax.config.update("jax_num_cpu_devices", count)
    devices = jax.local_devices()[:count]
    if len(devices) < count:
        raise app.UsageError(f"--devices={count}, and there are {len(devices)}")
    mesh = jax.make_mesh((count,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
    calls, repeats = (2, 1) if is_dry else (40, _REPEATS.value)
    print(
        json.dumps(
            {
                **_describe(devices),
                "train step, microseconds": measure(make_gpt_sides(mesh, is_dry), calls, repeats),
                "train step, limit": LIMIT,
                "sum of 64 KiB, microseconds": measure(make_sum_sides(mesh), calls * 5, repeats),
                "one sum in a chain, microseconds by bytes": {
                    nbytes: measure_chain(mesh, nbytes, calls, repeats)
                    for nbytes in CHAINED_BYTES[: 1 if is_dry else None]
                },
                "one sum of 64 KiB, limit on GPUs": SUM_LIMIT,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    app.run(main)
