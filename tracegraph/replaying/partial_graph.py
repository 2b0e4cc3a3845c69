"""PartialGraph: a captured graph with eager parts, which run user code in the middle of a replay.

Note [No lock in eager parts]. An eager part may call Python, on a thread of XLA's: a callback that
reads the state, calls another captured function, or calls this one. A callback that waits for a
lock of the replay that it is part of waits for ever, and so do two functions whose callbacks call
each other. So the lock is held while arguments are taken and results are made, never while stages
run.
Between the two the instance is busy:

* Nothing reads its arena. Results of earlier replays have been settled; the leaves of the state are
  deleted since the clock has gone on, so that reading one raises at once.
* Another call takes another instance of the same lowered capture, which is made when it is needed
  and kept for the next time. `jax.jit` does not limit how often a function runs at once either.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from tracegraph.lowering.lower import Lowered
from tracegraph.replaying.captured_graph import MISS, CapturedGraph
from tracegraph.replaying.private_copies import copy_together, wait_for_arguments
from tracegraph.replaying.probe_values import ProbeValues
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.jax_interop import ArrayImpl, unwrap_key
from tracegraph.runtime.replay import Replay
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall


class _Turn:
    """A call's hold on an instance; it ends with the frame if an interrupt ends the call."""

    __slots__ = ("__weakref__",)


class PartialGraph(CapturedGraph):
    """The replays of one signature of a function with eager parts.

    Args:
        prepared: the call that it was captured from; its values are not kept.
        checked: the traced graph.
        lowered: its device program, plan and definition.
        replay: the instantiated definition.
        make_instance: instantiates it once more.
    """

    __slots__ = ("_choice", "_make_instance", "_others", "_turn")

    def __init__(
        self,
        prepared: PreparedCall,
        checked: CheckedGraph,
        lowered: Lowered,
        replay: Replay,
        make_instance: Callable[[], PartialGraph],
    ) -> None:
        super().__init__(prepared, checked, lowered, replay)
        self._make_instance = make_instance
        # Held for a look at which instances are busy, never while one is made or used.
        self._choice = threading.Lock()
        self._turn: weakref.ref[_Turn] | None = None
        self._others: list[PartialGraph] = []

    @property
    def calls(self) -> int:
        """How often all instances were called with success."""
        return sum(each.count_calls() for each in (self, *self._others))

    def list_probes(self) -> list[ProbeValues]:
        """Returns what the probes of each instance show."""
        return [each.probes for each in (self, *self._others) if each.probes is not None]

    def try_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        """Replays on the arguments, or returns MISS if they have another signature.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            is_checked: True when `check_arguments` has passed them.
        """
        if kwargs or len(args) != self._arity:
            joined = self.order.join(args, kwargs)
            if joined is None:
                return MISS
            args = joined
        turn = _Turn()
        instance = self._find_free(args, turn)
        if instance is None:
            # Only for a call that fits is another one made.
            if not is_checked:
                return MISS
            instance = self._add_instance(turn)
        try:
            return instance._replay_free(args, is_checked)
        finally:
            instance._turn = None

    def list_instances(self) -> list[PartialGraph]:
        """Returns this graph and the other instances of it."""
        with self._choice:
            return [self, *self._others]

    @property
    def _is_busy(self) -> bool:
        return self._turn is not None and self._turn() is not None

    @contextlib.contextmanager
    def reserve(self) -> Iterator[None]:
        """Keeps calls off this instance, without a lock."""
        turn = _Turn()
        before, self._turn = self._turn, weakref.ref(turn)
        try:
            yield
        finally:
            self._turn = before

    def hold_back(self) -> contextlib.AbstractContextManager[object]:
        """Keeps calls off this instance while it is verified; they take others."""
        return self.reserve()

    def _find_free(self, args: tuple[Any, ...], turn: _Turn) -> PartialGraph | None:
        """Returns an instance for this call, the one with its state if there is a choice."""
        with self._choice:
            free = self._list_free()
            if not free:
                return None
            chosen = free[0] if len(free) == 1 else _find_owner(free, args)
            chosen._turn = weakref.ref(turn)
            return chosen

    def _list_free(self) -> list[PartialGraph]:
        return [each for each in (self, *self._others) if not each._is_busy]

    def _add_instance(self, turn: _Turn) -> PartialGraph:
        made = self._make_instance()
        made._turn = weakref.ref(turn)
        with self._choice:
            self._others.append(made)
        return made

    def _replay_free(self, args: tuple[Any, ...], is_checked: bool) -> Any:
        """Replays on this instance, which is reserved for the call."""
        copies: dict[int, Any] | None = None
        while True:
            wait_for_arguments(args)
            updates: list[tuple[int, Any]] = []
            generation = self._clock.generation
            is_launching = False
            try:
                with self.lock:
                    if self._pending:
                        self.replay.settle()
                    for index, known, write, collect in self._collectors:
                        value = args[index]
                        if type(value) is ArrayImpl and id(value.aval) in known:
                            write(value)
                        elif collect(value, updates):
                            continue
                        else:
                            return MISS
                    is_loaded = not updates or self._load(updates, copies)
                    if is_loaded:
                        # From here on the leaves of the state are deleted.
                        self._clock.generation = generation + 1
                if is_loaded:
                    is_launching = True
                    self._launch_stages()
                    is_launching = False
                    with self.lock:
                        result = self._build_result()
                        self._consume(updates)
                        self._calls += 1
                        return result
            except BaseException as error:
                with self.lock:
                    if self._recover(error, args, generation, is_launching):
                        return MISS
                raise
            if not is_checked and not self._is_harmless(updates):
                return MISS
            copies = copy_together(value for _, value in updates if isinstance(value, Array))


def _find_owner(instances: Sequence[PartialGraph], args: tuple[Any, ...]) -> PartialGraph:
    """Returns the instance whose arena has an argument already; otherwise the first."""
    leaves = [unwrap_key(leaf) for leaf in jax.tree_util.tree_leaves(args)]
    arrays = [leaf for leaf in leaves if type(leaf) is Array]
    for each in instances:
        if any(array.is_in(each.replay.arena) for array in arrays):
            return each
    return instances[0]
