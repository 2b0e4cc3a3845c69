"""The XLA executables that a graph was made from, run by themselves: what a replay must give.

Two compilations of one function may pick other kernels, and so give other bits. So a replay is
never held against `jax.jit`, but against the very executables that its nodes were taken from.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg
from tracegraph.capturing.capture_lowering import make_request
from tracegraph.lowering.reference import run_regions
from tracegraph.lowering.request import CaptureRequest
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.jax_interop import unwrap_key
from tracegraph.verification.report import TOLERANCE, flatten_results, measure_difference

# XLA takes the library's first algorithm for a matmul: to try out all takes longer than most tests.
UNTRIED: tuple[tuple[str, bool | str], ...] = (
    ("xla_gpu_autotune_level", "0"),
    ("xla_gpu_enable_triton_gemm", False),
)


def jit_untried(function: Any) -> Any:
    """Returns `jax.jit` of a function that XLA makes without trying out algorithms of matmuls."""
    return jax.jit(function, compiler_options=dict(UNTRIED))


def compute_exactly(function: Any, *args: Any) -> Any:
    """Returns the result with matmuls of float32 that have all bits."""
    with jax.default_matmul_precision("highest"):
        return jit_untried(function)(*args)


class Likeness(enum.Enum):
    """How a replay compares with the executables of its graph."""

    EQUAL = "equal"
    CLOSE = "close"
    DIFFERING = "differing"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a comparison found; the text names what differs and, for CLOSE, the reason."""

    likeness: Likeness
    text: str = ""


def find_captured(function: tg.GraphedFunction) -> CapturedGraph:
    """Returns the graph that a captured function used last."""
    captured = function._latest
    assert captured is not None, f"{function!r} has not been called yet"
    return captured


def run_reference(function: tg.GraphedFunction, *args: Any) -> Any:
    """Runs the executables of the graph that was used last, in order, on copies of the arguments.

    Args:
        function: captured; its last call had arguments of the same types.
        *args: positional arguments, none of them static.

    Returns:
        The result as the function returns it; of a typed key its key data.
    """
    captured = find_captured(function)
    prepared = function._prepare(args, {})
    # Made as at the capture, so that its names are those of the compiled regions.
    request = make_request(prepared, captured.checked)
    leaves = [*prepared.leaves, *captured.constants]
    inputs = {
        spec.buffer.name: jnp.array(unwrap_key(leaf), spec.buffer.dtype)
        for spec, leaf in zip(request.inputs, leaves, strict=True)
    }
    outputs = run_executables(captured, request, inputs)
    return jax.tree.unflatten(captured.checked.out_tree, outputs)


def run_executables(
    captured: CapturedGraph, request: CaptureRequest, inputs: dict[str, Any]
) -> list[Any]:
    """Runs the compiled regions of a graph; uses the inputs up and returns the flat results."""
    values = run_regions(captured.lowered.regions, inputs)
    return [values[spec.buffer.name] for spec in request.outputs]


def judge(function: tg.GraphedFunction, result: Any, args: tuple[Any, ...]) -> Verdict:
    """Compares the result of a replay with that of the executables on the same arguments.

    Args:
        function: captured; the graph that was used last made the result.
        result: what the call returned.
        args: copies of what it was called with.

    Returns:
        EQUAL for equal bits; CLOSE for small differences where XLA's program adds floats in an
        order that is left to chance; else DIFFERING.
    """
    wanted = _to_numpy(run_reference(function, *args))
    got = _to_numpy(result)
    assert len(got) == len(wanted), f"{len(got)} results, not {len(wanted)}"
    differences = [measure_difference(*pair) for pair in zip(got, wanted, strict=True)]
    if not any(differences):
        return Verdict(Likeness.EQUAL)
    text = ", ".join(
        f"result {index} {array.dtype}{list(array.shape)}: relative difference {difference:.1e}"
        for index, (array, difference) in enumerate(zip(wanted, differences, strict=True))
        if difference
    )
    is_float = [jnp.issubdtype(array.dtype, jnp.inexact) for array in wanted]
    limits = [TOLERANCE if each else 0.0 for each in is_float]
    if any(one > limit for one, limit in zip(differences, limits, strict=True)):
        return Verdict(Likeness.DIFFERING, text)
    lowered = find_captured(function).lowered
    causes = [f"float atomics of {n}" for region in lowered.regions for n in region.float_atomics]
    causes += [cause for cause in lowered.inexact_causes if cause.startswith("cuDNN")]
    if not causes:
        return Verdict(Likeness.DIFFERING, f"{text}; no sum of it is left to chance")
    return Verdict(Likeness.CLOSE, f"{text}; {', '.join(causes)}")


def assert_replayed(function: tg.GraphedFunction, result: Any, args: tuple[Any, ...]) -> None:
    """Fails when a replay differs from its executables without a reason, see `judge`."""
    verdict = judge(function, result, args)
    assert verdict.likeness is not Likeness.DIFFERING, verdict.text


def copy_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments with equal values that no donation and no later write can touch."""
    return jax.tree.map(lambda leaf: leaf.copy() if hasattr(leaf, "copy") else leaf, args)


def _to_numpy(result: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(leaf) for leaf in flatten_results(result)]
