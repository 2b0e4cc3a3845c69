"""Matmuls in float32 with all bits: `numerics="equivalent"`, XLA's and PyTorch's, on a GPU.

    PYTHONPATH=. python benchmarks/float_matmuls.py [--output DIR] [--repeats N] [--dry-run]

Each side is one graph of several matmuls of one shape, replayed; the figure is the time of one.
Memory has sides row by row, or as gradients need them: ``transposed``. Errors are measured against
float64. Sides take turns; PyTorch has a process of its own, without TF32.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from gpu_timing import time_total
from machine import read_driver, read_processor, read_version, write_files
from peer_process import answer_requests, start_peer

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result file")
_REPEATS = flags.DEFINE_integer("repeats", 7, "turns of each side", 1)
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "tiny sizes on any device, without PyTorch")

EQUIVALENT, XLA, TORCH = 'tg.capture, numerics="equivalent"', "tg.capture", "torch graph"
CALLS = 20


@dataclasses.dataclass(frozen=True)
class Shape:
    """Which matrices are multiplied.

    Attributes:
        rows: of the result.
        depth: what is added up.
        columns: of the result.
        left_transposed: True if memory has the left side column by column.
        right_transposed: True if memory has the right side column by column.
    """

    rows: int
    depth: int
    columns: int
    left_transposed: bool = False
    right_transposed: bool = False

    @property
    def count(self) -> int:
        """How many matmuls a graph has, so that the start of one is not what is timed."""
        return max(2, min(8, (1 << 34) // (self.rows * self.depth * self.columns)))

    def draw(self) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Returns the sides of each matmul, as they lie in memory."""
        rng = np.random.default_rng(0)
        left, right = (self.rows, self.depth), (self.depth, self.columns)
        shapes = (
            left[::-1] if self.left_transposed else left,
            right[::-1] if self.right_transposed else right,
        )

        def make(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
            return rng.normal(size=shape).astype(np.float32)

        return [(make(shapes[0]), make(shapes[1])) for _ in range(self.count)]

    def multiply(self, multiply: Callable[[Any, Any], Any], sides: Any) -> list[Any]:
        """Returns all matmuls of a library's arrays."""
        return [
            multiply(x.T if self.left_transposed else x, y.T if self.right_transposed else y)
            for x, y in sides
        ]


# Forward and backward of a layer of 4096 by 2048 and of one of 2048 by 1024, and squares.
SHAPES = {
    "640 x 4096 x 2048": Shape(640, 4096, 2048),
    "4096 x 640 x 2048, left transposed": Shape(4096, 640, 2048, left_transposed=True),
    "640 x 2048 x 1024": Shape(640, 2048, 1024),
    "2048 x 640 x 1024, left transposed": Shape(2048, 640, 1024, left_transposed=True),
    "640 x 1024 x 2048, right transposed": Shape(640, 1024, 2048, right_transposed=True),
    "1024 x 1024 x 1024": Shape(1024, 1024, 1024),
    "2048 x 2048 x 2048": Shape(2048, 2048, 2048),
    "4096 x 4096 x 4096": Shape(4096, 4096, 4096),
    "4096 x 4096 x 4096, both transposed": Shape(
        4096, 4096, 4096, left_transposed=True, right_transposed=True
    ),
}
TINY = {"8 x 8 x 8": Shape(8, 8, 8, right_transposed=True)}


class JaxSide:
    """A graph of matmuls in JAX.

    Args:
        shape: of the matrices.
        side: how it is captured.
    """

    def __init__(self, shape: Shape, side: str) -> None:
        jax, tg = importlib.import_module("jax"), importlib.import_module("tracegraph")
        highest = functools.partial(jax.numpy.matmul, precision="highest")
        numerics = "equivalent" if side == EQUIVALENT else "xla"
        self._step = tg.capture(functools.partial(shape.multiply, highest), numerics=numerics)
        self._shape = shape
        self._sides = jax.tree.map(jax.numpy.asarray, shape.draw())
        self._synchronise = jax.block_until_ready
        self._results = self._step(self._sides)

    def time(self) -> float:
        """Returns the microseconds of one replay."""
        return time_total(self._advance, lambda: self._synchronise(self._results), CALLS)

    def list_replaced(self) -> list[str]:
        """Returns what became of the kernels that were tried."""
        lines = str(self._step.explain(self._sides)).splitlines()
        return [line.strip() for line in lines if "tensor cores:" in line]

    def measure(self) -> tuple[float, float]:
        """Returns the largest and the root mean square error of the first matmul."""
        x, y = (np.asarray(each, np.float64) for each in self._sides[0])
        right = (x.T if self._shape.left_transposed else x) @ (
            y.T if self._shape.right_transposed else y
        )
        error = np.asarray(self._results[0], np.float64) - right
        return float(np.abs(error).max()), float(np.sqrt((error * error).mean()))

    def _advance(self) -> None:
        self._results = self._step(self._sides)


def serve(connection: Any) -> None:
    """Times PyTorch's graphs: requests are the names of shapes."""
    torch = importlib.import_module("torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    graphs: dict[str, Any] = {}

    def answer(name: str) -> float:
        if name not in graphs:
            shape = SHAPES[name]
            sides = [tuple(torch.from_numpy(each).cuda() for each in pair) for pair in shape.draw()]
            shape.multiply(torch.matmul, sides)
            graphs.clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = shape.multiply(torch.matmul, sides)
            graphs[name] = graph, sides, results
        return time_total(graphs[name][0].replay, torch.cuda.synchronize, CALLS)

    answer_requests(connection, answer)


def main(argv: Sequence[str]) -> None:
    """Times all sides and writes the result."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if _DRY_RUN.value:
        write(run(TINY, None))
        return
    with start_peer(serve) as ask:
        jax = importlib.import_module("jax")
        if jax.default_backend() != "gpu":
            sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
        write(run(SHAPES, ask))


def run(shapes: dict[str, Shape], ask: Callable[..., Any] | None) -> dict[str, Any]:
    """Returns the figures of every shape."""
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        sides = {side: JaxSide(shape, side) for side in (EQUIVALENT, XLA)}
        timers: dict[str, Callable[[], float]] = {side: each.time for side, each in sides.items()}
        if ask is not None:
            timers[TORCH] = functools.partial(ask, name)
        samples: dict[str, list[float]] = {side: [] for side in timers}
        for _ in range(_REPEATS.value):
            for side, time_one in timers.items():
                samples[side].append(time_one() / shape.count)
        times = {side: statistics.median(each) for side, each in samples.items()}
        found[name] = {
            "matmuls": shape.count,
            "microseconds of one": times,
            "errors, largest and root mean square": {
                side: each.measure() for side, each in sides.items()
            },
            "replaced": sides[EQUIVALENT].list_replaced(),
        }
        rates = {
            side: 2e-6 * shape.rows * shape.depth * shape.columns / us for side, us in times.items()
        }
        shown = ", ".join(
            f"{side} {us:.1f} us ({rates[side]:.0f} TFLOPS)" for side, us in times.items()
        )
        print(f"{name}: {shown}", flush=True)
    return found


def write(found: dict[str, Any]) -> None:
    """Writes the result file."""
    document = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python benchmarks/float_matmuls.py", *sys.argv[1:]]),
        "machine": {"processor": read_processor(), "gpu": read_driver()},
        "versions": {name: read_version(name) for name in ("jax", "jaxlib", "torch")},
        "shapes, rows by depth by columns": found,
    }
    name = "float_matmuls_dry_run" if _DRY_RUN.value else "float_matmuls"
    write_files(_OUTPUT.value, name, document)


if __name__ == "__main__":
    app.run(main)
