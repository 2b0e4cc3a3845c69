"""CaptureOrder: the streams of one capture, and what runs before what on them.

A stream takes part from when it waits for an event of the capture, see `Stream.is_capturing`.

While streams are captured, no event tells whether work is over: nothing runs. But the order
in which the work will run is known, because it is the graph that is being captured. Bytes that were
used on several streams may be allocated again once all of these uses come before everything that
the requesting stream will do from now on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from tracegraph.runtime.errors import CaptureError


class CaptureOrder:
    """The nodes of one capture and their order. Not locked: its user holds a lock.

    A node that is launched on a stream comes after the *terminals* of that stream: the nodes after
    which its next node will run. A stream joins the capture by waiting for an event of the capture.

    Args:
        stream: the stream on which the capture begins.

    Example:
        >>> order = CaptureOrder(1)
        >>> fork = order.launch(1)
        >>> order.record("forked", 1)
        >>> order.wait("forked", 2)
        >>> side = order.launch(2)
        >>> order.has_joined([2], into=1)
        False
        >>> order.record("side is over", 2)
        >>> order.wait("side is over", 1)
        >>> order.has_joined([2], into=1)
        True
    """

    def __init__(self, stream: int) -> None:
        self._parents: list[frozenset[int]] = []
        self._terminals: dict[int, frozenset[int]] = {stream: frozenset()}
        self._events: dict[Hashable, frozenset[int]] = {}
        # What comes before a stream's next node is never taken away, so each node is visited once.
        self._passed: dict[int, set[int]] = {}

    @property
    def streams(self) -> tuple[int, ...]:
        """The streams of this capture, in the order in which they joined it."""
        return tuple(self._terminals)

    def has_stream(self, stream: int) -> bool:
        """Says whether ``stream`` takes part in this capture."""
        return stream in self._terminals

    def has_event(self, event: Hashable) -> bool:
        """Says whether ``event`` was recorded in this capture."""
        return event in self._events

    def forget(self, event: Hashable) -> None:
        """Drops ``event``, because it was recorded again on a stream outside of this capture."""
        self._events.pop(event, None)

    def launch(self, stream: int) -> int:
        """Adds a node to ``stream`` and returns its number.

        Raises:
            CaptureError: the stream takes no part in this capture.
        """
        node = len(self._parents)
        self._parents.append(self.get_terminals(stream))
        self._terminals[stream] = frozenset((node,))
        return node

    def record(self, event: Hashable, stream: int) -> None:
        """Records ``event`` after all that ``stream`` has launched so far.

        Raises:
            CaptureError: the stream takes no part in this capture.
        """
        self._events[event] = self.get_terminals(stream)

    def wait(self, event: Hashable, stream: int) -> None:
        """Makes ``stream`` wait for ``event``; a stream outside of the capture joins it so.

        Raises:
            CaptureError: the event was not recorded in this capture.
        """
        if event not in self._events:
            raise CaptureError(
                f"stream {stream} waits for an event that was not recorded in this capture",
                where=f"event {event!r}, capture of the streams {_list(self._terminals)}",
                why="a graph can wait only for its own nodes; other work is over when it starts",
                fix="record the event on a stream of the capture, or wait before the capture",
                anchor="stream-join",
            )
        before = self._terminals.get(stream, frozenset())
        self._terminals[stream] = before | self._events[event]

    def get_terminals(self, stream: int) -> frozenset[int]:
        """Returns the nodes after which the next node of ``stream`` will run.

        Raises:
            CaptureError: the stream takes no part in this capture.
        """
        terminals = self._terminals.get(stream)
        if terminals is None:
            raise CaptureError(
                f"stream {stream} takes no part in this capture",
                where=f"capture of the streams {_list(self._terminals)}",
                why="a stream is captured from when it waits for an event of the capture",
                fix=f"let stream {stream} wait for an event of a stream that is captured",
                anchor="stream-join",
            )
        return terminals

    def has_passed(self, nodes: Iterable[int], stream: int) -> bool:
        """Says whether all that ``stream`` launches from now on runs after all ``nodes``.

        Raises:
            CaptureError: the stream takes no part in this capture.
        """
        return self._visit(stream).issuperset(nodes)

    def has_joined(self, streams: Iterable[int], into: int) -> bool:
        """Says whether all that ``streams`` launched runs before what ``into`` launches next.

        Raises:
            CaptureError: one of the streams takes no part in this capture.
        """
        passed = self._visit(into)
        return all(passed.issuperset(self.get_terminals(stream)) for stream in streams)

    def _visit(self, stream: int) -> set[int]:
        passed = self._passed.setdefault(stream, set())
        waiting = list(self.get_terminals(stream))
        while waiting:
            node = waiting.pop()
            if node not in passed:
                passed.add(node)
                waiting.extend(self._parents[node])
        return passed


def _list(streams: Iterable[int]) -> str:
    return ", ".join(str(stream) for stream in streams)
