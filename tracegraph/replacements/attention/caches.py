"""Caches: where keys or values are in memory, and what is written into them first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tracegraph.ir.graph import Op, Operand, Value
from tracegraph.lowering.kernels.attention.over_cache_problem import Cached, CacheUpdate
from tracegraph.replacements.attention.softmax_chain import ELEMENT, TIME
from tracegraph.replacements.element_reader import ElementReader, UnreadableError
from tracegraph.replacements.indices import (
    Index,
    flatten_index,
    list_quotients,
    list_variables,
    make_variable,
)
from tracegraph.replacements.places import Indices, move_place
from tracegraph.replacements.scatter_places import as_index, find_scatter_place

_FLOATS = ("bfloat16", "float16", "float32")


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
    place: Indices
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
    place: Indices
    axis: int

    def read(self, makers: Mapping[Operand, Op], arrays: dict[Value, int]) -> CacheUpdate:
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
            found = position.clamp(as_index(start), 0, length - 1)
            return CacheUpdate(position.finish(found), element.finish(element.read(source, at)))
        found = find_scatter_place(position, self.op, self.place, self.axis)
        source = element.read(self.op.operands[2], found.update)
        return CacheUpdate(position.finish(found.index), element.finish(source))


def find_cache(makers: Mapping[Operand, Op], value: Operand, place: Indices) -> Cache | None:
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
        write = _find_write(makers, op, place)
        if write is not None and isinstance(op.operands[0], Value):
            return Cache(op.operands[0], place, value, write)
        moved = place if op.name == "convert_element_type" else move_place(op, place)
        if moved is None:
            return Cache(value, place)
        value, place = op.operands[0], moved
    return None


def _find_write(makers: Mapping[Operand, Op], op: Op, place: Indices) -> _Write | None:
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
    if op.name != "scatter":
        return None
    try:
        find_scatter_place(ElementReader(makers, {}), op, place, axis)
    except UnreadableError:
        return None
    return _Write(op, place, axis)
