"""Labels the replays of a graph in a profiler's trace: lines, scopes, rows of scopes."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tracegraph.graph_pictures.records import NodeData
from tracegraph.graph_pictures.trace_executions import (
    Execution,
    LaunchedGraph,
    find_executions,
    find_mismatch,
)
from tracegraph.graph_pictures.trace_file import (
    TraceEvent,
    find_trace,
    make_trace_error,
    read_trace,
    write_trace,
)
from tracegraph.graph_pictures.trace_interiors import number_inside
from tracegraph.graph_pictures.trace_rows import drop_rows, make_rows
from tracegraph.runtime.errors import ConfigError, shorten_list

_MOST_OTHERS = 3
_Chosen: TypeAlias = list[tuple[LaunchedGraph, Execution]]


@dataclasses.dataclass(frozen=True)
class TraceLabels:
    """What was labelled in a trace.

    Attributes:
        path: of the file that was written.
        graph_ids: the driver's numbers of the executable graphs.
        replays: how many of them are in the trace.
        events: how many have the label of their node.
        unlabelled: how many have none, because it is not known which node inside of a branch, a
            loop or calls of libraries they are of.
    """

    path: str
    graph_ids: tuple[int, ...]
    replays: int
    events: int
    unlabelled: int


def label_graphs(
    name: str,
    graphs: Sequence[LaunchedGraph],
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    graph_id: int | Sequence[int] | None,
) -> TraceLabels:
    """Labels the replays of a capture in a trace; see `GraphData.label_trace`.

    Args:
        name: of the captured function.
        graphs: that a call launches, in their order.
        path: of the trace.
        output: of the file to write; None for the trace itself.
        graph_id: the executable graphs, one for each graph; None to find them.
    """
    if not any(node.kind != "call" for graph in graphs for node in graph.nodes):
        raise make_trace_error(
            f"`{name}` launches no CUDA graph",
            "it computes nothing, or is captured on the host device",
            "capture it where JAX computes on a GPU, and label a trace of its replays there",
        )
    source = find_trace(path)
    content = read_trace(source)
    executions = find_executions(content["traceEvents"])
    if graph_id is None:
        chosen = _find_graphs(name, graphs, executions, source)
    else:
        chosen = _take_graphs(name, graphs, executions, graph_id)
    counts = [0, 0]
    for graph, execution in chosen:
        labelled = _label_events(graph, execution)
        kept = drop_rows(content["traceEvents"], execution.graph_id)
        names, slices = make_rows(kept, labelled, name, execution.graph_id)
        content["traceEvents"] = [*kept, *names, *slices]
        counts[0] += len(labelled)
        counts[1] += sum(map(len, execution.events.values())) - len(labelled)
    target = source if output is None else pathlib.Path(output)
    write_trace(target, content)
    ids = tuple(execution.graph_id for _, execution in chosen)
    replays = max(len(execution.launches) for _, execution in chosen)
    return TraceLabels(os.fspath(target), ids, replays, *counts)


def _find_graphs(
    name: str,
    graphs: Sequence[LaunchedGraph],
    executions: Mapping[int, Execution],
    source: pathlib.Path,
) -> _Chosen:
    """Returns the executable of each graph, where it is the only one that it can be."""
    chosen: _Chosen = []
    for graph in graphs:
        fitting = [each for each in executions.values() if not _find_mismatch(graph, each)]
        if not fitting and graph.has_kernels:
            raise _make_absent_error(name, graph, executions, source)
        if len(fitting) > 1 or (fitting and not graph.has_kernels):
            raise _make_several_error(name, fitting, len(graphs), has_kernels=graph.has_kernels)
        chosen += [(graph, each) for each in fitting]
    if not chosen:
        raise _make_absent_error(name, graphs[0], executions, source)
    fitting = [execution for _, execution in chosen]
    if len({execution.graph_id for execution in fitting}) < len(fitting):
        raise _make_several_error(name, fitting, len(graphs), has_kernels=True)
    return chosen


def _find_mismatch(graph: LaunchedGraph, execution: Execution) -> str:
    """Returns in what an executable differs; what the user names need not fit so closely."""
    found = find_mismatch(graph, execution)
    if found or number_inside(graph, execution) is not None:
        return found
    return f"its nodes from {len(graph.nodes)} on are not inside of the nodes here, by their times"


def _take_graphs(
    name: str,
    graphs: Sequence[LaunchedGraph],
    executions: Mapping[int, Execution],
    graph_id: int | Sequence[int],
) -> _Chosen:
    """Returns the executables that the user has named, one for each graph."""
    ids = [graph_id] if isinstance(graph_id, int) else list(graph_id)
    if len(ids) != len(graphs) or len(set(ids)) < len(ids):
        raise make_trace_error(
            f"`graph_id` is {graph_id!r}, and `{name}` is {len(graphs)} graphs",
            "each of its graphs has an executable of its own",
            f"pass {len(graphs)} different numbers, in the order of its parts",
        )
    chosen: _Chosen = []
    for graph, each in zip(graphs, ids, strict=True):
        execution = executions.get(each)
        problem = "no event has it" if execution is None else find_mismatch(graph, execution)
        if problem or execution is None:
            found = ", ".join(shorten_list(list(map(str, executions.values())))) or "none"
            raise make_trace_error(
                f"executable graph {each} is not `{name}`",
                f"{problem}; in the trace are {found}",
                "pass the number of another one, or none",
            )
        chosen.append((graph, execution))
    return chosen


def _label_events(graph: LaunchedGraph, execution: Execution) -> list[TraceEvent]:
    """Writes the label of its node into each event, and returns those that have one now."""
    labels = dict(enumerate(graph.nodes)) | (number_inside(graph, execution) or {})
    labelled: list[TraceEvent] = []
    for number in sorted(execution.events.keys() & labels.keys()):
        for event in execution.events[number]:
            event["args"].update(_make_label(labels[number]))
            labelled.append(event)
    return labelled


def _make_label(node: NodeData) -> dict[str, str | int]:
    found = {"where": node.where, "scope": node.scope, "node": node.index, "bytes": node.nbytes}
    return {key: value for key, value in found.items() if value != ""}


def _make_absent_error(
    name: str,
    graph: LaunchedGraph,
    executions: Mapping[int, Execution],
    source: pathlib.Path,
) -> ConfigError:
    found = [f"{each}: {_find_mismatch(graph, each)}" for each in executions.values()]
    others = "; ".join(shorten_list(found, _MOST_OTHERS))
    return make_trace_error(
        f"no replay of `{name}` is in {os.fspath(source)!r}",
        f"it has other executable graphs: {others}" if found else "it has no work of CUDA graphs",
        f"call `{name}` with these arguments inside of jax.profiler.trace, then tg.synchronize()",
    )


def _make_several_error(
    name: str, fitting: Sequence[Execution], count: int, *, has_kernels: bool
) -> ConfigError:
    names = ", ".join(dict.fromkeys(map(str, fitting)))
    if has_kernels:
        why = "another function, or this one captured again, has the same kernels"
    else:
        why = "it has no kernel of XLA's, whose name would tell"
    one = f"graph_id={fitting[0].graph_id}, if that is the one"
    many = f"graph_id=(...), one number for each of its {count} graphs in their order"
    return make_trace_error(
        f"`{name}` may be any of the executable graphs {names}",
        why,
        f"pass {one if count == 1 else many}",
    )
