"""From a call whose function reads traced values to what takes the place of its graph."""

from __future__ import annotations

import jax

from tracegraph.breaks.branching_graph import BranchingGraph
from tracegraph.breaks.part_trace import PartTrace
from tracegraph.breaks.path import run_path
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.pipeline import Capture
from tracegraph.constraints.violation import Violation
from tracegraph.jax_internals import eval_trace, find_base_trace
from tracegraph.options import Options
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import CaptureError
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.verification.report import VerificationReport

# The rules that a read breaks, see ``tracegraph/constraints/trace_errors.py``.
_READ_RULES = frozenset({"python-branch", "host-read"})

# What JAX raises of it under `jax.jit`.
READ_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def can_read_inside() -> bool:
    """True where ops of this thread are computed at once, or a function with reads is captured.

    That is so under an eager `jax.grad`, which has values, and not under `jax.jit`.
    """
    base = find_base_trace()
    return base is eval_trace or isinstance(base, PartTrace)


def find_read_violation(error: Exception, options: Options) -> Violation | None:
    """Returns what a function reads on the host, if it may; None for every other error.

    Args:
        error: that capturing it as one has raised.
        options: of its capture.
    """
    if options.mode != "partial" or not isinstance(error, CaptureError):
        return None
    return next((each for each in error.violations if each.rule in _READ_RULES), None)


def make_branching_capture(prepared: PreparedCall, device: Device, pool: FunctionPool) -> Capture:
    """Returns what captures a function part by part, as its calls need them.

    Args:
        prepared: the call.
        device: that it is for.
        pool: that the memory of all parts comes from.
    """
    graph = BranchingGraph(prepared, device, pool, run_path)
    is_verified = prepared.options.verify
    skipped = "each part has been verified by itself" if is_verified else "verify=False"
    report = VerificationReport(skipped=skipped)
    return Capture(graph, report, graph.seconds)
