"""BlockTemplate: a block that was recorded, captured as a function would be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.progress import Progress
from tracegraph.capturing.traced_pipeline import TracedPipeline
from tracegraph.jax_internals import make_function
from tracegraph.options import Options
from tracegraph.recording.recording import RecordedBlock
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.arrays.graph_output import GraphOutput
from tracegraph.runtime.arrays.live_buffers import StaticInput
from tracegraph.runtime.device import Device
from tracegraph.runtime.jax_interop import to_immutable
from tracegraph.tracing.prepared_call import PreparedCall, prepare_call
from tracegraph.user_memory.live_plans import watch_plan

# Its position among the arguments of the call that stands for a replay.
STATE_ARGUMENT = 1


class BlockTemplate:
    """What a block was lowered to; executable graphs are made from it.

    Args:
        block: what was recorded.
        options: of the capture.
        where: the line that opened the block.
        device: that the graph is for.
        pool: that its memory comes from.

    Raises:
        CaptureError: the block cannot be captured; all reasons are named.
        UnsupportedError: XLA's program holds what no graph holds.
    """

    def __init__(
        self, block: RecordedBlock, options: Options, where: str, device: Device, pool: FunctionPool
    ) -> None:
        if block.state:
            options = dataclasses.replace(options, donate_argnums=frozenset({STATE_ARGUMENT}))
        self.block = block
        self._options, self._where, self._device, self._pool = options, where, device, pool
        self._lent: list[StaticInput] = []
        try:
            prepared = self._prepare()
            with Progress(f"capturing `{options.name}`") as progress:
                pipeline = self._start(prepared, progress)
                self.lowered = pipeline.run_to_lowered()
        except BaseException:
            self._take_back()
            raise
        # Where it is in the kernel cache, for when it is verified.
        self._variant = pipeline.variant

    def drop_values(self) -> None:
        """Keeps only the types of what the block read of static inputs."""
        prepared = self.lowered.prepared.drop_values()
        self.lowered = dataclasses.replace(self.lowered, prepared=prepared)
        if self._variant is not None:
            self._variant = dataclasses.replace(self._variant, lowered=self.lowered)
        self._take_back()

    def instantiate(self) -> CapturedGraph:
        """Returns a new executable graph, verified; `bind` makes the block's arrays show it.

        Raises:
            VerificationError: the new graph differs from its reference.
            OutOfMemoryError: the pool cannot hold the graph.
        """
        lowered = self.lowered
        try:
            if not lowered.prepared.leaves:
                lowered = dataclasses.replace(lowered, prepared=self._prepare())
            with Progress(f"instantiating `{self._options.name}`") as progress:
                pipeline = self._start(lowered.prepared, progress)
                pipeline.variant = self._variant
                graph = pipeline.instantiate(lowered)
                with graph.hold_back():
                    pipeline.verify(graph)
        finally:
            self._take_back()
        watch_plan(graph.lowered.plan, graph.replay)
        return graph

    def _start(self, prepared: PreparedCall, progress: Progress) -> TracedPipeline:
        results = (self.block.state, (0,) * len(self.block.outputs))
        out_tree = jax.tree_util.tree_structure(results)
        return TracedPipeline(
            self.block.jaxpr, out_tree, self._where, prepared, self._device, self._pool, progress
        )

    def _prepare(self) -> PreparedCall:
        """Returns the call that stands for a replay, with the values of now."""
        block = self.block
        state = tuple(self._find_sample(buffer) for buffer in block.state)
        return prepare_call(
            _make_stand_in(block),
            self._options,
            (block.fixed, state, *map(self._find_sample, block.live)),
            {},
            device=self._device.jax_device,
            has_values=True,
        )

    def _find_sample(self, buffer: Any) -> Any:
        """Returns a value of the type of an input; that of another graph may have none yet."""
        if isinstance(buffer, GraphOutput):
            aval = buffer.aval
            return to_immutable(np.zeros(aval.shape, aval.dtype), aval, buffer.jax_device)
        self._lent.append(buffer)
        return buffer.lend()

    def _take_back(self) -> None:
        """Says that the values of static inputs are not used any more."""
        while self._lent:
            self._lent.pop().take_back()


def bind_outputs(block: RecordedBlock, graph: CapturedGraph) -> None:
    """Makes the arrays of a block show what a graph writes, from its next replay on."""
    buffers, names = graph.replay.buffers, graph.replay.definition.outputs
    for output, name in zip(block.outputs, names[len(block.state) :], strict=True):
        output.bind(buffers[name])


def _make_stand_in(block: RecordedBlock) -> Callable[..., Any]:
    """Returns the function that a replay would call: messages name its arguments."""
    run = make_function(block.jaxpr)

    def replay(fixed: tuple[Any, ...], state: tuple[Any, ...], *live: Any) -> Any:
        return run(*fixed, *state, *live)

    return replay
