"""What the longest chain of a graph takes with nothing beside it.

    PYTHONPATH=. python benchmarks/longest_chain.py [--output DIR] [--case NAME] [--rounds N]

A profile finds the longest chain of nodes that wait for one another, for values, memory or the lane
that they are in. It becomes a graph of its own, which is launched in turns with the whole one;
`jax.jit` is timed behind them. How much faster the whole is without all that runs beside the chain
is the most that another order of its nodes can gain.

So does the longest chain in which each node reads what the one before it has written: no order, no
memory plan and no lanes can make a graph of the same nodes shorter than that.

What the chain computes is not looked at, since what other nodes would write is not there. XLA's
kernels stay within their arrays on any values. A loop might not end, and a handler might fail: a
program with one of them on its chain is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numerics
from absl import app, flags
from gpu_timing import time_total
from machine import write_files

import tracegraph as tg
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.lowering.build_graph import find_programmatic
from tracegraph.profiling.critical_path import schedule
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, Node
from tracegraph.runtime.definition.library_nodes import FfiCallNode, MatmulNode
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode, KernelNode
from tracegraph.verification.whole_times import time_in_turns

# The flags are those of `numerics`, whose cases they choose from.
CASES = ("gpt_2x128", "gpt_12x128", "gpt_scan_12")


@dataclasses.dataclass(frozen=True)
class ChainTimes:
    """Microseconds of one program.

    Attributes:
        nodes: of the graph.
        chain_nodes: of its longest chain.
        value_nodes: of the longest chain of values.
        whole_us: a launch of the graph.
        chain_us: a launch of the chain alone.
        value_chain_us: a launch of the chain of values alone.
        one_by_one_us: the chain's nodes, each timed behind itself, added up.
        jit_us: a call of `jax.jit`.
    """

    nodes: int
    chain_nodes: int
    value_nodes: int
    whole_us: float
    chain_us: float
    value_chain_us: float
    one_by_one_us: float
    jit_us: float


def cut_chain(definition: GraphDefinition, path: Sequence[int]) -> GraphDefinition:
    """Returns a graph of some nodes, one after another, in the memory that they have.

    Args:
        definition: of one stage.
        path: the nodes, by their indices.

    Raises:
        ValueError: there are several stages, or one of the nodes depends on values to end.
    """
    (stage,) = definition.stages
    for node in path:
        if isinstance(stage.nodes[node], ConditionalNode | FfiCallNode):
            raise ValueError(f"`{stage.nodes[node].name}` is on the chain, and needs its values")
    nodes = tuple(stage.nodes[node] for node in path)
    edges = tuple(itertools.pairwise(range(len(path))))
    # What a kernel loads ahead of its wait may be there or not: values do not count here.
    early = find_programmatic(nodes, edges, frozenset(map(id, nodes)))
    chain = dataclasses.replace(stage, nodes=nodes, edges=edges, programmatic=early)
    return dataclasses.replace(definition, stages=(chain,))


def find_value_chain(nodes: Sequence[Node], times: Sequence[float]) -> tuple[int, ...]:
    """Returns the longest chain in which each node reads what the one before it has written.

    What a kernel writes counts as read, too: it may be changed in place. The workspace of a matmul
    does not.

    Args:
        nodes: in program order.
        times: of each, in any unit.
    """
    writers: defaultdict[str, list[tuple[BufferUse, int]]] = defaultdict(list)
    waits: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        reads, writes = _list_uses(node)
        waits[index] = [
            writer
            for use in reads
            for written, writer in writers[use.buffer]
            if written.overlaps(use)
        ]
        for use in writes:
            known = writers[use.buffer]
            # What is written over as a whole has no readers any more.
            known[:] = [each for each in known if not use.contains(each[0])] + [(use, index)]
    return schedule(range(len(nodes)), waits, dict(enumerate(times))).path


def _list_uses(node: Node) -> tuple[list[BufferUse], list[BufferUse]]:
    if isinstance(node, KernelNode):
        return list(node.ranges), [use for use, is_written in node.uses if is_written]
    if isinstance(node, MatmulNode):
        return [use for role, use in node.operands if role != "workspace"], list(node.written)
    if isinstance(node, CopyNode):
        return [node.source], [node.target]
    if isinstance(node, FillNode):
        return [], [node.target]
    return list(node.ranges), list(node.ranges)


def measure(case: numerics.NumericsCase) -> ChainTimes:
    """Returns the times of a program."""
    step: Any = tg.capture(case.function, donate_argnums=0)
    step(jax.device_put(case.state), *case.batch)
    args = (jax.device_put(case.state), *case.batch)
    profile = step.profile(*args)
    prepared = step._prepare(args, {}, has_values=True)
    captured = step._find_capture(prepared, args, {}).graph
    whole, path = captured.lowered, profile.critical_path()
    (stage,) = whole.definition.stages
    times = [node.warm_us or 0.0 for node in profile.nodes if node.part == 0]
    of_values = find_value_chain(stage.nodes, times)
    lowered = [
        dataclasses.replace(whole, definition=definition)
        for definition in (
            whole.definition,
            cut_chain(whole.definition, path),
            cut_chain(whole.definition, of_values),
        )
    ]
    graphs = [
        LoweredCapture(
            prepared, captured.checked, each, step._device, FunctionPool(None), {}
        ).instantiate()
        for each in lowered
    ]
    whole_s, chain_s, values_s = time_in_turns(graphs, prepared.leaves, step._device)
    return ChainTimes(
        len(stage.nodes),
        len(path),
        len(of_values),
        1e6 * whole_s,
        1e6 * chain_s,
        1e6 * values_s,
        profile.parts[0].path_us,
        _time_jit(case, args[0]),
    )


def _time_jit(case: numerics.NumericsCase, state: Any) -> float:
    jitted, held = jax.jit(case.function, donate_argnums=0), [state]

    def advance() -> None:
        held[0] = jitted(held[0], *case.batch)[0]

    times = [
        time_total(advance, lambda: jax.block_until_ready(held[0]), case.calls)
        for _ in range(flags.FLAGS.rounds)
    ]
    return statistics.median(times)


def format_row(name: str, found: ChainTimes) -> str:
    """Returns a row of the page."""
    return (
        f"| {name} | {found.nodes} | {found.chain_nodes} | {found.value_nodes} | "
        f"{found.one_by_one_us:.1f} | {found.chain_us:.1f} | {found.value_chain_us:.1f} | "
        f"{found.whole_us:.1f} | {found.jit_us:.1f} | {found.chain_us / found.jit_us:.2f} | "
        f"{found.value_chain_us / found.jit_us:.2f} | {found.whole_us / found.jit_us:.2f} |"
    )


def main(argv: Sequence[str]) -> None:
    """Measures the cases and writes one file of results."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    is_dry = bool(flags.FLAGS["dry-run"].value)
    if not is_dry and jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    chosen = flags.FLAGS.case or CASES
    makers = numerics.list_makers(is_dry=is_dry)
    unknown = [name for name in chosen if name not in makers]
    if unknown:
        raise app.UsageError(f"no case {', '.join(unknown)}; there are {', '.join(makers)}")
    found = {name: measure(makers[name]()) for name in chosen}
    run = numerics.describe_run(is_dry=is_dry)
    lines = [
        "# The longest chain alone",
        "",
        f"{run['driver']}, jax {run['jax']}, {run['date']}: microseconds, "
        "medians. `one by one` adds up what each node of the chain takes behind itself.",
        "",
        "| Program | nodes | of the chain | of values | one by one | chain alone | values alone "
        "| graph | jax.jit | chain / jit | values / jit | graph / jit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(format_row(name, each) for name, each in found.items()),
        "",
    ]
    page = "\n".join(lines)
    print(page, end="")
    name = "longest_chain_dry_run" if is_dry else "longest_chain"
    document = {"run": run, "cases": {key: dataclasses.asdict(each) for key, each in found.items()}}
    write_files(flags.FLAGS.output, name, document, page)


if __name__ == "__main__":
    app.run(main)
