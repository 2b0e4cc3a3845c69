"""BlockReplay: a captured block, which every replay gives the same arrays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from tracegraph.replaying.argument_slots import LeafSlot
from tracegraph.replaying.captured_graph import MISS, CapturedGraph
from tracegraph.replaying.private_copies import wait_for_arguments
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.live_buffers import StaticInput
from tracegraph.runtime.arrays.static_buffer import StaticBuffer
from tracegraph.runtime.jax_interop import ArrayImpl, unwrap_key

_is_deleted = ArrayImpl.is_deleted


class LoadedInput(NamedTuple):
    """A static input that a block reads.

    Attributes:
        static: the input.
        buffer: of the graph.
        take: takes another value.
        find_loaded: returns the value that the graph reads where it is; None if it has a copy.
    """

    static: StaticInput
    buffer: StaticBuffer
    take: Callable[..., bool]
    find_loaded: Callable[[], Any]


class LoadedInputs:
    """What a block was given last, see Note [Replays of a block].

    Args:
        arguments: the very tuple.
        fixed: the arrays in it that are no static inputs.

    Attributes:
        arguments: as given.
        fixed: as given.
        inputs: each static input that it reads.
        values: theirs, held for the launch; None once an input has to be looked at.
        watched: the arrays that others may delete.
    """

    __slots__ = ("__weakref__", "arguments", "fixed", "inputs", "values", "watched")

    def __init__(self, arguments: tuple[Any, ...], fixed: tuple[Any, ...]) -> None:
        self.arguments, self.fixed = arguments, fixed
        self.inputs: tuple[LoadedInput, ...] = ()
        self.values: tuple[Any, ...] | None = None
        self.watched: tuple[Any, ...] = ()

    def note(self, inputs: Sequence[LoadedInput], values: tuple[Any, ...]) -> None:
        """Remembers the inputs with the values that the graph has taken.

        Args:
            inputs: all that it reads.
            values: what `values` was set to before the graph took them.
        """
        self.inputs = tuple(map(_note, inputs, values))
        pairs = [(each.static, value) for each, value in zip(inputs, values, strict=True)]
        shared = [value for static, value in pairs if static.is_shared]
        self.watched = (*self.fixed, *shared)
        copied = [each.static for each in self.inputs if each.find_loaded is _find_nothing]
        # Nothing was told of an input that was not known to be copied.
        is_told = all(static.is_copied for static in copied)
        for static in copied:
            static.is_copied = True
        if not is_told or any(static.value is not value for static, value in pairs):
            self.values = None


class BlockReplay(CapturedGraph):
    """The captured graph of a block that is replayed by hand.

    Note [Replays of a block]. A captured function is called with other arrays each time. A block
    reads the same ones in every replay: plain arrays, which never change, and static inputs. These
    tell the graph when it has to look at them, see Note [Writing an input]: `values` is None then.
    So a replay asks if arrays that others hold were deleted, and looks at no input unless one was
    written: `make_quick_call` spells that out. Every argument is looked at, as in a call, where a
    block writes state, or reads what lives in another graph.

    A write of another thread may come at any time. So `values` is set before the graph takes the
    values: what is told meanwhile stays told. And who launches holds them: what another thread
    writes over is not freed before.
    """

    __slots__ = ("_loaded",)

    def __init__(self, *args: Any) -> None:
        self._loaded: LoadedInputs | None = None
        super().__init__(*args)

    def make_quick_call(self, args: tuple[Any, ...]) -> Callable[[], Any]:
        """Returns what `try_call` does with these arguments, as short as Note [Hot path] says.

        Args:
            args: that every replay gets.
        """
        lock, clock = self.lock, self._clock

        def call() -> Any:
            with lock:
                loaded = self._loaded
                if loaded is not None and loaded.arguments is args:
                    # Held for the launch.
                    values, watched = loaded.values, loaded.watched
                    if values is not None and not (watched and any(map(_is_deleted, watched))):
                        generation = clock.generation
                        try:
                            clock.generation = generation + 1
                            self._launch_stages()
                        except BaseException as error:
                            if self._recover(error, args, generation, True):
                                return MISS
                            raise
                        self._calls += 1
                        # A block without state has no results: its arrays show the buffers.
                        return None
            return self.try_call(args, {}, True)

        return call

    def try_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        """Replays, as `CapturedGraph.try_call` does."""
        loaded = self._loaded
        if loaded is None or loaded.arguments is not args or any(map(_is_deleted, loaded.watched)):
            return self._load_all(args, kwargs, is_checked)
        return self._load_written(loaded, args, kwargs, is_checked)

    def _load_written(
        self, loaded: LoadedInputs, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool
    ) -> Any:
        """Replays on what was written since; on all if an array cannot be taken as it is."""
        values = tuple(each.static.value for each in loaded.inputs)
        is_plain = all(type(each) is ArrayImpl and not each.is_deleted() for each in values)
        if is_plain and self.replay.waits:
            wait_for_arguments(values)
        if is_plain:
            with self.lock:
                if self._loaded is loaded and self._take_written(loaded, values):
                    generation = self._clock.generation
                    try:
                        self.replay.launch()
                    except BaseException as error:
                        if self._recover(error, args, generation, True):
                            return MISS
                        raise
                    self._calls += 1
                    return ()
        return self._load_all(args, kwargs, is_checked)

    def _take_written(self, loaded: LoadedInputs, values: tuple[Any, ...]) -> bool:
        """Lets the graph take the values that are new; False if it does not take one of them so."""
        # What is loaded is not known if one of them is refused.
        self._loaded, loaded.values = None, values
        updates: list[Any] = []
        for each, value in zip(loaded.inputs, values, strict=True):
            if value is each.find_loaded():
                continue
            if not each.take(value, updates) or updates:
                return False
        loaded.note(loaded.inputs, values)
        self._loaded = loaded
        return True

    def _load_all(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_checked: bool) -> Any:
        """Replays on arguments that are looked at one by one, and remembers them."""
        inputs = None if self._donated else self._find_inputs(args)
        if inputs is None:
            return super().try_call(args, kwargs, is_checked)
        values = tuple(each.static.value for each in inputs)
        leaves = jax.tree_util.tree_leaves([each for each in args if type(each) is not Array])
        fixed = tuple(unwrap_key(leaf) for leaf in leaves)
        if not all(type(each) is ArrayImpl for each in (*values, *fixed)):
            return super().try_call(args, kwargs, is_checked)
        if any(map(_is_deleted, (*values, *fixed))):
            return MISS
        if self.replay.waits:
            wait_for_arguments((values, fixed))
        loaded = LoadedInputs(args, fixed)
        with self.lock:
            self._loaded = None
            loaded.values = values
            for each in inputs:
                each.static.add_reader(loaded)
            result = super().try_call(args, kwargs, is_checked)
            if result is not MISS:
                loaded.note(inputs, values)
                self._loaded = loaded
        return result

    def _find_inputs(self, args: tuple[Any, ...]) -> list[LoadedInput] | None:
        """Returns the static inputs among arguments; None if there is another live array."""
        inputs: list[LoadedInput] = []
        for index, _, _, collect in self._collectors:
            value = args[index]
            if type(value) is Array:
                static = value.find_input()
                if type(static) is not StaticInput:
                    return None
                slot = self.order.slots[index]
                assert isinstance(slot, LeafSlot)
                inputs.append(LoadedInput(static, slot.buffer, collect, _find_nothing))
        return inputs

    def _forget(self) -> None:
        super()._forget()
        self._loaded = None


def _note(each: LoadedInput, value: Any) -> LoadedInput:
    """Returns an input with the value that the graph has taken."""
    is_read = each.static.context is None or each.buffer.reads(value)
    return each._replace(find_loaded=weakref.ref(value) if is_read else _find_nothing)


def _find_nothing() -> None:
    """Stands for a reference to a value where the graph has a copy."""
