"""Scatter places: which update of a scatter an element of its result gets, and where it is written.

A scatter may write several updates to one element. Where it writes one into each row, along one of
its axes, the other axes tell which: they count the updates, or are batches, or lie in the windows.
"""

from __future__ import annotations

import dataclasses

from jax.lax import GatherScatterMode

from tracegraph.ir.graph import Op
from tracegraph.replacements.element_reader import Element, ElementReader, UnreadableError
from tracegraph.replacements.indices import Index
from tracegraph.replacements.places import Indices

_CLIPS = GatherScatterMode.CLIP
_MODES = (GatherScatterMode.FILL_OR_DROP, GatherScatterMode.PROMISE_IN_BOUNDS, _CLIPS)


@dataclasses.dataclass(frozen=True)
class ScatterPlace:
    """Where the one update of a row goes.

    Attributes:
        index: along the row; out of its bounds, nothing is written.
        component: which part of an index vector that is.
        update: where the update is.
        free: axes of the updates that the indices have, too.
    """

    index: Index
    component: int
    update: Indices
    free: tuple[int, ...]


def find_scatter_place(reader: ElementReader, op: Op, place: Indices, axis: int) -> ScatterPlace:
    """Returns where the one update of a row goes.

    Args:
        reader: of the graph's elements.
        op: the scatter.
        place: of an element of its result, a variable of its own for each axis.
        axis: of the row.

    Raises:
        UnreadableError: it may write several updates into a row, or none.
    """
    return _Scatter(reader, op, place, axis).find()


class _Scatter:
    def __init__(self, reader: ElementReader, op: Op, place: Indices, axis: int) -> None:
        self._reader, self._op, self._place, self._axis = reader, op, place, axis
        self._numbers = op.params["dimension_numbers"]
        self._scattered = tuple(self._numbers.scatter_dims_to_operand_dims)
        self._indices = op.operands[1]

    def find(self) -> ScatterPlace:
        """Returns what `find_scatter_place` does."""
        shape = self._op.operands[2].aval.shape
        free = tuple(a for a in range(len(shape)) if a not in self._numbers.update_window_dims)
        at = self._place_windows(shape)
        batches = dict(
            zip(
                self._numbers.scatter_indices_batching_dims,
                self._numbers.operand_batching_dims,
                strict=True,
            )
        )
        for number, own in enumerate(free):
            # The axes of the updates that are no windows are those of the indices, but for the
            # last one.
            batch = batches.get(number)
            at[own] = self._place[batch] if batch is not None else self._find_counter(number, free)
        rows = tuple(at[each] for each in free)
        vector = [self._read(rows, component) for component in range(len(self._scattered))]
        for axis, index in zip(self._scattered, vector, strict=True):
            if axis != self._axis and index != self._place[axis]:
                raise UnreadableError
        component = self._scattered.index(self._axis)
        found = vector[component]
        if self._op.params["mode"] == _CLIPS:
            found = self._reader.clamp(found, 0, self._op.results[0].shape[self._axis] - 1)
        return ScatterPlace(found, component, tuple(at[each] for each in range(len(at))), free)

    def _place_windows(self, shape: tuple[int, ...]) -> dict[int, Index]:
        """Returns the places in windows, which have to be as large as what they are written to."""
        given, result = self._numbers, self._op.results[0].shape
        inserted, batches = set(given.inserted_window_dims), set(given.operand_batching_dims)
        own = [axis for axis in range(len(result)) if axis not in inserted | batches]
        windows = [shape[axis] for axis in given.update_window_dims]
        is_known = self._op.params["mode"] in _MODES and inserted == set(self._scattered)
        if windows != [result[axis] for axis in own] or self._axis not in inserted or not is_known:
            raise UnreadableError
        pairs = zip(given.update_window_dims, own, strict=True)
        return {window: self._place[axis] for window, axis in pairs}

    def _find_counter(self, number: int, free: tuple[int, ...]) -> Index:
        """Returns the place of an element's update along an axis of the indices."""
        size = self._indices.aval.shape[number]
        if size == 1:
            return Index()
        for component, axis in enumerate(self._scattered):
            if axis == self._axis or self._op.results[0].shape[axis] != size:
                continue
            at = [Index()] * len(free)
            at[number] = self._place[axis]
            if self._read(tuple(at), component) == self._place[axis]:
                return self._place[axis]
        raise UnreadableError

    def _read(self, rows: Indices, component: int) -> Index:
        return as_index(self._reader.read(self._indices, (*rows, Index(constant=component))))


def as_index(element: Element) -> Index:
    """Returns an element of integers.

    Raises:
        UnreadableError: it is of another type.
    """
    if not isinstance(element, Index):
        raise UnreadableError
    return element
