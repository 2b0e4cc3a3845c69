"""BlockReplay: a captured block, which every replay gives the same arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from tracegraph.replaying.captured_graph import MISS, CapturedGraph
from tracegraph.replaying.private_copies import wait_for_arguments
from tracegraph.runtime.array import Array
from tracegraph.runtime.jax_interop import ArrayImpl, unwrap_key
from tracegraph.runtime.live_buffers import StaticInput

_is_deleted = ArrayImpl.is_deleted


@dataclasses.dataclass(frozen=True)
class LoadedInputs:
    """What a block was given last, see Note [Replays of a block].

    Attributes:
        arguments: the very tuple.
        inputs: each static input that it reads, with its value then, and what takes another one.
        plain: all arrays that were loaded: none may be deleted.
    """

    arguments: tuple[Any, ...]
    inputs: tuple[tuple[StaticInput, Any, Callable[..., bool]], ...]
    plain: tuple[Any, ...]

    def is_current(self) -> bool:
        """True while no static input was written."""
        return all(static.value is value for static, value, _ in self.inputs)


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
        if loaded is None or loaded.arguments is not args or any(map(_is_deleted, loaded.plain)):
            return self._load_all(args, kwargs, is_checked)
        for static, value, _ in loaded.inputs:
            if static.value is not value:
                if not self._load_written(loaded):
                    return self._load_all(args, kwargs, is_checked)
                break
        with self.lock:
            # Another thread may have been here since.
            if self._loaded is not None:
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

    def _load_written(self, loaded: LoadedInputs) -> bool:
        """Takes the values that were written since; False if each argument must be looked at."""
        values = [static.value for static, _, _ in loaded.inputs]
        if not all(type(each) is ArrayImpl and not each.is_deleted() for each in values):
            return False
        if self.replay.waits:
            wait_for_arguments(values)
        with self.lock:
            if self._loaded is not loaded:
                return False
            # What is loaded is not known if one of them is refused.
            self._loaded = None
            updates: list[Any] = []
            pairs = zip(loaded.inputs, values, strict=True)
            written = [(take, new) for (_, old, take), new in pairs if new is not old]
            if not all(take(value, updates) for take, value in written) or updates:
                return False
            pairs = zip(loaded.inputs, values, strict=True)
            inputs = tuple((static, value, take) for (static, _, take), value in pairs)
            fixed = loaded.plain[len(values) :]
            self._loaded = LoadedInputs(loaded.arguments, inputs, (*values, *fixed))
            return True

    def _load_all(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        """Replays on arguments that are looked at one by one, and remembers them."""
        loaded = None if self._donated else self._find_plain(args)
        if loaded is None:
            return super().try_call(args, kwargs, is_checked)
        if any(map(_is_deleted, loaded.plain)):
            return MISS
        if self.replay.waits:
            wait_for_arguments(loaded.plain)
        with self.lock:
            self._loaded = None
            result = super().try_call(args, kwargs, is_checked)
            if result is not MISS and loaded.is_current():
                self._loaded = loaded
        return result

    def _find_plain(self, args: tuple[Any, ...]) -> LoadedInputs | None:
        """Returns the arrays behind the arguments; None if one of them is not a plain array."""
        inputs: list[tuple[StaticInput, Any, Callable[..., bool]]] = []
        fixed: list[Any] = []
        for index, _, _, collect in self._collectors:
            value = args[index]
            if type(value) is Array:
                static = value.find_input()
                if type(static) is not StaticInput:
                    return None
                inputs.append((static, static.value, collect))
            else:
                fixed += map(unwrap_key, jax.tree_util.tree_leaves(value))
        plain = (*(value for _, value, _ in inputs), *fixed)
        if not all(type(each) is ArrayImpl for each in plain):
            return None
        return LoadedInputs(args, tuple(inputs), plain)

    def _forget(self) -> None:
        super()._forget()
        self._loaded = None
