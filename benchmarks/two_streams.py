"""Two independent chains of matmuls on two streams of one graph, against one stream, on a GPU.

    PYTHONPATH=. python benchmarks/two_streams.py [--output DIR] [--size N] [--repeats N]

Sides: a captured function, a raw graph, and `torch.cuda.graph` where PyTorch is installed, each on
one stream and on two. The matrices are so small that one chain cannot fill the GPU. All sides take
turns in one process; the figures are medians over the repeats, of the time per replay of a long
loop. Every result is compared before it is timed. The limit is 0.7 x the graph of one stream.
"""

from __future__ import annotations

import datetime
import importlib
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from gpu_timing import time_total
from machine import read_processor, write_files

import tracegraph as tg

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result files")
_SIZE = flags.DEFINE_integer("size", 256, "rows and columns of each matrix", 1)
_LENGTH = flags.DEFINE_integer("length", 50, "matmuls of each chain", 1)
_REPEATS = flags.DEFINE_integer("repeats", 9, "turns of each side", 1)
_CALLS = flags.DEFINE_integer("calls", 100, "replays per turn", 1)
_TORCH = flags.DEFINE_bool("torch", True, "time PyTorch too, where it is installed")
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "tiny sizes on any device, without PyTorch")

LIMIT = 0.7
TOLERANCE = 0.02
FUNCTION, BLOCK, TORCH = "tg.capture", "tg.CUDAGraph", "torch.cuda.graph"


class Side(NamedTuple):
    """One graph: what replays it once, waits for it, and reads its two results."""

    replay: Callable[[], object]
    synchronise: Callable[[], object]
    read: Callable[[], tuple[Any, Any]]


def multiply(x: Any, w: Any, length: int) -> Any:
    """Returns the end of a chain; works on arrays of JAX and of PyTorch."""
    for _ in range(length):
        x = x @ w
    return x


def fork(first: Callable[[], Any], second: Callable[[], Any], side: Any) -> tuple[Any, Any]:
    """Runs two chains: the first on another stream if there is one, the second on this one."""
    if side is None:
        return first(), second()
    main = tg.current_stream()
    side.wait_stream(main)
    with tg.stream(side):
        left = first()
    right = second()
    main.wait_stream(side)
    return left, right


def make_arrays(size: int) -> list[np.ndarray[Any, Any]]:
    """Returns two inputs and two weights; each weight keeps the norm of what it multiplies."""
    random = np.random.default_rng(0)
    inputs = [random.standard_normal((size, size)) for _ in range(2)]
    weights = [np.linalg.qr(random.standard_normal((size, size)))[0] for _ in range(2)]
    return [each.astype(np.float32) for each in (*inputs, *weights)]


def make_function(arrays: Sequence[Any], length: int, side: Any) -> tuple[Side, Any]:
    """Returns a captured function as a side, and what describes its graph."""

    def chains(x: Any, y: Any, w: Any, v: Any) -> Any:
        return fork(lambda: multiply(x, w, length), lambda: multiply(y, v, length), side)

    captured = tg.capture(chains)
    operands = [jnp.asarray(each) for each in arrays]
    last: list[Any] = []

    def replay() -> None:
        last[:] = captured(*operands)

    side_of = Side(replay, lambda: jax.block_until_ready(last), lambda: (last[0], last[1]))
    return side_of, captured.get_graph_data(*operands)


def make_block(arrays: Sequence[Any], length: int, side: Any) -> Side:
    """Returns a raw graph as a side."""
    x, y, w, v = (tg.static_input(jnp.asarray(each)) for each in arrays)
    graph = tg.CUDAGraph()
    with tg.graph(graph):
        results = fork(lambda: multiply(x, w, length), lambda: multiply(y, v, length), side)
    return Side(graph.replay, tg.synchronize, lambda: results)


def make_torch(torch: Any, arrays: Sequence[Any], length: int, has_side: bool) -> Side:
    """Returns a graph of PyTorch as a side, captured on one stream or two."""
    torch.set_float32_matmul_precision("high")
    x, y, w, v = (torch.from_numpy(each).cuda() for each in arrays)
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (main, side):
        # The workspace of cuBLAS is made at the first matmul of a stream.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            multiply(x, w, 3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        if has_side:
            side.wait_stream(main)
        with torch.cuda.stream(side if has_side else main):
            left = multiply(x, w, length)
        right = multiply(y, v, length)
        if has_side:
            main.wait_stream(side)
    return Side(graph.replay, torch.cuda.synchronize, lambda: (left.cpu(), right.cpu()))


def find_branches(data: Any) -> int:
    """Returns how many parts of a graph have no edge between them: the chains that may overlap."""
    parts = {node.index: node.index for node in data.nodes}

    def find(index: int) -> int:
        while parts[index] != index:
            index = parts[index]
        return index

    for edge in data.edges:
        parts[find(edge.second)] = find(edge.first)
    return len({find(index) for index in parts})


def check_results(sides: Mapping[str, Side], arrays: Sequence[Any], length: int) -> None:
    """Compares every side with NumPy.

    Raises:
        SystemExit: a result differs by more than the rounding of TF32.
    """
    x, y, w, v = (each.astype(np.float64) for each in arrays)
    expected = multiply(x, w, length), multiply(y, v, length)
    for name, side in sides.items():
        side.replay()
        side.synchronise()
        for got, right in zip(side.read(), expected, strict=True):
            off = np.linalg.norm(np.asarray(got) - right) / np.linalg.norm(right)
            if not off <= TOLERANCE:
                sys.exit(f"a result of {name} is off by {off:.3g} in norm")


def measure(sides: Mapping[str, Side], repeats: int, calls: int) -> dict[str, float]:
    """Returns the median microseconds of a replay of each side; the sides take turns."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            samples[name].append(time_total(side.replay, side.synchronise, calls))
    return {name: statistics.median(values) for name, values in samples.items()}


def name_side(kind: str, streams: int) -> str:
    """Returns how tables name a side."""
    return f"{kind}, {streams} stream{'s' if streams > 1 else ''}"


def compute_ratios(medians: Mapping[str, float]) -> dict[str, float]:
    """Returns what two streams take of the time of one, for each kind of graph."""
    return {
        kind: medians[name_side(kind, 2)] / medians[name_side(kind, 1)]
        for kind in (FUNCTION, BLOCK, TORCH)
        if name_side(kind, 2) in medians
    }


def format_report(record: Mapping[str, Any]) -> str:
    """Returns the figures as a page of Markdown."""
    lines = [
        "# Two chains of matmuls on two streams",
        "",
        *(f"* {key}: {record[key]}" for key in ("date", "command", "device", "jax", "torch")),
        f"* two chains of {record['length']} matmuls of {record['size']} x {record['size']}, "
        f"float32; branches of the graph of two streams: {record['branches'][1]}, "
        f"of one: {record['branches'][0]}",
        "",
        "| graph | microseconds per replay |",
        "|---|---|",
        *(f"| {name} | {value:.1f} |" for name, value in record["microseconds"].items()),
        "",
        "| two streams against one | measured | limit | verdict |",
        "|---|---|---|---|",
    ]
    for kind, ratio in record["ratios"].items():
        verdict = "" if kind == TORCH or record["is_dry"] else judge(ratio)
        lines.append(f"| {kind} | {ratio:.2f} | {LIMIT if verdict else ''} | {verdict} |")
    return "\n".join(lines) + "\n"


def judge(ratio: float) -> str:
    """Returns the verdict on one of our ratios."""
    return "met" if ratio <= LIMIT else "missed"


def load_torch() -> Any:
    """Returns PyTorch, or None where it is not wanted, missing or without a GPU."""
    if _DRY_RUN.value or not _TORCH.value:
        return None
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def main(argv: Sequence[str]) -> None:
    """Runs all sides and writes the figures as JSON and Markdown."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if not _DRY_RUN.value and jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    size, length = (8, 3) if _DRY_RUN.value else (_SIZE.value, _LENGTH.value)
    repeats, calls = (1, 2) if _DRY_RUN.value else (_REPEATS.value, _CALLS.value)
    arrays, torch = make_arrays(size), load_torch()
    sides: dict[str, Side] = {}
    branches: list[int] = []
    for streams in (1, 2):
        other = tg.Stream() if streams == 2 else None
        sides[name_side(FUNCTION, streams)], data = make_function(arrays, length, other)
        branches.append(find_branches(data))
        sides[name_side(BLOCK, streams)] = make_block(arrays, length, other)
        if torch is not None:
            sides[name_side(TORCH, streams)] = make_torch(torch, arrays, length, streams == 2)
    check_results(sides, arrays, length)
    medians = measure(sides, repeats, calls)
    record = {
        "date": str(datetime.date.today()),
        "command": " ".join(["python", *sys.argv]),
        "device": jax.devices()[0].device_kind,
        "processor": read_processor(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "torch": None if torch is None else torch.__version__,
        "is_dry": _DRY_RUN.value,
        "size": size,
        "length": length,
        "branches": branches,
        "microseconds": medians,
        "ratios": compute_ratios(medians),
    }
    stem = f"two_streams_{'dry_run' if _DRY_RUN.value else 'gpu'}"
    page = format_report(record)
    write_files(_OUTPUT.value, stem, record, page)
    print(page, end="")


if __name__ == "__main__":
    app.run(main)
