"""BlockReplay: a captured block, which every replay gives the same arrays."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from tracegraph.replaying.captured_graph import MISS, CapturedGraph
from tracegraph.replaying.private_copies import wait_for_arguments
from tracegraph.runtime.array import Array
from tracegraph.runtime.jax_interop import ArrayImpl, unwrap_key
from tracegraph.runtime.live_buffers import StaticInput

_is_deleted = ArrayImpl.is_deleted


LoadedInput: TypeAlias = tuple[StaticInput, weakref.ref[Any], Callable[..., bool]]


@dataclasses.dataclass(frozen=True)
class LoadedInputs:
    """What a block was given last, see Note [Replays of a block].

    Attributes:
        arguments: the very tuple.
        inputs: each static input that it reads, a reference to its value then, which holds no
            memory, and what takes another value.
        fixed: the other arrays that were loaded.
    """

    arguments: tuple[Any, ...]
    inputs: tuple[LoadedInput, ...]
    fixed: tuple[Any, ...]


class BlockReplay(CapturedGraph):
    """The captured graph of a block that is replayed by hand.

    Note [Replays of a block]. A captured function is called with other arrays each time. A block
    reads the same ones in every replay: plain arrays, which never change, and static inputs, whose
    value is another plain array after each `copy_`. So a replay loads the inputs that were written
    since the last one, and nothing else. Every argument is looked at, as in a call, where a block
    writes state, or reads what lives in another graph.
    """

    __slots__ = ("_loaded",)

    def __init__(self, *args: Any) -> None:
        self._loaded: LoadedInputs | None = None
        super().__init__(*args)

    def try_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        """Replays, as `CapturedGraph.try_call` does; kept short, as Note [Hot path] says."""
        loaded = self._loaded
        if loaded is None or loaded.arguments is not args or any(map(_is_deleted, loaded.fixed)):
            return self._load_all(args, kwargs, is_checked)
        # Held until the launch: another thread may write an input meanwhile.
        values = [static.value for static, _, _ in loaded.inputs]
        for value, (_, find_loaded, _) in zip(values, loaded.inputs, strict=True):
            if value is None or value is not find_loaded() or _is_deleted(value):
                loaded = self._load_written(loaded, values)
                break
        with self.lock:
            if loaded is not None and loaded is self._loaded:
                return self._launch(args)
        return self._load_all(args, kwargs, is_checked)

    def _launch(self, args: tuple[Any, ...]) -> Any:
        """Launches on what is loaded; the caller holds the lock."""
        clock = self._clock
        generation = clock.generation
        try:
            clock.generation = generation + 1
            self._launch_stages()
        except BaseException as error:
            if self._recover(error, args, generation, True):
                return MISS
            raise
        # A block without state has no results: its arrays show the buffers.
        return ()

    def _load_written(self, loaded: LoadedInputs, values: list[Any]) -> LoadedInputs | None:
        """Takes the values that were written since; None if each argument must be looked at."""
        if not all(type(each) is ArrayImpl and not each.is_deleted() for each in values):
            return None
        if self.replay.waits:
            wait_for_arguments(values)
        with self.lock:
            if self._loaded is not loaded:
                return None
            # What is loaded is not known if one of them is refused.
            self._loaded = None
            inputs = _take_written(loaded, values)
            if inputs is not None:
                self._loaded = LoadedInputs(loaded.arguments, inputs, loaded.fixed)
            return self._loaded

    def _load_all(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        """Replays on arguments that are looked at one by one, and remembers them."""
        inputs = None if self._donated else self._find_inputs(args)
        if inputs is None:
            return super().try_call(args, kwargs, is_checked)
        values = [static.value for static, _ in inputs]
        leaves = jax.tree_util.tree_leaves([each for each in args if type(each) is not Array])
        fixed = [unwrap_key(leaf) for leaf in leaves]
        if not all(type(each) is ArrayImpl for each in (*values, *fixed)):
            return super().try_call(args, kwargs, is_checked)
        if any(map(_is_deleted, (*values, *fixed))):
            return MISS
        if self.replay.waits:
            wait_for_arguments((values, fixed))
        with self.lock:
            self._loaded = None
            result = super().try_call(args, kwargs, is_checked)
            pairs = list(zip(inputs, values, strict=True))
            if result is not MISS and all(static.value is value for (static, _), value in pairs):
                loaded = tuple(
                    (static, weakref.ref(value), take) for (static, take), value in pairs
                )
                self._loaded = LoadedInputs(args, loaded, tuple(fixed))
        return result

    def _find_inputs(
        self, args: tuple[Any, ...]
    ) -> list[tuple[StaticInput, Callable[..., bool]]] | None:
        """Returns the static inputs among arguments; None if there is another live array."""
        inputs: list[tuple[StaticInput, Callable[..., bool]]] = []
        for index, _, _, collect in self._collectors:
            value = args[index]
            if type(value) is Array:
                static = value.find_input()
                if type(static) is not StaticInput:
                    return None
                inputs.append((static, collect))
        return inputs

    def _forget(self) -> None:
        super()._forget()
        self._loaded = None


def _take_written(loaded: LoadedInputs, values: list[Any]) -> tuple[LoadedInput, ...] | None:
    """Lets the graph take the values that are new; None if it does not take one of them so."""
    inputs = list(loaded.inputs)
    updates: list[Any] = []
    for i, (static, find_loaded, take) in enumerate(loaded.inputs):
        if values[i] is find_loaded():
            continue
        if not take(values[i], updates) or updates:
            return None
        inputs[i] = static, weakref.ref(values[i]), take
    return tuple(inputs)
