"""Allocations, arguments and results of a compiled program."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tracegraph.lowering.xla.computations import Computations
from tracegraph.lowering.xla.constants import index_literals, read_constant
from tracegraph.lowering.xla.enums import read_name
from tracegraph.lowering.xla.program import Allocation, AllocationKind
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.runtime.definition.nodes import BufferUse

_WHOLE_BYTES = ("PRED", "S8", "S16", "S32", "S64", "U8", "U16", "U32", "U64")
_WHOLE_BYTES += ("F16", "BF16", "F32", "F64", "C64", "C128")
# Types of less than a byte share bytes on a GPU, and JAX keeps them so.
# XLA's number of the host's memory, where `jax.memory.Space.Host` puts values.
_HOST_MEMORY = 5
_PACKED_BITS = {"S4": 4, "U4": 4, "F4E2M1FN": 4, "S2": 2, "U2": 2}
_IN_HOST_MEMORY = (AllocationKind.TEMPORARY, AllocationKind.UNUSED)


def read_views(messages: Sequence[Any]) -> tuple[BufferUse | None, ...]:
    """Returns the bytes of each allocation by its number; None for what no step may name.

    Raises:
        Refusal: numbers out of order, or memory of another space.
    """
    views: list[BufferUse | None] = []
    for position, message in enumerate(messages):
        if message.index != position or message.size < 0:
            raise Refusal(f"has allocation #{message.index} of {message.size} bytes at {position}")
        if message.is_thread_local:
            views.append(None)
            continue
        if message.color not in (0, _HOST_MEMORY):
            raise Refusal(f"has allocation #{position} in memory space {message.color}")
        views.append(BufferUse(f"#{position}", 0, message.size))
    return tuple(views)


def read_allocations(
    executable: Any,
    computations: Computations,
    used: Collection[str],
    outputs: Collection[str],
) -> tuple[Allocation, ...]:
    """Returns what each allocation holds.

    Args:
        executable: a ``GpuExecutableProto``.
        computations: of its module.
        used: names of the allocations that a step reads or writes.
        outputs: names of those that hold a result.

    Raises:
        Refusal: a parameter that is a tuple, or a constant without its bytes.
    """
    literals: dict[str, list[Any]] = {}
    if executable.constants:
        literals = index_literals(computations)
    entries: dict[int, list[Any]] = {}
    for entry in executable.constants:
        entries.setdefault(entry.allocation_index, []).append(entry)
    allocations = []
    for message in executable.buffer_allocations.values:
        name, size = f"#{message.index}", message.size
        is_used, is_host = name in used or name in outputs, message.color == _HOST_MEMORY
        if message.is_entry_computation_parameter:
            allocations.append(_make_parameter(message, name))
        elif not is_used:
            allocations.append(Allocation(name, size, AllocationKind.UNUSED))
        elif message.is_constant:
            found = entries.get(message.index, [])
            if len(found) != 1:
                raise Refusal(f"has {len(found)} constants for allocation {name}")
            content = read_constant(found[0], size, literals)
            allocations.append(Allocation(name, size, AllocationKind.CONSTANT, None, content))
        else:
            kind = AllocationKind.OUTPUT if name in outputs else AllocationKind.TEMPORARY
            allocations.append(Allocation(name, size, kind, is_host=is_host))
        if is_host and allocations[-1].kind not in _IN_HOST_MEMORY:
            raise Refusal(f"has the {allocations[-1].kind.value} {name} in host memory")
    _check_parameters(allocations, executable.program_shape.parameters)
    return tuple(allocations)


def _make_parameter(message: Any, name: str) -> Allocation:
    if message.parameter_shape_index:
        raise Refusal(f"has a parameter {message.parameter_number} that is a tuple")
    number = message.parameter_number
    return Allocation(name, message.size, AllocationKind.PARAMETER, number)


def _check_parameters(allocations: Sequence[Allocation], shapes: Sequence[Any]) -> None:
    numbers = [each.parameter for each in allocations if each.parameter is not None]
    if len(set(numbers)) != len(numbers) or any(not 0 <= n < len(shapes) for n in numbers):
        raise Refusal(f"has allocations for parameters {sorted(numbers)} of {len(shapes)}")
    _check_shapes(shapes, "a parameter")


def read_outputs(executable: Any, views: Sequence[BufferUse | None]) -> tuple[str, ...]:
    """Returns for each flat result the allocation that it starts in.

    Raises:
        Refusal: a result that is missing, nested or not in rows, or no device memory.
    """
    result = executable.program_shape.result
    shapes = list(result.tuple_shapes)
    is_tuple = read_name(result, "element_type") == "TUPLE"
    found: dict[tuple[int, ...], Any] = {
        tuple(entry.shape_index.indexes): entry.output_info for entry in executable.output_info_map
    }
    indices = [(index,) for index in range(len(shapes))] if is_tuple else [()]
    missing = [index for index in indices if index not in found]
    if missing or len(found) != len(indices) + is_tuple:
        raise Refusal(f"maps the results {sorted(found)} of {len(indices)}")
    _check_shapes(shapes if is_tuple else [result], "a result")
    allocations = executable.buffer_allocations.values
    names = []
    for index in indices:
        number = found[index].allocation_index
        view = views[number] if 0 <= number < len(views) else None
        if view is None or allocations[number].is_constant:
            raise Refusal(f"has result {index} in allocation #{number}, which cannot hold it")
        names.append(view.buffer)
    return tuple(names)


def read_updated(executable: Any) -> frozenset[int]:
    """Returns the numbers of the parameters that a result updates in place.

    Raises:
        Refusal: a result is said to update a parameter and is elsewhere.
    """
    updated = set()
    allocations = executable.buffer_allocations.values
    for entry in executable.output_info_map:
        info = entry.output_info
        if not info.HasField("alias_config"):
            continue
        alias, number = info.alias_config, info.allocation_index
        allocation = allocations[number] if 0 <= number < len(allocations) else None
        if (
            allocation is None
            or alias.parameter_shape_index
            or not allocation.is_entry_computation_parameter
            or allocation.parameter_number != alias.parameter_number
        ):
            raise Refusal(f"updates parameter {alias.parameter_number} in allocation #{number}")
        updated.add(alias.parameter_number)
    return frozenset(updated)


def _check_shapes(shapes: Sequence[Any], what: str) -> None:
    """Raises `Refusal` as `check_dense`; most shapes of a program are equal to others."""
    for shape in {each.SerializeToString(): each for each in shapes}.values():
        check_dense(shape, what)


def check_dense(shape: Any, what: str) -> None:
    """Raises `Refusal` unless an array lies in rows, as JAX keeps it by default.

    Args:
        shape: a ``ShapeProto``.
        what: how the message names it.
    """
    layout, kind = shape.layout, read_name(shape, "element_type")
    if kind not in (*_WHOLE_BYTES, *_PACKED_BITS) and not kind.startswith("F8"):
        raise Refusal(f"has {what} of {kind}")
    if (
        shape.tuple_shapes
        or any(shape.is_dynamic_dimension)
        or min(shape.dimensions, default=0) < 0
    ):
        raise Refusal(f"has {what} of no fixed shape")
    order = [axis for axis in layout.minor_to_major if 0 <= axis < len(shape.dimensions)]
    if sorted(order) != list(range(len(shape.dimensions))):
        raise Refusal(f"has {what} of {len(shape.dimensions)} axes in the order {order}")
    # The place of an axis of one element does not matter, nor does any in an empty array.
    counted = [axis for axis in order if shape.dimensions[axis] != 1]
    is_empty = 0 in shape.dimensions
    is_padded = layout.tail_padding_alignment_in_elements not in (0, 1)
    if (counted != sorted(counted, reverse=True) and not is_empty) or is_padded:
        raise Refusal(f"has {what} whose axes lie in the order {order}, innermost first")
    if layout.element_size_in_bits != _PACKED_BITS.get(kind, 0):
        raise Refusal(f"has {what} with elements of {layout.element_size_in_bits} bits")
