"""Run: one trace of the user's function, which its reads cut into parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.breaks.part_trace import PartTrace, TracedValue
from tracegraph.constraints.printing import watch_print
from tracegraph.constraints.trace_errors import translate_trace_error
from tracegraph.jax_internals import eval_trace, make_array_aval, send_ops_to
from tracegraph.probing.probe import binding_probes, watching_probes
from tracegraph.randomness.draws import UnboundDraws, enter_trace, noting
from tracegraph.runtime.streams.stream_capture import suspended_tracing, tracing
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.static_leaves import wrap_static_leaves

_RESULTS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


class Run:
    """One trace of the function on the arguments of a signature.

    Args:
        prepared: the call, with or without values.
        end_part: is called at each read, with the value and how it is read, where JAX computes;
            returns what was read.

    Attributes:
        trace: takes the ops.
        arguments: one value per leaf.
    """

    def __init__(self, prepared: PreparedCall, end_part: Callable[[TracedValue, str], Any]) -> None:
        self._prepared, self._end_part = prepared, end_part
        # What was read, so that a second read of it is none; it holds the values for their ids.
        self._known: dict[tuple[int, str], tuple[TracedValue, Any]] = {}
        self._draws = UnboundDraws(prepared.options.name)
        self.trace = PartTrace(self._read)
        self.arguments: list[TracedValue] = []

    def run(self, *, is_quiet: bool) -> tuple[list[Any], Any]:
        """Runs the function; returns JAX's tracers of its flat results, and their tree.

        Args:
            is_quiet: nothing that it prints appears.

        Raises:
            CaptureError: it needs what a traced value does not have.
            UnboundDrawsSignal: it draws keys of generators whose states are no arguments.
            Exception: the user's function raised; the exception passes as it is.
        """
        prepared, options = self._prepared, self._prepared.options
        tracers = [
            self.trace.make_argument(
                make_array_aval(leaf.shape, leaf.dtype, weak_type=leaf.weak_type), index
            )
            for index, leaf in enumerate(prepared.signature.leaves)
        ]
        self.arguments = [tracer.value for tracer in tracers]
        args, kwargs = jax.tree_util.tree_unflatten(prepared.signature.tree, tracers)
        del tracers
        printing = watch_print(options.name, is_quiet=is_quiet)
        with (
            tracing(options.name, options.stream),
            printing,
            noting(self._draws),
            watching_probes(),
            binding_probes(),
        ):
            try:
                with send_ops_to(self.trace):
                    enter_trace()
                    result = wrap_static_leaves(prepared.apply(args, kwargs))
                    leaves, tree = jax.tree_util.tree_flatten(result)
                    results = [self._take_result(leaf) for leaf in leaves]
            except Exception as error:
                translated = translate_trace_error(
                    error, function=prepared.function, name=options.name
                )
                if translated is None:
                    raise
                try:
                    raise translated from None
                finally:
                    # Its traceback has this frame, which would hold it.
                    del translated
        self._draws.check()
        return results, tree

    def end(self) -> None:
        """Drops what refers to the caller."""
        self.trace.end()
        self._known.clear()
        del self._end_part

    def _take_result(self, leaf: Any) -> Any:
        if not isinstance(leaf, _RESULTS):
            # In JAX's words, which are translated.
            raise TypeError(
                f"the function returned a value of type {type(leaf)}, which is not a valid JAX type"
            )
        return self.trace.to_tracer(leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf))

    def _read(self, value: TracedValue, kind: str) -> Any:
        key = id(value), kind
        if key not in self._known:
            with suspended_tracing(), send_ops_to(eval_trace):
                self._draws.check()
                self._known[key] = value, self._end_part(value, kind)
        return self._known[key][1]
