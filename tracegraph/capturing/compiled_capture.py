"""CompiledCapture: the stage after `LoweredCapture`, as `jax.stages.Compiled` is for `jax.jit`."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax

from tracegraph.capturing.capture_stage import CaptureStage, list_executables
from tracegraph.constraints.frames import hides_own_frames, locate_caller
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.request import Role
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import ReplayError
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall, prepare_call
from tracegraph.tracing.spellings import read_spellings
from tracegraph.verification.capture_verification import verify_capture


@dataclasses.dataclass(frozen=True)
class MemoryAnalysis:
    """Bytes of a captured graph, under the names that `jax.stages.Compiled` has for them.

    Attributes:
        argument_size_in_bytes: of the arguments' buffers.
        output_size_in_bytes: of the results, with those that replace a donated argument.
        alias_size_in_bytes: of the results that replace a donated argument.
        temp_size_in_bytes: of what holds nothing between two replays; graphs of a pool share it.
        generated_code_size_in_bytes: of XLA's programs.
        pool_bytes: what the graph takes from its pool: all buffers, constants included, rounded.
    """

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int
    pool_bytes: int


class CompiledCapture(CaptureStage):
    """A captured graph of one signature; `LoweredCapture.compile` makes it.

    As with `jax.jit`, a call takes the dynamic arguments only: static ones are compiled in. With
    ``verify=True`` the first call compares the graph with its reference, on its own arguments.

    Args:
        prepared: the call that it was lowered for, without values.
        checked: the traced and optimised graph.
        lowered: device program, memory plan and graph definition.
        device: that it was lowered for.
        graph: instantiated from all this.

    Example:
        >>> double = tg.capture(lambda x: x * 2).lower(jnp.zeros(3)).compile()
        >>> print(double(jnp.arange(3.0)))
        [0. 2. 4.]
    """

    # Whether arguments may be over several devices.
    _takes_spread = False

    def __init__(
        self,
        prepared: PreparedCall,
        checked: CheckedGraph,
        lowered: Lowered,
        device: Device,
        graph: CapturedGraph,
    ) -> None:
        self.prepared, self.checked, self.lowered = prepared, checked, lowered
        self._device, self._graph = device, graph
        self._lock = threading.Lock()
        self._is_verified = not prepared.options.verify
        self._has_statics = bool(prepared.bound.statics)
        self._names = read_spellings(prepared.function, prepared.options).names

    @hides_own_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays on arguments that must have this graph's signature.

        Args:
            *args: the positional arguments that are not static.
            **kwargs: the keyword arguments that are not static.

        Raises:
            ReplayError: they have another signature; only what differs is shown.
            CaptureError: an argument was donated before, or is donated twice.
            VerificationError: the graph differs from its reference.
        """
        if self._has_statics:
            args, kwargs = self._add_statics(args, kwargs)
        if not self._is_verified:
            self._verify(args, kwargs)
        return self._graph(*args, **kwargs)

    def as_text(self) -> str:
        """Returns XLA's optimised program of each region that was compiled ahead of its calls."""
        texts = [executable.as_text() for executable in list_executables(self.lowered)]
        return "\n\n".join(text for text in texts if text is not None)

    def memory_analysis(self) -> MemoryAnalysis:
        """Returns the bytes of arguments, results and temporaries, and of the pool."""
        program, definition = self.lowered.program, self.lowered.definition
        programs = [each.memory_analysis() for each in list_executables(self.lowered)]
        return MemoryAnalysis(
            sum(s.buffer.nbytes for s in program.inputs if s.role is not Role.CONSTANT),
            sum(output.buffer.nbytes for output in program.outputs),
            sum(output.buffer.nbytes for output in program.outputs if output.alias is not None),
            definition.arena_size.scratch_bytes,
            sum(each.generated_code_size_in_bytes for each in programs if each is not None),
            definition.arena_size.reserved_bytes,
        )

    def __repr__(self) -> str:
        return f"<CompiledCapture {self._graph.name}>"

    def _add_statics(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the user's call: with the static arguments that the graph was captured for."""
        bound, given, rest = self.prepared.bound, list(args), dict(kwargs)
        # What was given by keyword may have a position, see Note [Spellings].
        for position in bound.positions[len(args) :]:
            if (name := self._names[position]) in rest:
                given.append(rest.pop(name))
        if len(given) != len(bound.positions) or rest.keys() != bound.kwargs.keys():
            wanted, got = self.in_tree, jax.tree.structure((args, kwargs))
            raise ReplayError(
                f"the compiled `{self._graph.name}` is called with other arguments",
                where=f"{locate_caller()}: wanted {wanted}, got {got}",
                why="static arguments are compiled in; the call takes the others",
                fix="leave the static arguments out, and pass all others as they were lowered",
                anchor="signature",
            )
        positional, keywords = bound.restore(given, rest)
        return tuple(positional), keywords

    def _verify(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = self._prepare(args, kwargs)
        # Another signature is refused by the graph, which says what differs.
        if found.signature != self._graph.signature:
            return
        with self._lock:
            if not self._is_verified:
                self._compare(found)
                self._is_verified = True

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreparedCall:
        return prepare_call(
            self.prepared.function,
            self.prepared.options,
            args,
            kwargs,
            device=self._device.jax_device,
            has_values=True,
            takes_spread=self._takes_spread,
        )

    def _compare(self, found: PreparedCall) -> None:
        verify_capture(found, self._graph, self._device)
