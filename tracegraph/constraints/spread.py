"""Spread: the several devices that one call runs on, and the rule that all places agree on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from tracegraph.constraints.arguments import (
    ArgumentLeaf,
    find_spread_sharding,
    is_reachable,
    make_process_violation,
)
from tracegraph.constraints.dependence import iterate_ops
from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.meshes import list_places
from tracegraph.constraints.violation import Violation, locate_op
from tracegraph.ir.graph import Graph, Op
from tracegraph.runtime.jax_interop import unwrap_key

_WHY = "one program runs on one set of devices, in one order, as under jax.jit"


@dataclasses.dataclass(frozen=True)
class Spread:
    """The devices that a call runs on, when they are several.

    Attributes:
        devices: in the order of the mesh.
        source: what names them, as ``argument 0 `x```.
        where: it does, in the user's program.
        mesh: axis names and sizes, as ``'data': 2``; empty where no mesh is named.
    """

    devices: tuple[Any, ...]
    source: str
    where: str
    mesh: str

    def __str__(self) -> str:
        named = ", ".join(map(str, self.devices))
        return f"{len(self.devices)} devices ({named})" + (
            f", mesh {self.mesh}" if self.mesh else ""
        )


@dataclasses.dataclass(frozen=True)
class _Place:
    """Something that names devices.

    Attributes:
        devices: in order.
        source: what it is.
        where: the user's line.
        mesh: as of `Spread`.
        op: that names them, if it is one.
    """

    devices: tuple[Any, ...]
    source: str
    where: str
    mesh: str = ""
    op: Op | None = None


def find_spread(leaves: Sequence[ArgumentLeaf], graph: Graph | None = None) -> Spread | None:
    """Returns the devices that a call is spread over; None for a call of one device.

    Args:
        leaves: the arguments, with values or `jax.ShapeDtypeStruct`.
        graph: the function, once it is traced.
    """
    several = [place for place in _list_all(leaves, graph) if len(place.devices) > 1]
    if not several:
        return None
    first = several[0]
    mesh = next((place.mesh for place in several if place.mesh), "")
    return Spread(first.devices, first.source, first.where, mesh)


def check_spread(
    spread: Spread,
    leaves: Sequence[ArgumentLeaf],
    graph: Graph | None = None,
    *,
    is_cut: bool = False,
) -> list[Violation]:
    """Finds what names other devices than the ones a call is spread over, or their other order.

    Args:
        spread: the devices.
        leaves: the arguments.
        graph: the function, once it is traced.
        is_cut: True when a graph of GPUs is cut where other processes are needed.
    """
    if not is_reachable(spread.devices, is_cut=is_cut):
        return [make_process_violation(spread.source, spread.where, spread.devices)]
    found: dict[tuple[str, str], Violation] = {}
    for place in _list_all(leaves, graph):
        if place.devices != spread.devices:
            found.setdefault((place.source, place.where), _make_violation(place, spread))
    for op in iterate_ops(graph) if graph is not None else ():
        for each in list_places(op.params.values()):
            mesh = each.mesh if isinstance(each, NamedSharding) else each
            if isinstance(mesh, AbstractMesh) and mesh.size not in (1, len(spread.devices)):
                place = _Place((), f"{op.name} on {mesh.size} devices", locate_op(op), op=op)
                found.setdefault((place.source, place.where), _make_violation(place, spread))
    return list(found.values())


def _make_violation(place: _Place, spread: Spread) -> Violation:
    named = ", ".join(map(str, place.devices))
    got = f"{place.source} is on {named}" if named else place.source
    order = " in this order" if {*place.devices} == {*spread.devices} else ""
    wanted = ", ".join(map(str, spread.devices))
    return Violation(
        "mixed-devices",
        f"devices are mixed: {spread.source} is on {wanted}{order}, {got}",
        place.where,
        _WHY,
        "put all of it on one mesh first: jax.device_put(x, NamedSharding(mesh, spec)), with "
        "spec = P() for what each device needs whole",
        place.op,
    )


def _list_all(leaves: Sequence[ArgumentLeaf], graph: Graph | None) -> Iterable[_Place]:
    yield from _list_leaf_places(leaves)
    yield from _list_context_places()
    if graph is not None:
        yield from _list_op_places(graph)


def _list_leaf_places(leaves: Sequence[ArgumentLeaf]) -> Iterable[_Place]:
    for leaf in leaves:
        value = unwrap_key(leaf.value)
        sharding = find_spread_sharding(value)
        where = f"{locate_caller()}, {leaf.path}"
        if sharding is not None:
            yield _Place(list_devices(sharding), leaf.path, where, _describe_mesh(sharding))
        elif isinstance(value, jax.Array) and value.committed:
            yield _Place(tuple(value.devices()), leaf.path, where)


def _list_context_places() -> Iterable[_Place]:
    mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        where = f"{locate_caller()}, mesh {mesh.axis_names}"
        yield _Place(tuple(mesh.devices.flat), "the mesh of jax.set_mesh", where, print_mesh(mesh))


def _list_op_places(graph: Graph) -> Iterable[_Place]:
    for op in iterate_ops(graph):
        for each in list_places(op.params.values()):
            mesh = each.mesh if isinstance(each, NamedSharding) else each
            if isinstance(mesh, AbstractMesh) or (isinstance(mesh, Mesh) and mesh.empty):
                continue
            devices = tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else list_devices(each)
            yield _Place(devices, op.name, locate_op(op), _describe_mesh(each), op)


def list_devices(sharding: Any) -> tuple[Any, ...]:
    """Returns the devices of a sharding, in its own order."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def print_mesh(mesh: Any) -> str:
    """Returns axis names and sizes of a mesh, as ``'data': 2, 'model': 4``."""
    return ", ".join(f"{name!r}: {size}" for name, size in mesh.shape.items())


def print_sharding(sharding: Any) -> str:
    """Returns a sharding in short, as ``P('data') over 'data': 2``.

    Example:
        >>> print_sharding(jax.NamedSharding(jax.make_mesh((1,), ("data",)), jax.P("data")))
        "P('data') over 'data': 1"
    """
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    parts = ", ".join(map(repr, sharding.spec))
    kind = sharding.memory_kind
    elsewhere = f", memory {kind}" if kind not in (None, "device") else ""
    return f"P({parts}) over {print_mesh(sharding.mesh)}{elsewhere}"


def _describe_mesh(place: Any) -> str:
    mesh = place.mesh if isinstance(place, NamedSharding) else place
    return print_mesh(mesh) if isinstance(mesh, Mesh | AbstractMesh) else ""
