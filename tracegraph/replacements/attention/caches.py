"""Caches: where keys or values are in memory, and what is written into them first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from tracegraph.ir.graph import Literal, Op, Operand, Value
from tracegraph.lowering.kernels.attention_problem import Cached, Update
from tracegraph.replacements.attention.softmax_chain import ELEMENT, TIME
from tracegraph.replacements.element_reader import TYPES, ElementReader, UnreadableError
from tracegraph.replacements.indices import (
    Index,
    flatten_index,
    list_quotients,
    list_variables,
    make_variable,
)
from tracegraph.replacements.places import Place, move_place

_FLOATS = ("bfloat16", "float16", "float32")
_DROPS = jax.lax.GatherScatterMode.FILL_OR_DROP
_TRUSTS = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
_CLIPS = jax.lax.GatherScatterMode.CLIP


@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys or values.

    Attributes:
        array: the array that holds them.
        place: of an element of them in it.
        updated: what the array is after an update; None without one.
        update: how it is updated.
    """

    array: Value
    place: Place
    updated: Value | None = None
    update: _Write | None = None

    @property
    def flat(self) -> Index:
        """Where the element is in memory."""
        return flatten_index(self.place, self.array.shape)

    @property
    def quotients(self) -> set[tuple[str, int]]:
        """Variables that matter only after a division, and by what."""
        return list_quotients(self.flat)

    def describe(
        self, makers: Mapping[Operand, Op], arrays: dict[Value, int], *, is_settled: bool
    ) -> Cached | None:
        """Returns where vectors are, or None where their elements are not side by side.

        Args:
            makers: the op of each value.
            arrays: the number of the kernel's parameter for each value that is loaded; it grows.
            is_settled: nothing else writes into the array.

        Raises:
            UnreadableError: the kernel cannot compute what is written.
        """
        flat = self.flat
        stride = flat.find_factor(TIME)
        if flat.find_factor(ELEMENT) != 1 or not stride:
            return None
        base = flat.drop(TIME).drop(ELEMENT)
        if any(not name.startswith("g") for name in list_variables(base)):
            return None
        parameter = arrays.setdefault(self.array, len(arrays))
        function = ElementReader(makers, arrays).finish(base)
        update = self.update.read(makers, arrays) if self.update is not None else None
        return Cached(parameter, function, stride, update, is_settled)


@dataclasses.dataclass(frozen=True)
class _Write:
    """One position that is written.

    Attributes:
        op: that writes it.
        place: of an element of the cache in the op's result.
        axis: along which the positions are.
    """

    op: Op
    place: Place
    axis: int

    def read(self, makers: Mapping[Operand, Op], arrays: dict[Value, int]) -> Update:
        """Returns what is written, and where.

        Raises:
            UnreadableError: the kernel cannot compute it.
        """
        position, element = ElementReader(makers, arrays), ElementReader(makers, arrays)
        if self.op.name == "dynamic_update_slice":
            start = position.read(self.op.operands[2 + self.axis], ())
            length = self.op.results[0].shape[self.axis]
            source = self.op.operands[1]
            at = tuple(
                Index() if axis == self.axis else each for axis, each in enumerate(self.place)
            )
            found = position.clamp(_as_index(start), 0, length - 1)
            return Update(position.finish(found), element.finish(element.read(source, at)))
        found, at = self._find_scattered(position)
        source = self.op.operands[2]
        return Update(position.finish(found), element.finish(element.read(source, at)))

    def _find_scattered(self, reader: ElementReader) -> tuple[Index, Place]:
        """Returns the position that an update is written to, and where the update is.

        Along other axes that are scattered, the update of an element must be the one with its own
        number: that is so where the indices count.
        """
        indices, update = self.op.operands[1], self.op.operands[2]
        numbers = self.op.params["dimension_numbers"]
        windows = tuple(numbers.update_window_dims)
        scattered = tuple(numbers.scatter_dims_to_operand_dims)
        own = [axis for axis in range(len(self.place)) if axis not in numbers.inserted_window_dims]
        at: dict[int, Index] = {w: self.place[a] for w, a in zip(windows, own, strict=True)}
        free = [axis for axis in range(len(update.aval.shape)) if axis not in windows]
        # The axes of the updates that are no windows are those of the indices, but for the last.
        for place, axis in enumerate(free):
            at[axis] = self._find_counter(reader, place, len(free))
        rows = tuple(at[axis] for axis in free)
        read = [
            _as_index(reader.read(indices, (*rows, Index(constant=component))))
            for component in range(len(scattered))
        ]
        for axis, index in zip(scattered, read, strict=True):
            if axis != self.axis and index != self.place[axis]:
                raise UnreadableError
        found = read[scattered.index(self.axis)]
        length = self.op.results[0].shape[self.axis]
        mode = self.op.params["mode"]
        if mode == _CLIPS:
            found = reader.clamp(found, 0, length - 1)
        return found, tuple(at[axis] for axis in range(len(at)))

    def _find_counter(self, reader: ElementReader, place: int, count: int) -> Index:
        """Returns the place of an element's update along one axis of the indices."""
        indices = self.op.operands[1]
        size = indices.aval.shape[place]
        if size == 1:
            return Index()
        scattered = self.op.params["dimension_numbers"].scatter_dims_to_operand_dims
        for component, axis in enumerate(scattered):
            if axis == self.axis or self.op.results[0].shape[axis] != size:
                continue
            at = [Index()] * count
            at[place] = self.place[axis]
            found = reader.read(indices, (*at, Index(constant=component)))
            if found == self.place[axis]:
                return self.place[axis]
        raise UnreadableError


def find_cache(makers: Mapping[Operand, Op], value: Operand, place: Place) -> Cache | None:
    """Returns the array that holds keys or values, seen through what moves its elements.

    Args:
        makers: the op of each value.
        value: the operand of a matmul.
        place: of an element in it.
    """
    while isinstance(value, Value):
        if str(value.dtype) not in _FLOATS:
            return None
        op = makers.get(value)
        if op is None:
            return Cache(value, place)
        write = _find_write(op, place)
        if write is not None and isinstance(op.operands[0], Value):
            return Cache(op.operands[0], place, value, write)
        moved = place if op.name == "convert_element_type" else move_place(op, place)
        if moved is None:
            return Cache(value, place)
        value, place = op.operands[0], moved
    return None


def _find_write(op: Op, place: Place) -> _Write | None:
    """Returns an op as one that writes a single position of a cache, if it is one."""
    along = [axis for axis, index in enumerate(place) if index.find_factor(TIME) != 0]
    if len(along) != 1 or len(op.results) != 1:
        return None
    axis, shape = along[0], op.results[0].shape
    if place[axis] != make_variable(TIME, shape[axis]):
        return None
    if op.name == "dynamic_update_slice":
        wanted = tuple(1 if each == axis else size for each, size in enumerate(shape))
        fits = tuple(op.operands[1].aval.shape) == wanted
        return _Write(op, place, axis) if fits else None
    return _Write(op, place, axis) if op.name == "scatter" and _is_plain(op, axis) else None


def _is_plain(op: Op, axis: int) -> bool:
    """True for a scatter that replaces whole windows at one position each."""
    numbers: Any = op.params["dimension_numbers"]
    shape, update = op.results[0].shape, op.operands[2].aval.shape
    inserted = tuple(numbers.inserted_window_dims)
    own = [size for each, size in enumerate(shape) if each not in inserted]
    windows = [update[each] for each in numbers.update_window_dims]
    has_batch = getattr(numbers, "operand_batching_dims", ()) or isinstance(op.operands[0], Literal)
    is_known = op.params["mode"] in (_DROPS, _TRUSTS, _CLIPS)
    scattered = tuple(numbers.scatter_dims_to_operand_dims)
    return (
        own == windows
        and sorted(inserted) == sorted(scattered)
        and axis in scattered
        and not has_batch
        and is_known
        and str(op.operands[1].aval.dtype) in TYPES
    )


def _as_index(element: Any) -> Index:
    if not isinstance(element, Index):
        raise UnreadableError
    return element
