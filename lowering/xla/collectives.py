"""Collectives of XLA's program: what several GPUs exchange, as nodes of ours.

XLA calls NCCL for them, or kernels of its own that need its barriers. We do them by kernels over
the memory of the other GPUs: `lowering/kernels/collectives.py`.

Note [One collective at a time]
Each waits on the device for the same one on the other GPUs. Were two in the graph side by side, one
GPU might begin with the first and another with the second. So all write a byte that the next one
reads: then they follow one another, in XLA's order, which is the same on all GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegraph.lowering.device_program import DeviceStep
from tracegraph.lowering.xla.enums import read_names, read_value
from tracegraph.lowering.xla.kernels import make_fill
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.scope import Scope
from tracegraph.runtime.definition.collective_nodes import (
    CollectiveKind,
    CollectiveNode,
    Exchange,
    NumberNode,
)
from tracegraph.runtime.definition.nodes import BufferUse

_REDUCTIONS = {
    "REDUCTION_KIND_SUM": "SUM",
    "REDUCTION_KIND_PRODUCT": "PRODUCT",
    "REDUCTION_KIND_MIN": "MIN",
    "REDUCTION_KIND_MAX": "MAX",
}
# The type that elements are joined in, and its bytes; complex ones are two numbers each.
_ADDED = {
    **{"F32": ("F32", 4), "F64": ("F64", 8), "F16": ("F16", 2), "BF16": ("BF16", 2)},
    **{f"{sign}{bits}": (f"{sign}{bits}", bits // 8) for sign in "SU" for bits in (8, 16, 32, 64)},
    **{"PRED": ("U8", 1), "C64": ("F32", 4), "C128": ("F64", 8)},
}
_COMPLEX = ("C64", "C128")
# Whether a number of a device counts partitions alone, or partitions and replicas; with one
# replica that is the same.
_OF_PARTITIONS: dict[str, bool] = dict.fromkeys(
    ("COLLECTIVE_OP_GROUP_MODE_CROSS_PARTITION", "COLLECTIVE_OP_GROUP_MODE_FLATTENED_ID"), True
)


def decode_all_reduce(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    """Returns the steps of an ``AllReduceThunkProto``, one for each array."""
    return _decode(CollectiveKind.ALL_REDUCE, message, name, scope)


def decode_all_gather(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    """Returns the steps of an ``AllGatherThunkProto``, one for each array."""
    return _decode(CollectiveKind.ALL_GATHER, message, name, scope)


def decode_reduce_scatter(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    """Returns the steps of a ``ReduceScatterThunkProto``, one for each array."""
    return _decode(CollectiveKind.REDUCE_SCATTER, message, name, scope)


def decode_all_to_all(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    """Returns the steps of an ``AllToAllThunkProto`` that splits its arrays."""
    if not message.has_split_dimension:
        raise Refusal("exchanges a tuple of arrays, one for each device")
    return _decode(CollectiveKind.ALL_TO_ALL, message, name, scope)


def decode_permute(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    """Returns the steps of a ``CollectivePermuteThunkProto``, one for each array."""
    return _decode(CollectiveKind.PERMUTE, message, name, scope)


def decode_replica(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    """Returns the step of a ``ReplicaIdThunkProto``: it writes 0, no program has other replicas."""
    return [make_fill(name, _find_number(message, scope))]


def decode_partition(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    """Returns the step of a ``PartitionIdThunkProto``: it writes the number of the device."""
    target = _find_number(message, scope)
    if scope.partitions == 1:
        return [make_fill(name, target)]
    return [DeviceStep(NumberNode(name, target), (), (target,))]


def _find_number(message: Any, scope: Scope) -> BufferUse:
    target = scope.find_use(message.dest_buffer)
    if target.nbytes != 4:
        raise Refusal(f"writes its number to {target.nbytes} bytes")
    return target


def _decode(kind: CollectiveKind, message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    config = message.collective_config
    if scope.partitions < 2:
        raise Refusal("exchanges with no other device in a program for one")
    if config.use_symmetric_buffer:
        raise Refusal("wants memory that is registered with NCCL")
    pairs = ()
    groups = _read_groups(config, scope.partitions)
    if kind is CollectiveKind.PERMUTE:
        pairs = tuple((each.source, each.target) for each in message.source_target_pairs)
        groups = (tuple(range(scope.partitions)),)
        _check_pairs(pairs, scope.partitions)
    is_sum = kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
    reduction = read_value(message, "reduction_kind", _REDUCTIONS) if is_sum else ""
    types = read_names(config, "operand_element_type")
    if len(types) != len(message.buffers):
        raise Refusal(f"names {len(types)} types of {len(message.buffers)} arrays")
    steps = []
    for index, (found, each) in enumerate(zip(types, message.buffers, strict=True)):
        source = scope.find_shaped_use(each.source_buffer)
        target = scope.find_shaped_use(each.destination_buffer)
        dtype, count = _read_elements(found, source, reduction)
        exchange = Exchange(kind, dtype, count, groups, reduction, pairs)
        _check_sizes(exchange, source, target)
        label = name if len(message.buffers) == 1 else f"{name}.{index}"
        # See Note [One collective at a time].
        order, is_first = scope.find_order()
        node = CollectiveNode(label, exchange, source, target)
        reads = (source,) if is_first else (source, order)
        steps.append(DeviceStep(node, reads, (target, order)))
    return steps


def _read_groups(config: Any, partitions: int) -> tuple[tuple[int, ...], ...]:
    read_value(config, "group_mode", _OF_PARTITIONS)
    groups = tuple(tuple(group.replica_ids) for group in config.replica_groups)
    groups = groups or (tuple(range(partitions)),)
    members = [number for group in groups for number in group]
    if sorted(members) != [*range(partitions)] or len({*map(len, groups)}) != 1:
        raise Refusal(f"exchanges in the groups {groups} of {partitions} devices")
    return groups


def _check_pairs(pairs: Sequence[tuple[int, int]], partitions: int) -> None:
    targets = [target for _, target in pairs]
    numbers = {number for pair in pairs for number in pair}
    if len({*targets}) != len(targets) or not numbers <= {*range(partitions)}:
        raise Refusal(f"sends from and to {pairs} of {partitions} devices")


def _read_elements(found: str, source: BufferUse, reduction: str) -> tuple[str, int]:
    """Returns what the kernel takes the bytes for: whatever is only moved, for bytes."""
    if not reduction:
        return "U8", source.nbytes
    if found not in _ADDED or (found in _COMPLEX and reduction != "SUM"):
        raise Refusal(f"joins elements of type {found} by {reduction.lower()}")
    dtype, nbytes = _ADDED[found]
    count, rest = divmod(source.nbytes, nbytes)
    if rest:
        raise Refusal(f"joins {source.nbytes} bytes of elements of {nbytes}")
    return dtype, count


def _check_sizes(exchange: Exchange, source: BufferUse, target: BufferUse) -> None:
    kind, size = exchange.kind, len(exchange.groups[0])
    wanted = {
        CollectiveKind.ALL_GATHER: source.nbytes * size,
        CollectiveKind.REDUCE_SCATTER: source.nbytes // size,
    }.get(kind, source.nbytes)
    is_split = kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
    if target.nbytes != wanted or (is_split and exchange.count % size):
        raise Refusal(f"makes {target.nbytes} bytes of {source.nbytes} on each of {size} devices")
    is_in_place = kind is CollectiveKind.ALL_REDUCE and source == target
    if source.overlaps(target) and not is_in_place:
        raise Refusal("writes where other devices still read")
