"""Compiling ahead: a function and types of arguments → a saved graph, without its GPU.

Note [Ahead of time]
All that a capture does up to the plan and the graph needs XLA, and no GPU. What is left, memory and
the comparison with XLA's executable, is done where the file is loaded: the executable is in the
file, and the first call of each signature compares the two.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.pipeline import Capture, CapturePipeline
from tracegraph.capturing.progress import Progress
from tracegraph.constraints.leaf_kinds import is_array
from tracegraph.graphed_function import GraphedFunction
from tracegraph.jax_internals import drop_unit_axes
from tracegraph.runtime.default_device import describe_gpu
from tracegraph.runtime.errors import ConfigError
from tracegraph.saving.save_captures import collect_captures, write_captures
from tracegraph.tracing.prepared_call import prepare_call

# In place of the name of a GPU: the device that captures use.
HERE = "here"


def compile_ahead(
    graphed: GraphedFunction[..., Any],
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    target: str,
) -> None:
    """Compiles a captured function for a GPU that is not here, and saves the graph.

    Args:
        graphed: the function; nothing is captured here.
        args: positional arguments; of arrays the type alone matters.
        path: of the file.
        target: name of the GPU, as ``h200``.

    Raises:
        ConfigError: this machine cannot compile for it.
        CaptureError: the function cannot be captured; all reasons are named.
        UnsupportedError: its program has work that no graph holds, or that only a GPU can try.
        SavedFileError: a file cannot hold it, or cannot be written.
    """
    device: Any = describe_gpu(target)
    function, options = graphed._function, graphed._options
    if type(graphed) is not GraphedFunction:
        raise ConfigError(
            f"`{options.name}` cannot be compiled for {target} without one: it has buckets",
            where="--target",
            why="each of its sizes is captured by a call",
            fix=f"call `warm_up()` and `save` on a machine with {target}",
            anchor="ahead-of-time",
        )
    types = jax.tree.map(_describe_leaf, args)
    prepared = prepare_call(
        function, options, types, {}, device=device.jax_device, has_values=False
    )
    progress = Progress(f"compiling `{options.name}` for {target}")
    with drop_unit_axes(prepared.leaves), progress:
        pipeline = CapturePipeline(prepared.drop_values(), device, FunctionPool(None), progress)
        recipe = pipeline.run_to_lowered()
    # Nothing has verified it.
    capture: Any = Capture(None, None, progress.seconds, recipe=recipe)  # pyright: ignore[reportArgumentType]
    collected = collect_captures(
        function, options, [capture], device.jax_device, has_constants=True
    )
    write_captures(path, collected)


def _describe_leaf(leaf: Any) -> Any:
    if not is_array(leaf):
        return leaf
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
