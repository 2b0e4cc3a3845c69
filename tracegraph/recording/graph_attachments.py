"""What goes with a graph: functions that are called, and objects that are dropped, at its end."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

from tracegraph.recording.graph_hooks import (
    GraphHooks,
    Registry,
    RemovableHandle,
    call_logged,
    check_hook,
)
from tracegraph.runtime.streams.stream_backend import find_backend


@dataclasses.dataclass(frozen=True)
class Attachment:
    """What goes with a graph.

    Attributes:
        callback: is called then, or None.
        held: is dropped then.
        waits: for all work on the device before.
    """

    callback: Callable[[], object] | None
    held: Any
    waits: bool


class Attachments(Registry):
    """The attachments of a graph.

    Attributes:
        jax_device: that the graph is for; None before its first capture.
    """

    jax_device: Any = None


class AttachedGraph(GraphHooks):
    """A graph with attachments; base class of `CUDAGraph`."""

    def __init__(self) -> None:
        super().__init__()
        self._attachments = Attachments()
        # An attachment that holds the graph would keep it alive, were it not for a reset.
        weakref.finalize(self, release_all, self._attachments).atexit = False

    def register_destroy_callback(
        self, cb: Callable[[], object], *, synchronize_before_release: bool = False
    ) -> RemovableHandle:
        """Registers a function for the end of the graph: once, at ``reset()`` or when it is gone.

        The functions are called in the order in which they were registered, before the memory of
        the graph is freed. What they raise is logged. They must not hold the graph, which would
        then live until ``reset()``; at the end of the process they are not called.

        Args:
            cb: is called without arguments.
            synchronize_before_release: wait for the work of the GPU before: a replay may still be
                under way.

        Returns:
            A handle, whose ``remove()`` takes the function away.

        Example:
            >>> g = tg.CUDAGraph()
            >>> handle = g.register_destroy_callback(lambda: print("gone"))
            >>> with tg.graph(g):
            ...     y = jnp.arange(3) + 1
            >>> g.reset()
            gone
        """
        check_hook(cb, "register_destroy_callback")
        return self._attachments.add(Attachment(cb, None, synchronize_before_release))

    def retain_object(
        self, obj: Any, *, synchronize_before_release: bool = False
    ) -> RemovableHandle:
        """Keeps an object alive until ``reset()``, or until the graph is gone.

        The arrays that a block reads are kept anyway.

        Args:
            obj: any object that does not hold the graph.
            synchronize_before_release: wait for the work of the GPU before it is dropped.

        Returns:
            A handle, whose ``remove()`` drops the object at once.
        """
        return self._attachments.add(Attachment(None, obj, synchronize_before_release))


def release_all(attachments: Attachments) -> None:
    """Calls the functions and drops the objects; what a function raises is logged.

    Args:
        attachments: of one graph.
    """
    taken: list[Attachment] = attachments.take_all()
    if any(each.waits for each in taken):
        call_logged("the wait for a graph that ends", _wait_for_device, attachments.jax_device)
    for each in taken:
        if each.callback is not None:
            call_logged("a callback at the end of a graph", each.callback)


def _wait_for_device(jax_device: Any) -> None:
    backend = find_backend(jax_device)
    # Work of the host device is done when a replay returns.
    if backend is not None:
        backend.synchronize_device()
