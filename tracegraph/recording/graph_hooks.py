"""Hooks: functions that are called when a graph is captured, instantiated or replayed.

Note [Hooks cost nothing]. `CUDAGraph.replay` looks at one attribute, the call that it may make at
once. That is None until the first replay, and again from the moment on that a hook for replays
is registered, on the graph or for all: then the slow way, which calls hooks, is taken. It makes the
graph ready again when it finds none.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from tracegraph.constraints.frames import locate_caller
from tracegraph.runtime.errors import ConfigError

LOGGER = logging.getLogger("tracegraph")

# Of the class in ``cuda_graph.py``, which imports this file.
Hook: TypeAlias = Callable[[Any], None]

CAPTURE_START, CAPTURE_END, INSTANTIATE = "capture_start", "capture_end", "instantiate"
REPLAY_START, REPLAY_END = "replay_start", "replay_end"
MOMENTS = (CAPTURE_START, CAPTURE_END, INSTANTIATE, REPLAY_START, REPLAY_END)


class Registry:
    """Things that are registered, in the order in which they came, each until it is removed."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._entries: dict[int, Any] = {}

    def add(self, entry: Any) -> RemovableHandle:
        """Registers a thing."""
        number = next(self._numbers)
        self._entries[number] = entry
        return RemovableHandle(self, number)

    def remove(self, number: int) -> None:
        """Removes a thing; nothing happens if it is gone."""
        self._entries.pop(number, None)

    def take_all(self) -> list[Any]:
        """Removes all and returns them."""
        entries, self._entries = self._entries, {}
        return [*entries.values()]

    def list_all(self) -> list[Any]:
        """Returns all."""
        return [*self._entries.values()]

    def __bool__(self) -> bool:
        return bool(self._entries)


class RemovableHandle:
    """What was registered; a with-block of it removes it at its end.

    Example:
        >>> seen = []
        >>> with tg.register_graph_replay_end_hook(seen.append):
        ...     pass
    """

    def __init__(self, registry: Registry, number: int) -> None:
        # A handle that is kept keeps nothing alive.
        self._registry, self._number = weakref.ref(registry), number

    def remove(self) -> None:
        """Removes what was registered; a second time nothing happens."""
        registry = self._registry()
        if registry is not None:
            registry.remove(self._number)

    def __enter__(self) -> RemovableHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


# Those for all graphs; the lock is held where a graph is made ready, and where it is made unready.
_registries = {moment: Registry() for moment in MOMENTS}
_graphs: weakref.WeakSet[GraphHooks] = weakref.WeakSet()
_lock = threading.RLock()


def check_hook(hook: Any, call: str) -> None:
    """Refuses what cannot be called.

    Args:
        hook: what the user gave.
        call: the name of the function that it was given to.
    """
    if not callable(hook):
        raise ConfigError(
            f"{call} is given {type(hook).__name__}, which cannot be called",
            where=f"{locate_caller()}, argument 0",
            why="what is registered is a function",
            fix="pass a function; a hook is called with the tg.CUDAGraph",
            anchor="unknown-option",
        )


def call_logged(what: str, function: Callable[..., object], *args: Any) -> None:
    """Calls a function of the user whose errors are not those of the caller: they are logged.

    Args:
        what: what the log calls it.
        function: of the user.
        *args: its arguments.
    """
    try:
        function(*args)
    except Exception:
        LOGGER.warning("%s failed", what, exc_info=True)


class GraphHooks:
    """The hooks of one graph; base class of `CUDAGraph`."""

    def __init__(self) -> None:
        self._hooks: dict[str, Registry] = {}
        # What `replay` may call at once, see Note [Hooks cost nothing].
        self._ready: Callable[[], Any] | None = None
        with _lock:
            _graphs.add(self)

    def register_capture_start_hook(self, hook: Hook) -> RemovableHandle:
        """Registers a function for when a capture into this graph has begun.

        The capture is under way: what the hook computes is recorded.

        Args:
            hook: is called with the graph. What it raises ends the capture and passes.

        Returns:
            A handle, whose ``remove()`` takes the hook away.
        """
        return self._register(CAPTURE_START, hook, "register_capture_start_hook")

    def register_capture_end_hook(self, hook: Hook) -> RemovableHandle:
        """Registers a function for when a capture has ended, before the graph is executable.

        Args:
            hook: is called with the graph, whose ``get_graph_data()`` and ``debug_dump()`` work
                already. What it raises makes the capture fail, and passes.

        Returns:
            A handle, whose ``remove()`` takes the hook away.
        """
        return self._register(CAPTURE_END, hook, "register_capture_end_hook")

    def register_post_instantiate_hook(self, hook: Hook) -> RemovableHandle:
        """Registers a function for each time that the graph has become executable.

        Args:
            hook: is called with the graph, once per instantiation and not per replay. What it
                raises passes; the graph can be replayed.

        Returns:
            A handle, whose ``remove()`` takes the hook away.

        Example:
            >>> g = tg.CUDAGraph()
            >>> handle = g.register_post_instantiate_hook(lambda g: print(g))
            >>> with tg.graph(g):
            ...     y = jnp.arange(3) + 1
            <CUDAGraph captured>
        """
        return self._register(INSTANTIATE, hook, "register_post_instantiate_hook")

    def register_replay_start_hook(self, hook: Hook) -> RemovableHandle:
        """Registers a function for each replay of this graph, just before it is launched.

        Args:
            hook: is called with the graph. What it raises passes: nothing is launched, and no hook
                for the end is called.

        Returns:
            A handle, whose ``remove()`` takes the hook away.
        """
        return self._register(REPLAY_START, hook, "register_replay_start_hook")

    def register_replay_end_hook(self, hook: Hook) -> RemovableHandle:
        """Registers a function for each replay of this graph, just after it was launched.

        On a GPU the work may still be under way.

        Args:
            hook: is called with the graph, also if the launch has raised.

        Returns:
            A handle, whose ``remove()`` takes the hook away.
        """
        return self._register(REPLAY_END, hook, "register_replay_end_hook")

    def _register(self, moment: str, hook: Any, call: str) -> RemovableHandle:
        check_hook(hook, call)
        with _lock:
            self._ready = None
            return self._hooks.setdefault(moment, Registry()).add(hook)

    def _call_hooks(self, moment: str) -> None:
        """Calls the hooks for all graphs, whose errors are logged, then those of this one."""
        for hook in _registries[moment].list_all():
            call_logged(f"a hook of all graphs for {moment}", hook, self)
        if moment in self._hooks:
            for hook in self._hooks[moment].list_all():
                hook(self)

    def _make_ready(self, captured: Any, arguments: tuple[Any, ...]) -> bool:
        """Lets `replay` launch a graph at once; False if there are hooks to be called."""
        with _lock:
            if self._has_hooks(REPLAY_START) or self._has_hooks(REPLAY_END):
                return False
            self._ready = None if captured is None else captured.make_quick_call(arguments)
            return True

    def _has_hooks(self, moment: str) -> bool:
        return bool(_registries[moment] or self._hooks.get(moment))


def register_graph_capture_start_hook(hook: Hook) -> RemovableHandle:
    """Registers a function for when the capture of any `CUDAGraph` has begun.

    Hooks for all graphs are called before those of the graph. What they raise is logged, and
    breaks nothing.

    Args:
        hook: is called with the graph. What it computes is recorded.

    Returns:
        A handle, whose ``remove()`` takes the hook away.
    """
    return _register_for_all(CAPTURE_START, hook)


def register_graph_capture_end_hook(hook: Hook) -> RemovableHandle:
    """Registers a function for when the capture of any `CUDAGraph` has ended.

    Args:
        hook: is called with the graph, before it is executable. What it raises is logged.

    Returns:
        A handle, whose ``remove()`` takes the hook away.
    """
    return _register_for_all(CAPTURE_END, hook)


def register_graph_instantiate_hook(hook: Hook) -> RemovableHandle:
    """Registers a function for each time that any `CUDAGraph` has become executable.

    Args:
        hook: is called with the graph. What it raises is logged.

    Returns:
        A handle, whose ``remove()`` takes the hook away.
    """
    return _register_for_all(INSTANTIATE, hook)


def register_graph_replay_start_hook(hook: Hook) -> RemovableHandle:
    """Registers a function for each replay of any `CUDAGraph`, just before it is launched.

    Without any hook replays cost nothing more.

    Args:
        hook: is called with the graph. What it raises is logged.

    Returns:
        A handle, whose ``remove()`` takes the hook away.

    Example:
        >>> count = []
        >>> handle = tg.register_graph_replay_start_hook(count.append)
        >>> g = tg.CUDAGraph()
        >>> with tg.graph(g):
        ...     y = jnp.arange(3) + 1
        >>> g.replay()
        >>> handle.remove()
        >>> g.replay()
        >>> len(count)
        1
    """
    return _register_for_all(REPLAY_START, hook)


def register_graph_replay_end_hook(hook: Hook) -> RemovableHandle:
    """Registers a function for each replay of any `CUDAGraph`, just after it was launched.

    Args:
        hook: is called with the graph, also if the launch has raised. What it raises is logged.

    Returns:
        A handle, whose ``remove()`` takes the hook away.
    """
    return _register_for_all(REPLAY_END, hook)


def _register_for_all(moment: str, hook: Any) -> RemovableHandle:
    check_hook(hook, f"register_graph_{moment}_hook")
    with _lock:
        handle = _registries[moment].add(hook)
        for graph in list(_graphs):
            graph._ready = None
        return handle
