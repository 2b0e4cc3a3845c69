"""Kernel thunks: from XLA's description of a launch to a KernelNode, with what it reads and writes.

Note [Overwritten arguments]
XLA says which arguments a kernel writes, not which of them it also reads. Read and written is
always right, but it makes the step depend on the one that wrote those bytes before. An argument
counts as only written when that is proven:

* the instruction that the kernel computes is in the entry computation,
* the kernel has one argument for each operand (equal ones may share one), and after them one for
  each result. All of the results are written; an operand is written only where it has the bytes of
  a result, which the kernel then updates in place,
* the argument is one of those results, its bytes are none of an operand's, and no earlier step of
  the instruction has written any of them. A sort first copies its operand to its result and then
  sorts there, in one kernel or in several; a sum over blocks adds to zeros. To their kernels the
  result is no operand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tracegraph.lowering.device_program import DeviceStep, GraphStep
from tracegraph.lowering.element_loops import ELEMENT_BYTES, ElementLoop
from tracegraph.lowering.xla.enums import read_value
from tracegraph.lowering.xla.loop_fusions import read_loop_fusion
from tracegraph.lowering.xla.machine_code import waits_first
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.scope import Launch, Scope
from tracegraph.runtime.definition.launch_limits import find_shape_problem, find_tile_problem
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    FillNode,
    KernelNode,
    KernelParameter,
    LaunchShape,
    Swizzle,
    TensorMap,
)

# Enum values by name: numbers are not promised to stay.
_INTERLEAVES = {"INTERLEAVE_NONE": 0, "INTERLEAVE_BYTES16": 1, "INTERLEAVE_BYTES32": 2}
_SWIZZLES = {
    "SWIZZLE_NONE": Swizzle.NONE,
    "SWIZZLE_BYTES32": Swizzle.BYTES_32,
    "SWIZZLE_BYTES64": Swizzle.BYTES_64,
    "SWIZZLE_BYTES128": Swizzle.BYTES_128,
}
_L2_PROMOTIONS = {
    "L2_PROMOTION_NONE": 0,
    "L2_PROMOTION_BYTES64": 1,
    "L2_PROMOTION_BYTES128": 2,
    "L2_PROMOTION_BYTES256": 3,
}
_FILLS_NAN = {"FLOAT_OOB_FILL_NONE": False, "FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA": True}
_RELOCATIONS = {"KIND_BITS64_ABSOLUTE": 8}


def decode_custom_kernel(thunk: Any, name: str, scope: Scope) -> list[DeviceStep]:
    """Returns the steps of a ``CustomKernelThunkProto``: memsets of zeroed outputs, a kernel.

    Raises:
        Refusal: it has neither cubin nor PTX, or its description does not hold together.
    """
    uses = [scope.find_shaped_use(piece) for piece in thunk.args]
    # Layers repeat kernels, so most descriptions have been read before; equal bytes are equal.
    key = (thunk.custom_kernel.SerializeToString(), len(uses))
    launch = scope.launches.get(key)
    if launch is None:
        launch = scope.launches[key] = _read_launch(thunk.custom_kernel, len(uses), scope)
    return _make_steps(thunk, name, scope, uses, launch)


def decode_kernel(thunk: Any, name: str, scope: Scope) -> list[DeviceStep]:
    """Returns the steps of a ``KernelThunkProto``, whose code is the program's own image.

    Raises:
        Refusal: the program has no such image, or the description does not hold together.
    """
    uses = [scope.find_use(piece) for piece in thunk.args]
    dimensions = thunk.launch_dimensions
    blocks, threads = dimensions.block_counts, dimensions.thread_counts_per_block
    shape = _read_shape(blocks, threads, thunk, thunk.shmem_bytes)
    code = scope.intern_code(thunk.kernel_name, scope.binary)
    launch = Launch(code, shape, tuple(range(len(uses))), waits_first(code))
    return _make_steps(thunk, name, scope, uses, launch)


def _read_launch(kernel: Any, count: int, scope: Scope) -> Launch:
    shape = _read_shape(kernel.block_dims, kernel.thread_dims, kernel, kernel.shared_memory_bytes)
    spec = kernel.kernel_spec
    code = scope.intern_code(spec.kernel_name, _read_image(spec))
    return Launch(code, shape, _read_packing(spec, count), waits_first(code))


def _read_image(spec: Any) -> bytes:
    """Returns a cubin, or the PTX of a kernel that a user wrote: the driver takes both."""
    if not spec.HasField("ptx"):
        return spec.cubin.data
    text = spec.ptx.data.encode().rstrip(b"\0")
    # The driver reads PTX up to a NUL.
    return text and text + b"\0"


def _make_steps(
    thunk: Any,
    name: str,
    scope: Scope,
    uses: Sequence[BufferUse],
    launch: Launch,
) -> list[DeviceStep]:
    """Returns the memsets of zeroed outputs, then the kernel."""
    numbers, written = launch.parameters, list(thunk.written)
    if len(written) != len(uses):
        raise Refusal(f"has {len(uses)} arguments and says of {len(written)} whether it writes")
    zeroed = _read_zeroed(thunk.zeroed_output_buffer_indices, written)
    maps = _read_tensor_maps(thunk.tma_metadata.arg_index_to_tma_info, uses)
    overwritten = find_overwritten(scope.instructions.get(name), uses, written)
    node = KernelNode(
        name,
        launch.code,
        launch.shape,
        tuple(
            [each if isinstance(each, bytes) else maps.get(each, uses[each]) for each in numbers]
        ),
        tuple([not isinstance(each, bytes) and written[each] for each in numbers]),
        thunk.use_pdl and launch.waits_first,
    )
    passed = [each for each in numbers if not isinstance(each, bytes)]
    fills = [make_fill(name, uses[each]) for each in sorted(zeroed) if uses[each].nbytes]
    kernel = DeviceStep(
        node,
        reads=_collect([uses[each] for each in passed if each not in overwritten]),
        writes=_collect([uses[each] for each in passed if written[each]]),
    )
    loop = _find_loop(name, uses, scope) if scope.reads_loops and not fills else None
    return [*fills, kernel if loop is None else dataclasses.replace(kernel, loop=loop)]


def _find_loop(name: str, uses: Sequence[BufferUse], scope: Scope) -> ElementLoop | None:
    """Returns what a kernel computes for each element, where its arguments are those of that."""
    loop = read_loop_fusion(scope.instructions.get(name), scope.computations)
    if loop is None:
        return None
    function = loop.function
    sizes = [
        ELEMENT_BYTES[operand.kind] * (1 if operand.is_single else loop.count)
        for operand in function.operands
    ]
    results = [function.find_kind(result) for result in function.results]
    sizes += [ELEMENT_BYTES[kind] * loop.count for kind in results]
    given = [uses[place].nbytes for place in loop.arguments if place < len(uses)]
    return loop if sizes == given and len(given) == len(uses) else None


def make_fill(name: str, target: BufferUse, value: int = 0, element_bytes: int = 0) -> DeviceStep:
    """Returns the memset of a byte range; zeros in elements of four bytes where they fit."""
    if not element_bytes:
        element_bytes = 1 if target.offset % 4 or target.nbytes % 4 else 4
    return DeviceStep(FillNode(name, target, value, element_bytes), reads=(), writes=(target,))


def find_overwritten(
    instruction: Any, uses: Sequence[BufferUse], written: Sequence[bool]
) -> frozenset[int]:
    """Returns the arguments that a kernel is proven to only write.

    See Note [Overwritten arguments].

    Args:
        instruction: what it computes, or None where that is not known.
        uses: the bytes of each argument.
        written: for each argument whether the kernel writes it.
    """
    if instruction is None:
        return frozenset()
    results = instruction.shape.tuple_shapes
    operand_ids = instruction.operand_ids
    operand_count = len(uses) - (len(results) or 1)
    if operand_count not in (len(operand_ids), len(set(operand_ids))):
        return frozenset()
    operands, outputs = uses[:operand_count], uses[operand_count:]
    updated = {use for use, is_written in zip(operands, written, strict=False) if is_written}
    is_nested = any(result.tuple_shapes for result in results)
    if is_nested or not all(written[operand_count:]) or not updated.issubset(outputs):
        return frozenset()
    return frozenset(
        operand_count + index
        for index, output in enumerate(outputs)
        if not any(map(output.overlaps, operands))
    )


def read_begun(
    steps: Iterable[GraphStep], begun: dict[str, list[BufferUse]]
) -> Iterator[GraphStep]:
    """Yields the steps; a kernel reads too what earlier steps of its instruction have written.

    See Note [Overwritten arguments].

    Args:
        steps: of a sequence, in order.
        begun: what the steps before have written, by name; grows.
    """
    for step in steps:
        earlier = begun.setdefault(step.name, [])
        if isinstance(step, DeviceStep) and isinstance(step.node, KernelNode) and earlier:
            continued = [use for use in step.writes if any(map(use.overlaps, earlier))]
            step = dataclasses.replace(step, reads=_collect([*step.reads, *continued]))
        earlier += step.writes
        yield step


def _collect(uses: Sequence[BufferUse]) -> tuple[BufferUse, ...]:
    """Returns each range once; empty ones matter for neither order nor memory."""
    return tuple(dict.fromkeys([use for use in uses if use.nbytes]))


def _read_shape(blocks: Any, threads: Any, message: Any, shared_bytes: int) -> LaunchShape:
    cluster = (1, 1, 1)
    if message.HasField("cluster_dim"):
        cluster = _read_dimensions(message.cluster_dim)
    shape = LaunchShape(_read_dimensions(blocks), _read_dimensions(threads), cluster, shared_bytes)
    if problem := find_shape_problem(shape):
        raise Refusal(problem)
    return shape


def _read_dimensions(message: Any) -> tuple[int, int, int]:
    coordinates = message.coordinates
    return coordinates.x, coordinates.y, coordinates.z


def _read_packing(spec: Any, count: int) -> tuple[int | bytes, ...]:
    """Returns for each kernel parameter the number of its argument, or its bytes."""
    if not spec.HasField("kernel_args_packing_spec"):
        return tuple(range(count))
    parameters = tuple(
        _read_parameter(entry, count) for entry in spec.kernel_args_packing_spec.kernel_arguments
    )
    if len(parameters) != spec.arity:
        raise Refusal(f"packs {len(parameters)} parameters for a kernel that takes {spec.arity}")
    return parameters


def _read_parameter(entry: Any, count: int) -> int | bytes:
    if not entry.relocations:
        if not entry.data:
            raise Refusal("has a parameter without an argument and without bytes")
        return entry.data
    relocation = entry.relocations[0]
    width = read_value(relocation, "kind", _RELOCATIONS)
    if len(entry.relocations) > 1 or len(entry.data) not in (0, width):
        raise Refusal("has a parameter that mixes addresses and bytes")
    if not 0 <= relocation.argument_index < count:
        raise Refusal(f"passes argument {relocation.argument_index} of {count}")
    return relocation.argument_index


def _read_zeroed(indices: Sequence[int], written: Sequence[bool]) -> frozenset[int]:
    for index in indices:
        if not 0 <= index < len(written) or not written[index]:
            raise Refusal(f"zeroes argument {index}, which is no output")
    return frozenset(indices)


def _read_tensor_maps(entries: Any, uses: Sequence[BufferUse]) -> dict[int, KernelParameter]:
    maps: dict[int, KernelParameter] = {}
    for index, entry in entries.items():
        if not 0 <= index < len(uses):
            raise Refusal(f"describes a tile of argument {index} of {len(uses)}")
        maps[index] = _read_tensor_map(entry, uses[index])
    return maps


def _read_tensor_map(entry: Any, use: BufferUse) -> TensorMap:
    tiles = TensorMap(
        use,
        entry.element_size,
        tuple(entry.global_dims),
        tuple(entry.global_strides),
        tuple(entry.box_dims),
        tuple(entry.element_strides),
        read_value(entry, "interleave", _INTERLEAVES),
        read_value(entry, "swizzle", _SWIZZLES),
        read_value(entry, "l2_promotion", _L2_PROMOTIONS),
        read_value(entry, "float_oob_fill", _FILLS_NAN),
    )
    if problem := find_tile_problem(tiles):
        raise Refusal(problem)
    return tiles
