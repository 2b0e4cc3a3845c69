"""Scatters that add one value to each row: the gradient of picking one logit of each token.

Note [Row scatters]
The gradient of a loss that takes one element of each row, as cross entropy with integer labels
does, is an array of zeros with one value in each row. XLA fills it, scatters into it, and reads it
again where the gradient of the softmax is added: three passes over an array as large as the logits,
412 MB for 2048 tokens and a vocabulary of 50304. An element of it is a choice: the update where its
place is the index, and nothing elsewhere. That is a part of whatever reads it.

    scatter_add(operand, indices, updates)  =  where(place == index, operand + update, operand)

The values are the same to the last bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from tracegraph.ir.graph import Graph, Op
from tracegraph.replacements.element_reader import ElementReader, UnreadableError
from tracegraph.replacements.graph_view import GraphView
from tracegraph.replacements.indices import Index, list_variables, make_variable
from tracegraph.replacements.match import Machine, Match
from tracegraph.replacements.scatter_places import ScatterPlace, find_scatter_place

# A scatter into fewer elements is one small kernel either way.
MIN_ELEMENTS = 1 << 16


@dataclasses.dataclass(frozen=True)
class RowScatters:
    """Finds scatters that add one value to each row, see Note [Row scatters]."""

    name: str = "scatters of one value per row"

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:  # noqa: ARG002
        """Returns one match per scatter."""
        view = GraphView(graph)
        found = [_match(view, op) for op in graph.ops if op.name == "scatter-add"]
        return [match for match in found if match is not None]


@dataclasses.dataclass(frozen=True)
class RowScatter:
    """Adds one value to each row.

    Attributes:
        axis: along which a row lies.
        component: which part of an index vector is a place in the row.
        clips: bring an index into the bounds; one that is out of them adds nothing otherwise.
        index_axes: for each axis of the operand the one of the indices, or None for none.
        update_axes: for each axis of the operand the one of the updates, or None.
    """

    axis: int
    component: int
    clips: bool
    index_axes: tuple[int | None, ...]
    update_axes: tuple[int | None, ...]

    def __call__(self, operand: Any, indices: Any, updates: Any) -> tuple[Any]:
        """Returns the one result."""
        index = _spread(indices[..., self.component], self.index_axes)
        if self.clips:
            index = jnp.clip(index, 0, operand.shape[self.axis] - 1)
        places = lax.broadcasted_iota(index.dtype, operand.shape, self.axis)
        update = _spread(updates, self.update_axes).astype(operand.dtype)
        return (jnp.where(places == index, operand + update, operand),)

    def add_widely(self, operand: Any, indices: Any, updates: Any) -> tuple[Any]:
        """Returns the result in float32: the reference."""
        return self(operand.astype(jnp.float32), indices, updates.astype(jnp.float32))


def _spread(array: Any, axes: Sequence[int | None]) -> Any:
    """Returns an array with its axes in another order, and axes of size one where there is none."""
    order = [axis for axis in axes if axis is not None]
    rest = [axis for axis in range(array.ndim) if axis not in order]
    moved = array.transpose([*order, *rest])
    sizes = iter(moved.shape)
    return moved.reshape([1 if axis is None else next(sizes) for axis in axes])


def _match(view: GraphView, op: Op) -> Match | None:
    (result,), shape = op.results, op.results[0].shape
    is_large = result.aval.size >= MIN_ELEMENTS and jnp.issubdtype(result.dtype, jnp.floating)
    if not is_large:
        return None
    place = tuple(make_variable(f"a{axis}", size) for axis, size in enumerate(shape))
    for axis in op.params["dimension_numbers"].inserted_window_dims:
        reader = ElementReader(view.makers, {})
        try:
            found = find_scatter_place(reader, op, place, axis)
        except UnreadableError:
            continue
        scatter = _describe(op, found, place, axis)
        inputs = tuple(op.operands)
        return Match(op, (result,), inputs, scatter, scatter.add_widely)
    return None


def _describe(op: Op, found: ScatterPlace, place: tuple[Index, ...], axis: int) -> RowScatter:
    owners = {each: number for number, each in enumerate(found.update) if list_variables(each)}
    update_axes = tuple(owners.get(each) for each in place)
    index_axes = tuple(found.free.index(own) if own in found.free else None for own in update_axes)
    clips = op.params["mode"] == lax.GatherScatterMode.CLIP
    return RowScatter(axis, found.component, clips, index_axes, update_axes)
