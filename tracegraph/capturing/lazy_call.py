"""LazyCall: one signature of a captured function that runs as `jax.jit` until it has its graph.

Note [Lazy captures]
With ``warm=False`` the first call of a signature does in its own thread all that runs the user's
Python: both traces, and every check of what they show. So what the function does wrong is raised by
the call, as always, and streams, generators and context variables are the caller's. XLA compiles
what was traced as one program, as `jax.jit` would, and calls run that.

The rest of the capture, from the checked graph on, is made in a thread beside, see
Note [The thread of captures]. It needs the values of a call to verify the graph: arrays are
referred to, and copied if they are donated or may be written. Values that others have deleted
meanwhile are taken from the next call, all as copies.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.pipeline import CapturePipeline
from tracegraph.capturing.progress import Progress
from tracegraph.capturing.spread_capture import find_call_spread
from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.spread import Spread
from tracegraph.jax_internals import drop_unit_axes, make_function
from tracegraph.lowering.overlap import Overlap
from tracegraph.replaying.spread_call import make_flat
from tracegraph.replaying.spread_slots import consume_leaves, read_leaves
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.residence import Donation
from tracegraph.runtime.device import Device
from tracegraph.runtime.environment import read_launch_blocking
from tracegraph.runtime.errors import CaptureError, TracegraphError
from tracegraph.runtime.jax_interop import (
    ArrayImpl,
    carry_settings,
    get_quick_call,
    to_plain,
    unwrap_key,
)
from tracegraph.tracing.checked_graph import FirstTrace, finish_checks
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.signature import is_leaf_tree


@dataclasses.dataclass(frozen=True, eq=False)
class LazyProgram:
    """A function that was traced, checked and compiled as one program.

    Attributes:
        first: the function.
        jaxpr: what JAX traced of it.
        run: from flat leaves to flat results; donated leaves are used up.
        donations: one per donated leaf, in order.
        seconds: of the phases that the capture need not repeat, by name.
    """

    first: FirstTrace = dataclasses.field(repr=False)
    jaxpr: Any = dataclasses.field(repr=False)
    run: Callable[..., Any] = dataclasses.field(repr=False)
    donations: tuple[Donation, ...]
    seconds: Mapping[str, float]

    def call(self, prepared: PreparedCall) -> Any:
        """Calls with the values of a call, as `jax.jit` would."""
        results = self.run(*read_leaves(prepared.leaves))
        if self.donations:
            donated = [prepared.leaves[index] for index in sorted(prepared.donated)]
            consume_leaves(donated, self.donations)
        tree = self.first.checked.out_tree
        # Without what probes show.
        results = results[: tree.num_leaves]
        return results[0] if is_leaf_tree(tree) else tree.unflatten(results)


class LazyCall:
    """The calls of one signature until its graph is there, see Note [Lazy captures].

    Attributes:
        lock: is held while the program is made; other calls of the signature wait for it.
        program: None before that.
        error: why there is no graph; None while there is hope.
        wants_values: True when the next call is to be submitted to the `CaptureQueue`.
        has_lost_values: True when others have deleted those of an earlier call.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.program: LazyProgram | None = None
        self.error: TracegraphError | None = None
        self.wants_values = True
        self.has_lost_values = False


class LazyPipeline(CapturePipeline):
    """The phases of a capture whose function is traced and checked already.

    Args:
        program: of the function.
        prepared: the call, with values that stay.
        device: that it is captured for.
        pool: that the memory of the graph comes from.
        progress: is notified of each phase.
    """

    def __init__(
        self,
        program: LazyProgram,
        prepared: PreparedCall,
        device: Device,
        pool: FunctionPool,
        progress: Progress,
    ) -> None:
        super().__init__(prepared, device, pool, progress)
        self._jaxpr, self._first = program.jaxpr, program.first

    def run_to_lowered(self) -> Any:
        """Compiles, plans and builds."""
        return self.lower(self._first)

    def finish_checks(self, first: FirstTrace) -> None:
        """Has nothing to do: the call has finished them."""


def compile_lazily(
    prepared: PreparedCall, device: Device, pool: FunctionPool, progress: Progress
) -> LazyProgram:
    """Traces, checks and compiles a function in the thread of its call.

    Args:
        prepared: the call.
        device: that it runs on.
        pool: of the function; nothing is taken from it.
        progress: is notified of the phases.

    Raises:
        CaptureError: the function cannot be captured, or runs on several devices.
        jax.errors.JaxRuntimeError: XLA cannot compile it.
    """
    pipeline = CapturePipeline(prepared, device, pool, progress)
    pipeline.takes_spread = True
    with drop_unit_axes(prepared.leaves), progress:
        trace = pipeline.trace()
        first = pipeline.check(trace)
        spread = find_call_spread(prepared, first.checked.graph)
        if spread is not None:
            raise _make_spread_error(prepared, spread)
        overlap = Overlap("check", lambda: finish_checks(prepared, first))
        run = _compile(prepared, trace.jaxpr, progress, overlap)
        overlap.finish()
    donations = [
        Donation(prepared.options.name, prepared.names[i]) for i in sorted(prepared.donated)
    ]
    seconds = {phase: progress.seconds[phase] for phase in ("trace", "check")}
    return LazyProgram(first, trace.jaxpr, run, tuple(donations), seconds)


def hold_values(prepared: PreparedCall, *, copies_all: bool) -> PreparedCall:
    """Returns the call with values for later: copies of what is donated or may be written.

    Args:
        prepared: the call; of one that compares nothing no values are kept.
        copies_all: copy all arrays, since others delete them.
    """
    options = prepared.options
    if not options.verify and options.mode == "whole":
        return prepared.drop_values()
    return prepared.replace_values(
        [
            _hold_value(leaf, is_copied=copies_all or index in prepared.donated)
            for index, leaf in enumerate(prepared.leaves)
        ]
    )


def are_deleted(values: Sequence[Any]) -> bool:
    """True when others have deleted an array that a capture still needs."""
    return any(isinstance(value, jax.Array) and value.is_deleted() for value in values)


def _compile(
    prepared: PreparedCall, jaxpr: Any, progress: Progress, overlap: Overlap
) -> Callable[..., Any]:
    types = jax.tree_util.tree_leaves(prepared.make_abstract_arguments())
    function = make_flat(make_function(jaxpr), prepared.options.name)
    progress.enter("compile", "as jax.jit")
    with warnings.catch_warnings():
        # Donated leaves that no result can use are consumed all the same, as in any capture.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        jitted = jax.jit(function, donate_argnums=tuple(sorted(prepared.donated)))
        if any(leaf.is_on_host for leaf in prepared.signature.leaves):
            # What is compiled for types takes all arguments on the device: the call compiles.
            return overlap.run(lambda: jitted, on_late=progress.enter)
        lowered = jitted.lower(*types)
    compiled = overlap.run(carry_settings(lowered.compile), on_late=progress.enter)
    run = get_quick_call(compiled)
    return _make_blocking(run) if read_launch_blocking() else run


def _make_blocking(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: jax.block_until_ready(run(*values))


def _hold_value(leaf: Any, *, is_copied: bool) -> Any:
    array = unwrap_key(leaf)
    plain = to_plain(leaf)
    if not isinstance(plain, jax.Array):
        return np.array(plain) if isinstance(plain, np.ndarray) else plain
    is_stable = type(array) is ArrayImpl or (type(array) is Array and array.find_input() is None)
    return plain if is_stable and not is_copied else plain.copy()


def _make_spread_error(prepared: PreparedCall, spread: Spread) -> CaptureError:
    name = prepared.options.name
    return CaptureError(
        f"`{name}` has warm=False and runs on {spread}",
        where=f"{locate_caller()}, {spread.source}",
        why="collectives of two programs that two threads start may wait for each other for ever",
        fix="leave warm=False out: such a call is compiled once in any case",
        anchor="several-devices",
    )
