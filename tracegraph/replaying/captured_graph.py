"""CapturedGraph: one signature of a captured function, with what it was captured from."""

from __future__ import annotations

from typing import Any

from tracegraph.jax_internals import InvalidFloatSignal, to_physical
from tracegraph.lowering.lower import Lowered
from tracegraph.replaying.float_checks import raise_float_error
from tracegraph.replaying.invalid_floats import (
    InvalidResultsSignal,
    make_invalid_error,
    watch_results,
)
from tracegraph.replaying.mismatch_error import make_mismatch_error
from tracegraph.replaying.replayable_graph import MISS as MISS
from tracegraph.replaying.replayable_graph import ReplayableGraph
from tracegraph.runtime.replay import Replay
from tracegraph.tracing.call_spec import make_call_spec, make_result_spec
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall, prepare_call


class CapturedGraph(ReplayableGraph):
    """The replay of one signature, which knows the function that it was captured from.

    Args:
        prepared: the call that it was captured from; its values are not kept.
        checked: the traced graph.
        lowered: its device program, plan and definition.
        replay: the instantiated definition.
    """

    __slots__ = ("_function", "_options", "checked")

    def __init__(
        self,
        prepared: PreparedCall,
        checked: CheckedGraph,
        lowered: Lowered,
        replay: Replay,
    ) -> None:
        self.checked = checked
        self._function, self._options = prepared.function, prepared.options
        held = {f"%{each.name}": each for each in checked.graph.constants}
        constants = {
            name: to_physical(held[name].array, held[name].value.aval)
            for name in replay.definition.inputs[len(prepared.names) :]
        }
        results = make_result_spec(checked, prepared.options)
        super().__init__(make_call_spec(prepared), results, lowered, replay, constants)
        if prepared.options.debug_nans:
            # Last, so that the probes of an invalid replay can be read.
            self._build_result = watch_results(self._build_result, checked)
            self.lock_free_call = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays on arguments that must have this graph's signature.

        Raises:
            CaptureError: an argument was donated before, or is donated twice.
            ReplayError: they have another signature; only what differs is shown.
        """
        try:
            return self._call_checked(args, kwargs)
        except InvalidFloatSignal as signal:
            raise_float_error(signal, self._function, args, kwargs)
        except InvalidResultsSignal as signal:
            leaves = self._prepare(args, kwargs).leaves
            raise make_invalid_error(signal, leaves, self.names) from None

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreparedCall:
        return prepare_call(
            self._function,
            self._options,
            args,
            kwargs,
            device=self.replay.jax_device,
            has_values=True,
            takes_spread=len(self.replay.devices) > 1,
        )

    def _call_checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays on arguments, or says what is wrong with them."""
        result = self.try_call(args, kwargs, False)
        if result is not MISS:
            return result
        # What is wrong with the arguments themselves comes before what is wrong for this graph.
        found = self._prepare(args, kwargs)
        result = self.try_call(args, kwargs, True)
        if result is MISS:
            raise make_mismatch_error(self.call, found)
        return result
