"""A second reader of XLA's compiled programs: `jax.experimental.thunky`, part of JAX since 0.12.

It turns the same bytes into MLIR ops over one argument per allocation: first the parameters, then
the results that update no parameter, then the rest.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

from tracegraph.lowering.device_program import list_device_steps
from tracegraph.lowering.xla.program import AllocationKind, XlaProgram
from tracegraph.lowering.xla.schema import load_schema
from tracegraph.runtime.definition.graph_nodes import DeviceNode
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode, KernelNode, TensorMap

THUNK = "xla.gpu.ThunkProto"
# (argument index or bytes of a constant, offset, size), or with an allocation's name instead.
Range = tuple[Any, int, int]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One step, as either reader sees it.

    Attributes:
        kind: ``kernel``, ``copy``, ``fill``, or the name of an op that is none of these.
        symbol: of a kernel, the function in its image; else empty.
        image: of a kernel, the bytes that the driver loads.
        ranges: byte ranges: a kernel's parameters in order, source and target, or the target.
    """

    kind: str
    symbol: str
    image: bytes = dataclasses.field(repr=False)
    ranges: tuple[Range, ...]

    @property
    def is_idle(self) -> bool:
        """True when it touches no byte, or copies a range onto itself."""
        is_empty = self.kind != "kernel" and not any(size for _, _, size in self.ranges)
        return is_empty or (self.kind == "copy" and len(set(self.ranges)) == 1)


def read_operations(serialized: bytes) -> tuple[Operation, ...]:
    """Returns the steps that JAX's own reader finds; its ranges name argument indices."""
    # Private, for the public module has no reader of executables; imported here, for JAX before
    # 0.12 has neither.
    thunky = importlib.import_module("jax._src.thunky.thunky")
    reader = importlib.import_module("jaxlib.mlir._mlir_libs._thunky_ext")
    module = reader.jax_executable_to_mlir(serialized, thunky.make_ir_context())
    block = module.body.operations[0].regions[0].blocks[0]
    values: dict[Any, Range] = {
        argument: (index, 0, _read_size(argument)) for index, argument in enumerate(block.arguments)
    }
    found = []
    for item in block.operations:
        operation = item.operation
        if operation.name == "thunky.constant":
            content = _read_bytes(operation, "value")
            values[operation.results[0]] = (content, 0, len(content))
        elif operation.name == "thunky.slice_buffer":
            base, start, _ = values[operation.operands[0]]
            start += int(operation.attributes["offset"])
            values[operation.results[0]] = (base, start, _read_size(operation.results[0]))
        elif operation.name != "func.return":
            found.append(_read_operation(operation, [values[v] for v in operation.operands]))
    return tuple(operation for operation in found if not operation.is_idle)


def _read_operation(operation: Any, operands: list[Range]) -> Operation:
    if operation.name == "thunky.copy":
        return Operation("copy", "", b"", tuple(operands))
    if operation.name in ("thunky.memzero", "thunky.memset32"):
        return Operation("fill", "", b"", tuple(operands))
    if operation.name != "thunky.call_thunk_proto":
        return Operation(operation.name, "", b"", tuple(operands))
    thunk: Any = load_schema().message_class(THUNK)()
    thunk.ParseFromString(_read_bytes(operation, "thunk_proto"))
    kind = thunk.WhichOneof("impl")
    if kind != "custom_kernel_thunk":
        return Operation(kind, "", b"", tuple(operands))
    kernel = thunk.custom_kernel_thunk
    spec = kernel.custom_kernel.kernel_spec
    slices = [argument.slice for argument in kernel.args]
    ranges = tuple(
        _shift(operands[piece.buffer_allocation_index], piece.offset, piece.size)
        for piece in slices
    )
    return Operation("kernel", spec.kernel_name, spec.cubin.data, ranges)


def _shift(base: Range, offset: int, size: int) -> Range:
    return base[0], base[1] + offset, size


def _read_bytes(operation: Any, name: str) -> bytes:
    return operation.attributes[name].value_bytes


def _read_size(value: Any) -> int:
    """Returns the bytes of ``!thunky.buffer<20>``."""
    return int(str(value.type).partition("<")[2].rstrip(">"))


def list_operations(program: XlaProgram) -> tuple[Operation, ...]:
    """Returns the steps of our own reader in the same form; its ranges name allocations."""
    found = (_convert(step.node) for step in list_device_steps(program.steps))
    return tuple(operation for operation in found if not operation.is_idle)


def _convert(node: DeviceNode) -> Operation:
    if isinstance(node, KernelNode):
        uses = [p.use if isinstance(p, TensorMap) else p for p in node.parameters]
        ranges = tuple(_as_range(use) for use in uses if isinstance(use, BufferUse))
        return Operation("kernel", node.code.symbol, node.code.cubin, ranges)
    if isinstance(node, CopyNode):
        return Operation("copy", "", b"", (_as_range(node.source), _as_range(node.target)))
    if isinstance(node, FillNode):
        return Operation("fill", "", b"", (_as_range(node.target),))
    return Operation(node.kind, "", b"", tuple(_as_range(use) for use in node.ranges))


def _as_range(use: BufferUse) -> Range:
    return use.buffer, use.offset, use.nbytes


def find_differences(program: XlaProgram, theirs: Sequence[Operation]) -> list[str]:
    """Returns what the two readers see differently; empty when they agree.

    Compared are the number, order and kind of the steps, kernels with their code, every byte range,
    and that parameters, results and constants are the same ones.
    """
    ours = list_operations(program)
    if len(ours) != len(theirs):
        return [f"{len(ours)} steps against {len(theirs)}"]
    names = _name_arguments(program)
    contents = {a.name: a.content for a in program.allocations if a.content is not None}
    found = []
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if (mine.kind, mine.symbol, mine.image) != (other.kind, other.symbol, other.image):
            found.append(f"step {index}: {mine.kind} {mine.symbol} against {other}")
            continue
        if len(mine.ranges) != len(other.ranges):
            found.append(f"step {index}: {mine} against {other}")
            continue
        for left, right in zip(mine.ranges, other.ranges, strict=True):
            if left[1:] != right[1:] or not _is_same_base(left[0], right[0], names, contents):
                found.append(f"step {index} {mine.symbol}: {left} against {right}")
    if len(set(names.values())) != len(names):
        found.append(f"two arguments are one allocation: {names}")
    return found


def _name_arguments(program: XlaProgram) -> dict[int, str]:
    """Returns the allocation of each argument that is a parameter or a result."""
    parameters = {
        a.parameter: a.name for a in program.allocations if a.kind is AllocationKind.PARAMETER
    }
    names = {index: parameters[index] for index in range(len(parameters))}
    held = set(parameters.values())
    results = [name for name in dict.fromkeys(program.outputs) if name not in held]
    return names | {len(names) + index: name for index, name in enumerate(results)}


def _is_same_base(
    ours: str, theirs: Any, names: dict[int, str], contents: dict[str, bytes]
) -> bool:
    """True when both mean one allocation; one that is met for the first time gets its name here."""
    if isinstance(theirs, bytes):
        return contents.get(ours) == theirs
    return names.setdefault(theirs, ours) == ours
