"""HostTimer: each compiled call of a graph, timed by the host's clock on arrays of its own."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.runtime.definition.graph_nodes import Node
from tracegraph.runtime.definition.nodes import BufferUse, CallNode, CopyNode
from tracegraph.runtime.jax_interop import get_quick_call, to_immutable
from tracegraph.runtime.node_timer import NodeTime, TimedGraph

# Calls of each node, as many as take so long; the median counts.
MOST, LEAST = 50, 3
ENOUGH_SECONDS = 0.05


class HostTimer:
    """Times the compiled calls of a graph, one after another.

    Values are NumPy arrays by the names of their buffers: no call is given memory of the arena, so
    that one that overwrites its arguments can be repeated.

    Args:
        graph: what is timed.

    Attributes:
        floor_us: None: what a call takes at least is most of what small calls take.
    """

    floor_us: float | None = None

    def __init__(self, graph: TimedGraph) -> None:
        self._graph = graph
        self._values: dict[str, np.ndarray[Any, Any]] = {}
        # Each is made once: its own first call takes longer. The graph holds the executables.
        self._calls: dict[int, Callable[..., Any]] = {}

    def time_stage(self, index: int) -> float:
        """Returns the microseconds of one launch of a stage, on what is in the buffers."""
        start = time.perf_counter()
        self._graph.stages[index].launch()
        self._graph.clock.wait()
        return 1e6 * (time.perf_counter() - start)

    def start(self) -> None:
        """Begins with the first node: takes copies of the arguments."""
        buffers = self._graph.buffers
        names = self._graph.definition.inputs
        self._values = {name: np.asarray(buffers[name].snapshot()) for name in names}

    def run(self, node: Node) -> None:
        """Runs the next node once."""
        self._run(node)

    def time(self, node: Node, written: Sequence[BufferUse], *, is_captured: bool) -> NodeTime:  # noqa: ARG002 a GPU's timer restores these bytes
        """Times the next node; eager calls, which may have effects of their own, once only."""
        found = [self._run(node)]
        if not is_captured:
            return NodeTime(found[0], None, "eager: one call")
        # The first call may have compiled something.
        found = []
        while len(found) < LEAST or (len(found) < MOST and sum(found) < 1e6 * ENOUGH_SECONDS):
            found.append(self._run(node, is_kept=False))
        return NodeTime(statistics.median(found))

    def visit(self, written: Sequence[BufferUse]) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 as above
        """Does nothing: branches and loops are inside of compiled calls."""
        return contextlib.nullcontext()

    def _run(self, node: Node, *, is_kept: bool = True) -> float:
        if isinstance(node, CopyNode):
            return self._copy(node)
        # The other kinds of node are a GPU's.
        assert isinstance(node, CallNode)
        buffers = self._graph.buffers
        arguments = [
            to_immutable(self._values[each.name].copy(), each.aval, each.jax_device)
            for each in (buffers[name] for name in node.arguments)
        ]
        jax.block_until_ready(arguments)
        call = self._find_call(node)
        start = time.perf_counter()
        outputs = jax.block_until_ready(call(*arguments))
        elapsed_us = 1e6 * (time.perf_counter() - start)
        if is_kept:
            outputs = outputs if len(node.results) != 1 else (outputs,)
            for name, value in zip(node.results, outputs, strict=True):
                self._values[name] = np.array(value)
        return elapsed_us

    def _find_call(self, node: CallNode) -> Callable[..., Any]:
        key = id(node.executable)
        if key not in self._calls:
            self._calls[key] = get_quick_call(node.executable)
        return self._calls[key]

    def _copy(self, node: CopyNode) -> float:
        slot = next(
            each for each in self._graph.definition.slots if each.name == node.target.buffer
        )
        target = self._values.setdefault(slot.name, np.zeros(slot.shape, slot.dtype))
        start = time.perf_counter()
        part = _view(self._values[node.source.buffer], node.source)
        _view(target, node.target)[:] = part.copy()
        return 1e6 * (time.perf_counter() - start)


def _view(array: np.ndarray[Any, Any], use: BufferUse) -> np.ndarray[Any, Any]:
    """Returns a range of an array's bytes."""
    return array.reshape(-1).view(np.uint8)[use.offset : use.offset + use.nbytes]
