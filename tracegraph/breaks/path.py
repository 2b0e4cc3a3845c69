"""Path: one run of the user's function, from read to read, that captures what is new.

Note [Running a path]. The function runs once more from its start, on tracers. Up to the last read
of this call its parts are known: they are compared with what was traced before, and their values
are those that the call has already. From there on each part is captured, replayed and read as the
function comes to its end, or computed op by op where it is not to be captured. So all work of a
call is done once, effects included, whatever the function reads.

Before the last part runs, the function is traced once more with the same reads: Python work that
differs, as a clock, is an error as it is without breaks. Only then do the new parts join the tree:
of a path that fails nothing is kept, and the donated arguments are not consumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from tracegraph.breaks.branching_graph import BranchingGraph, CallArguments, fetch
from tracegraph.breaks.break_errors import make_difference_error, make_reference_error
from tracegraph.breaks.node import FunctionPart, PartNode, Read
from tracegraph.breaks.part_capture import NewPart, capture_part, compute_part, trace_part
from tracegraph.breaks.part_trace import RecordedPart, TracedValue
from tracegraph.breaks.reads import READ_NAMES, make_key
from tracegraph.breaks.run import Run
from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.source_watch import move_sources
from tracegraph.constraints.sources import SourceCall
from tracegraph.constraints.traces import compare_traces
from tracegraph.constraints.violation import make_capture_error
from tracegraph.ir.graph import Graph
from tracegraph.jax_internals import describe_physical, drop_unit_axes, is_array_aval
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.residence import Donation
from tracegraph.runtime.jax_interop import unwrap_key


def run_path(
    graph: BranchingGraph, call: CallArguments, levels: list[Sequence[Any]], reads: list[Any]
) -> Any:
    """Runs the function for a call whose path is not known; see Note [Running a path].

    Args:
        graph: whose tree gets the new parts.
        call: the arguments.
        levels: the values of the call so far: its leaves, and of each part what it returns.
        reads: what the function reads, so far.

    Returns:
        What the function returns.

    Raises:
        CaptureError: a part cannot be captured, or Python work differs from run to run.
        Exception: the user's function raised; the exception passes as it is.
    """
    with drop_unit_axes(call.leaves):
        return _Path(graph, call, levels, reads).run()


class _Path:
    def __init__(
        self,
        graph: BranchingGraph,
        call: CallArguments,
        levels: list[Sequence[Any]],
        reads: list[Any],
    ) -> None:
        self._graph, self._prepared = graph, graph.prepared
        self._call, self._levels, self._reads = call, levels, reads
        self._given = len(reads)
        self._next = graph.root
        # Of this path, known and new; nothing is added once parts are computed op by op.
        self._nodes: list[PartNode] = []
        self._is_captured = True
        self._new_count = 0
        self._run = Run(self._prepared, self._end_part)

    def run(self) -> Any:
        """Runs the function; returns what it returns."""
        try:
            results, out_tree = self._run.run(is_quiet=False)
            if self._is_captured:
                for index in sorted(self._prepared.donated):
                    self._run.trace.add_input(self._run.arguments[index])
            recorded = self._run.trace.close(results)
        finally:
            self._run.end()
        return self._finish(recorded, out_tree)

    def _end_part(self, value: TracedValue, kind: str) -> Any:
        """Ends a part at a read; returns what was read."""
        where, trace = locate_caller(), self._run.trace
        alive = trace.list_alive()
        if not all(is_array_aval(each.aval) for each in alive):
            raise make_reference_error(self._graph.name, where)
        recorded = trace.close([each.tracer for each in alive])
        if not self._is_captured:
            return self._compute_read(recorded, alive, value, kind, where)
        traced = trace_part(self._prepared, recorded.jaxpr)
        node = self._next
        if node is None:
            _place(alive, tuple(each.index for each in alive))
            node = self._make_node(recorded, traced, alive, self._make_read(value, kind, where))
        else:
            self._compare(node, traced, kind)
            _place(alive, node.results)
        depth = len(self._nodes)
        self._nodes.append(node)
        if len(self._levels) == depth + 1:
            self._levels.append(node.part.run(self._levels) if node.part is not None else ())
        assert node.read is not None
        if depth == len(self._reads):
            self._reads.append(fetch(self._levels, node.read))
        read = self._reads[depth]
        self._next = self._graph.peek_branch(node, make_key(read))
        if self._next is None:
            self._is_captured = self._graph.may_capture(node, read, self._new_count)
        return read

    def _compute_read(
        self,
        recorded: RecordedPart,
        alive: Sequence[TracedValue],
        value: TracedValue,
        kind: str,
        where: str,
    ) -> Any:
        """Ends a part that is computed op by op."""
        _place(alive, tuple(each.index for each in alive))
        self._levels.append(compute_part(recorded.jaxpr, self._gather(recorded.inputs)))
        self._reads.append(fetch(self._levels, self._make_read(value, kind, where)))
        return self._reads[-1]

    def _finish(self, recorded: RecordedPart, out_tree: Any) -> Any:
        """Runs the last part."""
        if not self._is_captured:
            results = compute_part(recorded.jaxpr, self._gather(recorded.inputs))
            if self._new_count:
                self._check(None)
            self._commit(self._nodes)
            self._graph.show_probes(self._nodes)
            self._consume()
            return out_tree.unflatten(results)
        traced = trace_part(self._prepared, recorded.jaxpr)
        node = self._next
        if node is not None:
            self._compare(node, traced, None)
        else:
            self._check(traced)
            node = self._make_last(recorded, traced, out_tree)
        node = self._commit([*self._nodes, node])
        result = self._graph.run_last(node, self._levels, self._call)
        self._graph.show_probes([*self._nodes, node])
        return result

    def _make_read(self, value: TracedValue, kind: str, where: str) -> Read:
        shape, dtype = describe_physical(value.aval)
        return Read(self._locate(value), kind, where, math.prod(shape) * dtype.itemsize)

    def _make_node(
        self, recorded: RecordedPart, traced: Graph, alive: Sequence[TracedValue], read: Read
    ) -> PartNode:
        """Captures a part that ends with a read."""
        part = None
        if alive or has_work(recorded):
            out_tree = jax.tree_util.tree_structure((0,) * len(alive))
            name = f"{self._graph.name}.part{len(self._nodes)}"
            values = self._gather(recorded.inputs)
            new = NewPart(name, recorded.jaxpr, out_tree, values, 0, "fresh")
            part = self._capture(new, recorded.inputs, ())
        self._new_count += 1
        return PartNode(part, traced, tuple(each.index for each in alive), read, None)

    def _make_last(self, recorded: RecordedPart, traced: Graph, out_tree: Any) -> PartNode:
        """Captures the part that the function ends with."""
        self._new_count += 1
        if not (out_tree.num_leaves or has_work(recorded) or self._call.donated):
            return PartNode(None, traced, (), None, out_tree)
        donated = self._prepared.donated
        inputs = recorded.inputs[: len(recorded.inputs) - len(donated)]
        args = (*self._gather(inputs), *self._call.donated)
        outputs = self._prepared.options.outputs
        count = len(self._call.donated)
        new = NewPart(self._graph.name, recorded.jaxpr, out_tree, args, count, outputs)
        names = [self._prepared.names[index] for index in sorted(donated)]
        return PartNode(self._capture(new, inputs, names), traced, (), None, out_tree)

    def _capture(
        self, new: NewPart, inputs: Sequence[TracedValue], donated_names: Sequence[str]
    ) -> FunctionPart:
        graph = self._graph
        names = [*map(self._name, inputs), *donated_names]
        capture = capture_part(self._prepared, names, new, graph.device, graph.pool)
        graph.add_seconds(capture.seconds)
        return FunctionPart(capture, tuple(map(self._locate, inputs)))

    def _name(self, value: TracedValue) -> str:
        level, place = self._locate(value)
        return self._prepared.names[place] if level == 0 else f"part{level - 1}[{place}]"

    def _gather(self, inputs: Sequence[TracedValue]) -> tuple[Any, ...]:
        return tuple([self._levels[level][place] for level, place in map(self._locate, inputs)])

    def _locate(self, value: TracedValue) -> tuple[int, int]:
        """Returns where a value is among the levels."""
        if value.place is None:
            raise make_difference_error(
                self._prepared, "it uses a value that it did not use before"
            )
        return value.part + 1, value.place

    def _compare(
        self, node: PartNode, traced: Graph, kind: str | None, calls: Sequence[SourceCall] = ()
    ) -> None:
        """Checks that a part is what was traced before with the same reads.

        Raises:
            CaptureError: it differs.
        """
        known = None if node.read is None else node.read.kind
        if known != kind:
            ends = [
                "ends" if each is None else f"reads a value with {READ_NAMES[each]}"
                for each in (known, kind)
            ]
            what = f"it {ends[0]} in one run, and {ends[1]} in another"
            raise make_difference_error(self._prepared, what, calls)
        # Which of its values are returned depends on what Python still holds.
        first, second = node.traced, traced
        if kind is not None:
            first, second = _drop_results(first), _drop_results(second)
        violations = compare_traces(first, second, calls)
        if violations:
            raise make_capture_error(violations, graph_name=self._graph.name, graph=node.traced)

    def _check(self, last: Graph | None) -> None:
        """Traces the function once more with the same reads, see Note [Running a path]."""
        nodes = (
            self._nodes if last is None else [*self._nodes, PartNode(None, last, (), None, None)]
        )
        done = 0

        def compare(traced: Graph, kind: str | None) -> None:
            if done < len(nodes):
                self._compare(nodes[done], traced, kind, watch.calls)

        def end_part(_value: TracedValue, kind: str) -> Any:
            nonlocal done
            if done >= len(self._reads):
                raise make_difference_error(self._prepared, "it reads more values", watch.calls)
            alive = run.trace.list_alive()
            recorded = run.trace.close([each.tracer for each in alive])
            compare(trace_part(self._prepared, recorded.jaxpr), kind)
            done += 1
            return self._reads[done - 1]

        run = Run(self._prepared, end_part)
        try:
            with move_sources(self._prepared.function) as watch:
                results, _ = run.run(is_quiet=True)
            for index in sorted(self._prepared.donated) if last is not None else ():
                run.trace.add_input(run.arguments[index])
            compare(trace_part(self._prepared, run.trace.close(results).jaxpr), None)
        finally:
            run.end()

    def _commit(self, nodes: Sequence[PartNode]) -> Any:
        """Adds the path to the tree; returns its last node, or that of an earlier thread."""
        before: PartNode | None = None
        for node, read in zip(nodes, [None, *self._reads], strict=False):
            if before is None:
                before = self._graph.add_root(node)
            else:
                before = self._graph.add_branch(before, read, node)
        return before

    def _consume(self) -> None:
        """Deletes what was donated to a call whose last part is no graph."""
        for index in sorted(self._prepared.donated):
            array = unwrap_key(self._call.leaves[index])
            if type(array) is Array:
                array.consume(Donation(self._graph.name, self._prepared.names[index]))
            elif isinstance(array, jax.Array) and not array.is_deleted():
                array.delete()


def has_work(recorded: RecordedPart) -> bool:
    """True for a part that does more than compute its results."""
    return bool(recorded.jaxpr.effects)


def _place(alive: Sequence[TracedValue], results: Sequence[int]) -> None:
    places = {index: place for place, index in enumerate(results)}
    for value in alive:
        value.place = places.get(value.index)


def _drop_results(graph: Graph) -> Graph:
    return Graph(graph.name, graph.inputs, graph.constants, graph.ops, ())
