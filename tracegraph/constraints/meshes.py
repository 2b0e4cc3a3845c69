"""The rule `several-devices`: a graph is of one device, and so is every mesh that it names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding

from tracegraph.constraints.dependence import iterate_ops
from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.violation import Violation, locate_op, make_capture_error
from tracegraph.ir.graph import Graph, Op

_PLACES = (Sharding, Mesh, AbstractMesh)
_WHY = "a graph's buffers and kernels belong to one device, {device} here"
_FIX = "use a mesh of that one device, or leave the function to jax.jit"


def check_context_mesh(name: str, device: Any) -> None:
    """Refuses a capture under a mesh of other devices than the graph's.

    Args:
        name: of the captured function.
        device: of the graph, a ``jax.Device``.

    Raises:
        CaptureError: `jax.set_mesh` has chosen such a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return
    # The abstract mesh alone is set by `jax.sharding.use_abstract_mesh`.
    concrete = jax.sharding.get_mesh()
    found = _describe_others(mesh if concrete.empty else concrete, device)
    if found is None:
        return
    violation = Violation(
        "several-devices",
        f"`{name}` is captured under jax.set_mesh with a mesh of {found}",
        f"{locate_caller()}, mesh {mesh.axis_names}",
        _WHY.format(device=device),
        _FIX,
    )
    raise make_capture_error([violation], graph_name=name)


def check_meshes(graph: Graph, device: Any) -> list[Violation]:
    """Finds the ops that name other devices than the graph's: in a mesh or a sharding.

    Args:
        graph: checked and optimised.
        device: that it is captured for, a ``jax.Device``.

    Returns:
        One violation per line of the user's and kind of op.
    """
    found: dict[tuple[str, str], Violation] = {}
    for op in iterate_ops(graph):
        violation = _find_op_violation(op, graph.name, device)
        if violation is not None:
            found.setdefault((op.origin.source, op.name), violation)
    return list(found.values())


def _find_op_violation(op: Op, graph_name: str, device: Any) -> Violation | None:
    names = (_describe_others(each, device) for each in list_places(op.params.values()))
    others = next((name for name in names if name is not None), None)
    if others is None:
        return None
    return Violation(
        "several-devices",
        f"`{graph_name}` places {op.name} on {others}",
        locate_op(op),
        _WHY.format(device=device),
        _FIX,
        op,
    )


def list_places(values: Any) -> Iterator[Any]:
    """Yields the meshes and shardings among the parameters of an op."""
    # JAX does not move what is put on a single device inside of a program.
    for value in values:
        if isinstance(value, tuple | list):
            yield from list_places(value)
        elif isinstance(value, _PLACES) and not isinstance(value, SingleDeviceSharding):
            yield value


def _describe_others(place: Any, device: Any) -> str | None:
    """Returns the devices of a place, None where they are the graph's own or not known yet."""
    if isinstance(place, NamedSharding):
        place = place.mesh
    if isinstance(place, AbstractMesh):
        return f"{place.size} devices" if place.size > 1 else None
    if isinstance(place, Mesh) and place.empty:
        return None
    devices = set(place.devices.flat) if isinstance(place, Mesh) else place.device_set
    if devices <= {device}:
        return None
    return ", ".join(sorted(map(str, devices)))
