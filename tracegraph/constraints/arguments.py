"""The rules that the arguments of a call can break, leaf by leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import Tracer

from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.leaf_kinds import describe_refusal, is_array
from tracegraph.constraints.violation import Violation


@dataclasses.dataclass(frozen=True)
class ArgumentLeaf:
    """One leaf of the dynamic arguments.

    Attributes:
        path: its place, as ``argument 0 `state['w']```.
        value: what was passed.
        is_donated: True when the caller donates its buffer.
    """

    path: str
    value: Any
    is_donated: bool


_Holders: TypeAlias = dict[tuple[str, int], ArgumentLeaf]


def check_arguments(
    leaves: Sequence[ArgumentLeaf],
    *,
    device: Any,
    takes_static: bool = True,
    takes_spread: bool = False,
    is_cut: bool = False,
) -> tuple[Violation, ...]:
    """Checks the leaves of a call before they reach a graph.

    Args:
        leaves: every leaf that is not static, in order.
        device: where the capture runs, a ``jax.Device``.
        takes_static: True when static leaves are taken; they are not among these.
        takes_spread: True when arrays over several devices are taken. Whether all
            of them agree is `tracegraph/constraints/spread.py`'s question.
        is_cut: True when a graph of GPUs is cut where other processes are needed.

    Returns:
        All violations, leaf by leaf.

    Example:
        >>> check_arguments([ArgumentLeaf("argument 0 `x`", 1.0, False)], device=jax.devices()[0])
        ()
    """
    found = []
    holders: _Holders = {}
    is_spread = takes_spread and any(find_spread_sharding(leaf.value) for leaf in leaves)
    for leaf in leaves:
        violation = _find_leaf_violation(
            leaf, device, takes_static=takes_static, is_spread=is_spread, is_cut=is_cut
        ) or _find_sharing_violation(leaf, holders)
        if violation is not None:
            found.append(violation)
    return tuple(found)


def _find_leaf_violation(
    leaf: ArgumentLeaf, device: Any, *, takes_static: bool, is_spread: bool, is_cut: bool
) -> Violation | None:
    """Checks one leaf by itself: its type, whether it was deleted, and its device."""
    value = leaf.value
    if isinstance(value, Tracer):
        return _make_tracer_violation(leaf)
    if not is_array(value):
        return _make_object_violation(leaf, takes_static=takes_static)
    if isinstance(value, int) and not _fits(value):
        return _make_number_violation(leaf)
    if not isinstance(value, jax.Array):
        return None
    if value.is_deleted():
        return _make_deleted_violation(leaf)
    if not value.is_fully_addressable and not (
        is_spread and is_reachable(value.sharding.device_set, is_cut=is_cut)
    ):
        where = f"{locate_caller()}, {leaf.path}"
        return make_process_violation(leaf.path, where, value.sharding.device_set)
    if is_spread:
        return None
    if len(value.sharding.device_set) > 1 or (value.committed and value.devices() != {device}):
        return _make_device_violation(leaf, device)
    return None


def is_reachable(devices: Iterable[Any], *, is_cut: bool) -> bool:
    """True for devices of this process, or those of several that a capture may have.

    On the host device a program of XLA runs on the devices of all processes, and each process calls
    it. A graph of GPUs is launched by the process that they belong to; between two graphs XLA may
    be called on those of all.

    Args:
        devices: some of them, or all, of this process.
        is_cut: True for a capture that may be cut into several graphs.
    """
    own, owners = jax.process_index(), {device.process_index: device for device in devices}
    is_host = all(device.platform == "cpu" for device in owners.values())
    return own in owners and (len(owners) == 1 or is_host or is_cut)


def find_spread_sharding(value: Any) -> Any:
    """Returns the sharding of an array over several devices, or of its type; None for others.

    Example:
        >>> find_spread_sharding(jax.numpy.zeros(2)) is None
        True
    """
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct) or isinstance(value, Tracer):
        return None
    sharding = value.sharding
    return sharding if sharding is not None and sharding.num_devices > 1 else None


def _find_sharing_violation(
    leaf: ArgumentLeaf, holders: dict[tuple[str, int], ArgumentLeaf]
) -> Violation | None:
    # NumPy arrays and numbers are copied in, so donating them consumes nothing.
    if not isinstance(leaf.value, jax.Array):
        return None
    for key in _identify(leaf.value):
        first = holders.setdefault(key, leaf)
        if first is not leaf and (first.is_donated or leaf.is_donated):
            return _make_sharing_violation(first, leaf)
    return None


def _identify(array: jax.Array) -> list[tuple[str, int]]:
    keys = [("object", id(array))]
    if array.size:
        # The pointer waits, too, but nothing in Python can run then: a callback that the array is
        # still computed by would wait for ever.
        array.block_until_ready()
        is_spread = len(array.devices()) > 1
        pieces = [shard.data for shard in array.addressable_shards] if is_spread else [array]
        keys += [("buffer", piece.unsafe_buffer_pointer()) for piece in pieces if piece.size]
    return keys


def _fits(number: int) -> bool:
    try:
        jax.typeof(number)
    except OverflowError:
        return False
    return True


def _name_kind(value: Any) -> str:
    kind = type(value).__name__
    dtype = getattr(value, "dtype", None)
    return kind if dtype is None else f"{kind} of {dtype}"


def _make_object_violation(leaf: ArgumentLeaf, *, takes_static: bool) -> Violation:
    why, fix = describe_refusal(leaf.value, takes_static=takes_static)
    return Violation(
        "non-array-argument",
        f"{leaf.path} is a {_name_kind(leaf.value)}, not an array",
        f"{locate_caller()}, {leaf.path}",
        why,
        fix,
    )


def _make_number_violation(leaf: ArgumentLeaf) -> Violation:
    return Violation(
        "non-array-argument",
        f"{leaf.path} is {leaf.value}, which JAX's default integer type cannot hold",
        f"{locate_caller()}, {leaf.path}",
        "a Python number is copied into a buffer of JAX's default type",
        _suggest_number(leaf.value),
    )


def _suggest_number(number: int) -> str:
    if 0 <= number < 1 << 32:
        return "pass np.uint32(x)"
    if 0 <= number < 1 << 64 and jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return "pass np.uint64(x)"
    if -1 << 63 <= number < 1 << 63:
        return 'turn on jax.config.update("jax_enable_x64", True), or pass float(x)'
    return "pass float(x)"


def _make_deleted_violation(leaf: ArgumentLeaf) -> Violation:
    return Violation(
        "deleted-argument",
        f"{leaf.path} has been deleted",
        f"{locate_caller()}, {leaf.path}",
        "its buffer was given up: donated to an earlier call, or freed by x.delete()",
        "pass what that call returned in its place; make it anew if x.delete() freed it",
    )


def _make_sharing_violation(first: ArgumentLeaf, second: ArgumentLeaf) -> Violation:
    if first.is_donated and second.is_donated:
        what = f"{second.path} is the same array as {first.path}, and both are donated"
    else:
        donated, kept = (first, second) if first.is_donated else (second, first)
        what = f"{donated.path} is donated, and {kept.path} is the same array"
    return Violation(
        "donated-twice",
        what,
        f"{locate_caller()}, {second.path}",
        "a donated buffer is overwritten by the call; it cannot be another argument as well",
        "pass a copy for one of the two: jnp.array(x, copy=True)",
    )


def _make_device_violation(leaf: ArgumentLeaf, device: Any) -> Violation:
    devices, local = leaf.value.devices(), jax.local_devices()
    indices = [local.index(held) for held in devices if held in local]
    there = (
        f", or call it in `with tg.device({indices[0]}):`"
        if len(devices) == 1 == len(indices)
        else ""
    )
    return Violation(
        "other-device",
        f"{leaf.path} is on another device: wanted {device}, "
        f"got {', '.join(sorted(map(str, devices)))}",
        f"{locate_caller()}, {leaf.path}",
        "a graph's buffers and kernels belong to one device, the current one of the call",
        f"move it first: jax.device_put(x, device){there}",
    )


def make_process_violation(source: str, where: str, devices: Iterable[Any]) -> Violation:
    """Returns the violation of what has devices of several processes, or of another one.

    Args:
        source: what names the devices.
        where: it does.
        devices: that it names.
    """
    processes = {device.process_index for device in devices}
    if jax.process_index() not in processes:
        return Violation(
            "several-processes",
            f"{source} is on the devices of another process",
            where,
            "each process captures, checks and replays what its own devices do",
            "let each process call what has devices of its own: a mesh of all devices, or one of "
            "jax.local_devices()",
        )
    return Violation(
        "several-processes",
        f"{source} is on the devices of {len(processes)} processes",
        where,
        "one graph holds what the GPUs of one process do; what processes exchange is done between "
        "two graphs",
        'tg.capture(..., mode="partial") cuts it there; or leave it to jax.jit',
    )


def _make_tracer_violation(leaf: ArgumentLeaf) -> Violation:
    return Violation(
        "leaked-tracer",
        f"{leaf.path} has no value: it is left over from another trace",
        f"{locate_caller()}, {leaf.path}",
        "what is computed while tracing has no value once the trace has ended, or outside of it",
        "return it from the function that computes it, and pass what that call returns",
    )
