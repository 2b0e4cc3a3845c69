"""Raw graphs: `CUDAGraph.replay` against PyTorch's, and recording against tracing, in one run.

    PYTHONPATH=. python benchmarks/raw_graph.py [--output DIR] [--rounds N] [--notorch] [--dry-run]

A graph is a chain of small kernels, one per node, the same number on all sides. The sides of a case
take turns; PyTorch has a process of its own. Figures are medians over the rounds.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from gpu_sides import PeerError, TorchProcess, TorchSide, find_captured
from gpu_timing import time_each, time_total
from jax import lax
from machine import describe_start, read_driver, write_files
from recording import format_recording, list_figures, measure_recording

import tracegraph as tg

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result files")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "turns of each side", 1)
_TORCH = flags.DEFINE_bool("torch", True, "run the PyTorch peer")
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "on any device, few rounds, without PyTorch")

MINE, CAPTURED, TORCH = "tg.CUDAGraph", "tg.capture", "torch.cuda.CUDAGraph"
SIZE, FACTOR = 1024, 1.0009765625
CALLS = 200
DRY_ROUNDS, DRY_CALLS, DRY_OPS = 2, 5, 10
# Of the host time of a replay, to PyTorch's.
LIMIT = 1.1
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "cuda-bindings"),
    *("torch", "numpy"),
)


@dataclasses.dataclass(frozen=True)
class ChainCase:
    """A graph, and what is done with it.

    Attributes:
        name: in the tables.
        nodes: kernels in the chain.
        inputs: static inputs that are added up before the chain; further nodes are none of it.
        is_filled: whether `copy_` fills the first input before each replay.
    """

    name: str
    nodes: int
    inputs: int = 1
    is_filled: bool = False


CASES = (
    ChainCase("1 node", 1),
    ChainCase("10 nodes", 10),
    ChainCase("100 nodes", 100),
    ChainCase("10 nodes, 20 inputs", 10, inputs=20),
    ChainCase("10 nodes, copy_ before", 10, is_filled=True),
)


@dataclasses.dataclass(frozen=True)
class HostSide:
    """A side of this process.

    Attributes:
        advance: replays once.
        finish: waits until the device is idle.
        read: returns the result.
        nodes: of its graph.
    """

    advance: Callable[[], object]
    finish: Callable[[], object]
    read: Callable[[], Any]
    nodes: int

    def time_total(self, calls: int) -> float:
        """See `gpu_timing.time_total`."""
        return time_total(self.advance, self.finish, calls)

    def time_each(self) -> list[float]:
        """See `gpu_timing.time_each`."""
        return time_each(self.advance, self.finish)


def compute(inputs: Sequence[Any], nodes: int) -> Any:
    """Returns a chain of ops that XLA keeps apart."""
    x = inputs[0]
    for other in inputs[1:]:
        x = x + other
    for _ in range(nodes):
        x = lax.optimization_barrier(x * FACTOR)
    return x


def make_sides(case: ChainCase) -> dict[str, HostSide]:
    """Returns both ways to replay a chain here."""
    statics = [tg.static_input(jnp.ones(SIZE)) for _ in range(case.inputs)]
    values = [jnp.full(SIZE, value, jnp.float32) for value in (1.0, 2.0)]
    graph = tg.CUDAGraph()
    with tg.graph(graph):
        output = compute(statics, case.nodes)
    plain = [jnp.ones(SIZE) for _ in range(case.inputs)]

    def run(x: Any) -> Any:
        return compute([x, *plain[1:]], case.nodes)

    filled = tg.capture(run, outputs="static", name="filled")
    bare = tg.capture(lambda: run(plain[0]), outputs="static", name="bare")
    result: Any = filled(plain[0]) if case.is_filled else bare()
    turn = 0

    def fill_and_replay() -> None:
        nonlocal turn
        turn ^= 1
        statics[0].copy_(values[turn])
        graph.replay()

    def call() -> None:
        nonlocal turn
        turn ^= 1
        filled(values[turn])

    # The same object at each call: a static output shows the latest replay.
    captured, function = (filled, call) if case.is_filled else (bare, bare)
    graph.replay()
    # Of the captured function; the block is the same program.
    nodes = find_captured(captured).lowered.definition.node_count
    advance = fill_and_replay if case.is_filled else graph.replay
    return {
        MINE: HostSide(advance, output.block_until_ready, lambda: output, nodes),
        CAPTURED: HostSide(function, tg.synchronize, lambda: result, nodes),
    }


def measure_case(case: ChainCase, peer: TorchProcess | None, rounds: int) -> dict[str, Any]:
    """Times the sides of a case in turns.

    Returns:
        ``sides``, figures by side; ``ratio`` of the host times of both raw graphs, if there is a
        peer; ``notes``, why there is none.
    """
    mine = make_sides(case)
    wanted = np.asarray(mine[CAPTURED].read())
    if not case.is_filled:
        np.testing.assert_allclose(mine[MINE].read(), wanted, rtol=1e-5)
    sides: dict[str, HostSide | TorchSide] = {**mine}
    nodes: dict[str, int | None] = {name: side.nodes for name, side in mine.items()}
    notes: dict[str, str] = {}
    if peer is not None:
        try:
            chain = (SIZE, FACTOR, case.nodes, case.inputs, case.is_filled)
            peer.ask("prepare_chain", case.name, chain)
            sides[TORCH], nodes[TORCH] = TorchSide(peer, case.name), None
        except PeerError as error:
            notes[TORCH] = str(error)
    names = list(sides)
    totals: dict[str, list[float]] = {name: [] for name in names}
    hosts: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            totals[name].append(sides[name].time_total(DRY_CALLS if _DRY_RUN.value else CALLS))
            hosts[name] += sides[name].time_each()
    figures = {
        name: {
            "host_us": statistics.median(hosts[name]),
            "total_us": statistics.median(totals[name]),
            "nodes": nodes[name],
        }
        for name in names
    }
    found: dict[str, Any] = {"name": case.name, "sides": figures, "notes": notes}
    if TORCH in figures:
        found["ratio"] = figures[MINE]["host_us"] / figures[TORCH]["host_us"]
    return found


def format_report(run: Mapping[str, Any], cases: Sequence[Any], recording: str) -> str:
    """Returns the page of results."""
    lines = ["# Raw graphs", "", *(f"* {key}: {value}" for key, value in run.items()), ""]
    lines += ["## Microseconds per replay", ""]
    lines += ["| case | side | nodes | host | total | host / torch | limit | |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for case in cases:
        for name, side in case["sides"].items():
            ratio, limit, verdict = "", "", ""
            if name == MINE and "ratio" in case:
                ratio, limit = f"{case['ratio']:.2f}", f"{LIMIT:.1f}"
                verdict = "met" if case["ratio"] <= LIMIT else "NOT MET"
            nodes = "" if side["nodes"] is None else side["nodes"]
            lines.append(
                f"| {case['name']} | {name} | {nodes} | {side['host_us']:.1f} "
                f"| {side['total_us']:.1f} | {ratio} | {limit} | {verdict} |"
            )
        lines += [f"* {case['name']}, {name}: {note}" for name, note in case["notes"].items()]
    return "\n".join([*lines, "", "## Recording", "", recording, ""])


def describe_run(rounds: int) -> dict[str, Any]:
    """Returns date, versions, devices and command, without which a figure means nothing."""
    return {
        **describe_start(__file__, PACKAGES),
        "device": jax.devices()[0].device_kind,
        "driver": read_driver(),
        "cores": os.cpu_count(),
        "rounds": rounds,
    }


def main(argv: Sequence[str]) -> None:
    """Runs all cases and writes one page of results."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)
    # Half of the device's memory stays for the PyTorch process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    if not _DRY_RUN.value and jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    rounds = DRY_ROUNDS if _DRY_RUN.value else _ROUNDS.value
    peer = TorchProcess() if _TORCH.value and not _DRY_RUN.value else None
    run = describe_run(rounds)
    try:
        if peer is not None:
            run |= peer.describe()
        cases = [measure_case(case, peer, rounds) for case in CASES]
    finally:
        if peer is not None:
            peer.close()
    rows = measure_recording(DRY_OPS if _DRY_RUN.value else 500, rounds)
    report = format_report(run, cases, format_recording(rows))
    print(report)
    name = "raw_graph_dry_run" if _DRY_RUN.value else "raw_graph"
    document = {"run": run, "cases": cases, "limit": LIMIT, "recording": list_figures(rows)}
    write_files(_OUTPUT.value, name, document, report)


if __name__ == "__main__":
    app.run(main)
