"""Time of one allocation and its free on a hit: ours, PyTorch's and CuPy's, in one run.

    PYTHONPATH=. python benchmarks/allocator.py [--json FILE]

A hit is served from cached memory: no side may call its device meanwhile,
which is checked. Samples of all sides take turns, so that a busy machine hits all of them; the
figures are medians. Without a GPU only our side runs, over ordinary memory: the work is the same.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import app, flags, logging
from machine import describe_start, read_processor

import tracegraph as tg
from tracegraph.runtime.default_device import find_any_device

_REPEATS = flags.DEFINE_integer("repeats", 500, "samples of each side", 1)
_PAIRS = flags.DEFINE_integer("pairs", 200, "allocations and frees in one sample", 1)
_JSON = flags.DEFINE_string("json", None, "write the figures to this file")

LIMIT_US = 8.0
# The side that the limit is for, and those that the ratios are to.
OURS, PEERS = "tracegraph", ("torch", "cupy")
MIXED_BLOCKS, GROUP = 100, 10
WARM_UP_ROUNDS = 20

Loop = Callable[[int], None]
# What stays in use until the end.
_neighbours: list[Any] = []


class Side(NamedTuple):
    """An allocator: what allocates, what frees, and how often it has called its device."""

    allocate: Callable[[int], Any]
    free: Callable[[Any], object]
    count_requests: Callable[[], int]


class Row(NamedTuple):
    """The figures of one workload, in microseconds per allocation and free, by side."""

    name: str
    medians_us: Mapping[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as long as each peer ours takes."""
        ours_us = self.medians_us[OURS]
        return {peer: ours_us / us for peer, us in self.medians_us.items() if peer in PEERS}


def make_single_loop(side: Side, nbytes: int, *, is_exact: bool = False) -> Loop:
    """Returns a loop that allocates one size and frees it at once.

    Args:
        side: of the loop.
        nbytes: the size.
        is_exact: a free block of that size lies between two that are in use. Else the block is
            split off a larger one, and merged with it again.
    """
    allocate, free = side.allocate, side.free
    if is_exact:
        kept = [allocate(nbytes) for _ in range(3)]
        free(kept.pop(1))
        _neighbours.append(kept)

    def loop(count: int) -> None:
        for _ in range(count):
            free(allocate(nbytes))

    return loop


def make_mixed_loop(side: Side, seed: int) -> Loop:
    """Returns a loop that frees ten of a hundred blocks at a time and allocates them again.

    Their sizes are from 1 byte to 16 MiB. They are allocated again in the opposite order, so blocks
    are split and merged.
    """
    allocate, free = side.allocate, side.free
    rng = random.Random(seed)
    sizes = [int(2 ** rng.uniform(0, 24)) for _ in range(MIXED_BLOCKS)]
    live = [allocate(nbytes) for nbytes in sizes]
    order = rng.sample(range(MIXED_BLOCKS), MIXED_BLOCKS)
    groups = [order[start : start + GROUP] for start in range(0, MIXED_BLOCKS, GROUP)]
    number = 0

    def loop(count: int) -> None:
        nonlocal number
        for _ in range(0, count, GROUP):
            group = groups[number % len(groups)]
            number += 1
            for index in group:
                free(live[index])
                live[index] = None
            for index in reversed(group):
                live[index] = allocate(sizes[index])

    return loop


WORKLOADS: dict[str, Callable[[Side], Loop]] = {
    "512 bytes, split": lambda side: make_single_loop(side, 512),
    "8 MiB, split": lambda side: make_single_loop(side, 8 << 20),
    "512 bytes, exact": lambda side: make_single_loop(side, 512, is_exact=True),
    "100 mixed sizes": lambda side: make_mixed_loop(side, seed=0),
}


def make_sides() -> dict[str, Side]:
    """Returns the sides that this machine has, ours first."""
    allocator = find_any_device().allocator

    def count_requests() -> int:
        figures = allocator.statistics
        return figures.num_device_alloc + figures.num_device_free

    sides = {
        OURS: Side(allocator.allocate, allocator.free, count_requests),
        "tg.memory": Side(
            tg.memory.caching_allocator_alloc, tg.memory.caching_allocator_delete, count_requests
        ),
    }
    if jax.devices()[0].platform == "gpu":
        makers = {"torch": make_torch_side, "cupy": make_cupy_side}
        found = {name: make for name, make in makers.items() if importlib.util.find_spec(name)}
        sides.update({name: make() for name, make in found.items()})
    return sides


def make_torch_side() -> Side:
    """Returns PyTorch's caching allocator, through its public functions."""
    # Untyped, because the other parts of the project are checked without PyTorch.
    cuda: Any = importlib.import_module("torch").cuda
    stream = cuda.current_stream()

    def allocate(nbytes: int) -> int:
        return cuda.caching_allocator_alloc(nbytes, 0, stream)

    def count_requests() -> int:
        figures = cuda.memory_stats()
        return figures["num_device_alloc"] + figures["num_device_free"]

    return Side(allocate, cuda.caching_allocator_delete, count_requests)


def make_cupy_side() -> Side:
    """Returns CuPy's pool; its blocks are freed when they are dropped."""
    cupy: Any = importlib.import_module("cupy")
    return Side(cupy.cuda.alloc, lambda _: None, cupy.get_default_memory_pool().total_bytes)


def measure(sides: Mapping[str, Side], name: str, repeats: int, pairs: int) -> Row:
    """Times one workload on all sides in turns; exits where a side called its device.

    Args:
        sides: by name.
        name: of the workload.
        repeats: samples of each side.
        pairs: allocations and frees in one sample.
    """
    loops = {key: WORKLOADS[name](side) for key, side in sides.items()}
    for loop in loops.values():
        # The splits of the mixed sizes need some rounds until they repeat.
        loop(WARM_UP_ROUNDS * MIXED_BLOCKS)
    before = {key: side.count_requests() for key, side in sides.items()}
    samples: dict[str, list[float]] = {key: [] for key in loops}
    order = list(loops)
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            order.reverse()
            for key in order:
                start = time.perf_counter_ns()
                loops[key](pairs)
                samples[key].append((time.perf_counter_ns() - start) / pairs / 1000)
    finally:
        gc.enable()
    asking = [key for key, side in sides.items() if side.count_requests() != before[key]]
    if asking:
        sys.exit(f"{name}: not only hits, {', '.join(asking)} asked the device for memory")
    return Row(name, {key: statistics.median(values) for key, values in samples.items()})


def format_rows(rows: Sequence[Row]) -> str:
    """Returns the table of times."""
    sides = list(rows[0].medians_us)
    peers = list(rows[0].ratios)
    header = [*(f"{side} us" for side in sides), *(f"to {peer}" for peer in peers), "limit"]
    lines = [f"{'alloc + free':<18}" + "".join(f"{text:>15}" for text in header) + "  pass"]
    for row in rows:
        figures = [*row.medians_us.values(), *row.ratios.values(), LIMIT_US]
        verdict = "yes" if row.medians_us[OURS] <= LIMIT_US else "NO"
        lines.append(f"{row.name:<18}" + "".join(f"{x:>15.2f}" for x in figures) + f"  {verdict}")
    return "\n".join(lines)


def describe_run(sides: Sequence[str]) -> dict[str, Any]:
    """Returns date, versions and machine, without which a figure means nothing."""
    names = ("jax", "jaxlib", *(name for name in PEERS if name in sides))
    return {
        **describe_start(__file__, ()),
        **{name: read_version(name) for name in names},
        "device": jax.devices()[0].device_kind,
        "processor": read_processor(),
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "repeats": _REPEATS.value,
        "pairs": _PAIRS.value,
    }


def read_version(module: str) -> str:
    """Returns the version of an imported package; its wheel may have another name."""
    loaded = sys.modules.get(module)
    return str(getattr(loaded, "__version__", None) or importlib.metadata.version(module))


def main(argv: Sequence[str]) -> None:
    """Prints the table, and writes the figures if asked."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    sides = make_sides()
    run = describe_run(list(sides))
    print(", ".join(f"{key} {value}" for key, value in run.items()))
    rows = [measure(sides, name, _REPEATS.value, _PAIRS.value) for name in WORKLOADS]
    print(format_rows(rows))
    if _JSON.value:
        figures = [
            {
                "name": row.name,
                **{f"{side}_us": us for side, us in row.medians_us.items()},
                **{f"ratio_to_{peer}": ratio for peer, ratio in row.ratios.items()},
                "limit_us": LIMIT_US,
            }
            for row in rows
        ]
        document = json.dumps({"run": run, "figures": figures}, indent=1)
        pathlib.Path(_JSON.value).write_text(document + "\n")


if __name__ == "__main__":
    app.run(main)
