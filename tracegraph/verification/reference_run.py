"""The reference run: XLA's executables on the arguments of the capture, and what if they fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tracegraph.lowering.reference import run_regions
from tracegraph.replaying.replayable_graph import ReplayableGraph
from tracegraph.runtime.errors import VerificationError


def run_reference(captured: ReplayableGraph, inputs: Sequence[jax.Array]) -> list[Any]:
    """Returns the flat results of the executables, which use up what is donated.

    The host waits for them: XLA may return arrays that hold an error, and then neither their values
    nor their addresses may be used.

    Args:
        captured: the graph.
        inputs: one array per static input, constants included.

    Raises:
        VerificationError: XLA raised, and no user code ran under it.
        jax.errors.JaxRuntimeError: an eager part failed, or there is no memory.
    """
    lowered = captured.lowered
    names = [spec.buffer.name for spec in lowered.program.inputs]
    try:
        values = run_regions(lowered.regions, dict(zip(names, inputs, strict=True)))
        return jax.block_until_ready([values[name] for name in lowered.results])
    # Where JAX calls an executable without Python, the words of XLA are a ValueError.
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not captured.replay.is_whole or "RESOURCE_EXHAUSTED" in str(error):
            raise
        raise make_failure_error(captured.name, error) from error


def make_failure_error(name: str, error: Exception) -> VerificationError:
    """Returns the error of a reference that failed.

    Args:
        name: of the captured function.
        error: what XLA raised.
    """
    return VerificationError(
        f"XLA's executable for `{name}` failed when it was called to verify the new graph",
        where=f"verification at capture: {str(error).partition(chr(10))[0]}",
        why="a graph is used only if it computes what XLA's executable computes",
        fix="mend what XLA names: the function fails under jax.jit, too",
        anchor="reference-failed",
    )
