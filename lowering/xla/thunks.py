"""Thunk sequences: the steps of each thunk in XLA's serial order, by a table of kinds.

A kind that is not in the table is refused. All refusals of a program are collected, so that one
error names them all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from tracegraph.lowering.device_program import DeviceStep, GraphStep
from tracegraph.lowering.xla.allow_list import check_listed
from tracegraph.lowering.xla.collectives import (
    decode_all_gather,
    decode_all_reduce,
    decode_all_to_all,
    decode_partition,
    decode_permute,
    decode_reduce_scatter,
    decode_replica,
)
from tracegraph.lowering.xla.control_flow import (
    decode_conditional,
    decode_while,
)
from tracegraph.lowering.xla.convolution import decode_convolution
from tracegraph.lowering.xla.cudnn_graph import decode_cudnn_graph
from tracegraph.lowering.xla.ffi_call import decode_ffi_call
from tracegraph.lowering.xla.fft import decode_fft
from tracegraph.lowering.xla.kernels import (
    decode_custom_kernel,
    decode_kernel,
    make_fill,
    read_begun,
)
from tracegraph.lowering.xla.matmul import decode_matmul
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.scope import DecodeSequence, Scope
from tracegraph.lowering.xla.slice_fusion import decode_slice_fusion
from tracegraph.lowering.xla.triangular_solve import decode_triangular_solve
from tracegraph.runtime.definition.library_nodes import CudnnNode, MatmulNode
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode


@dataclasses.dataclass(frozen=True)
class RefusedThunk:
    """A thunk that is not lowered.

    Attributes:
        kind: XLA's word for it, as ``custom_call``.
        name: of the instruction that it computes.
        reason: reads on after ``it``; empty where the kind itself is the reason.
    """

    kind: str
    name: str
    reason: str


Decoder: TypeAlias = Callable[[Any, str, Scope], list[DeviceStep]]
Opener: TypeAlias = Callable[[Any, str, Scope, DecodeSequence], list[GraphStep]]


def decode_sequence(
    thunks: Iterable[Any],
    scope: Scope,
    refused: list[RefusedThunk],
    known: dict[int, list[GraphStep]] | None = None,
) -> list[GraphStep]:
    """Returns the steps of a thunk sequence, and adds those that are not lowered to a list.

    Args:
        thunks: ``ThunkProto`` messages in serial order.
        scope: what they refer to.
        refused: grows by the thunks that are not lowered, those inside of others included.
        known: by place the steps of thunks that are the same in all iterations of a loop; grows by
            those that are met for the first time.
    """
    steps: list[GraphStep] = []
    begun: dict[str, list[BufferUse]] = {}
    for place, thunk in enumerate(thunks):
        if known is not None and place in known:
            steps += known[place]
            for step in known[place]:
                begun.setdefault(step.name, []).extend(step.writes)
            continue
        kind = read_kind(thunk)
        name = thunk.thunk_info.profile_annotation or f"thunk {thunk.thunk_info.thunk_id}"
        try:
            found = _decode_thunk(thunk, kind, name, scope, refused)
            # The instructions inside of an opener are other ones, as often as they run.
            found = [*(found if kind in _OPENERS else read_begun(found, begun))]
            if known is not None and kind in _SAME_IN_ALL_ITERATIONS:
                known[place] = found
            steps += found
        except Refusal as refusal:
            refused.append(RefusedThunk(kind, name, str(refusal)))
    return steps


def read_kind(thunk: Any) -> str:
    """Returns XLA's word for a thunk's kind, as ``custom_kernel``."""
    field = thunk.WhichOneof("impl")
    return "unknown" if field is None else field.removesuffix("_thunk")


def _decode_thunk(
    thunk: Any, kind: str, name: str, scope: Scope, refused: list[RefusedThunk]
) -> Sequence[GraphStep]:
    """Returns the steps of one thunk; a `Refusal` says why there are none."""
    if kind not in _KNOWN:
        raise Refusal(_REFUSED.get(kind, ""))
    message = getattr(thunk, thunk.WhichOneof("impl"))
    if not scope.is_checked:
        check_listed(thunk.thunk_info)
        check_listed(message)
    if kind == "async_done":
        # What follows waits for the bytes that it reads, whichever step wrote them.
        return []
    if kind in _DECODERS:
        return _DECODERS[kind](message, name, scope)
    if kind in _OPENERS:
        inside: list[RefusedThunk] = []
        decode = functools.partial(decode_sequence, refused=inside)
        steps = _OPENERS[kind](message, name, scope, decode)
        # What is refused in the body of a loop is met in each iteration.
        refused += dict.fromkeys(inside)
        return steps
    nested, inner = _NESTED[kind](message, scope)
    return decode_sequence(nested, inner, refused)


def _decode_copy(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    source = scope.find_shaped_use(message.source_buffer)
    target = scope.find_shaped_use(message.destination_buffer)
    size = message.mem_size
    if not 0 <= size <= min(source.nbytes, target.nbytes):
        raise Refusal(f"copies {size} bytes of {source.nbytes} to {target.nbytes}")
    source = BufferUse(source.buffer, source.offset, size)
    target = BufferUse(target.buffer, target.offset, size)
    if not size or source == target:
        return []
    if source.overlaps(target):
        raise Refusal("copies bytes to a place that overlaps theirs")
    return [DeviceStep(CopyNode(name, source, target), reads=(source,), writes=(target,))]


def _decode_wrapped_copy(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    return _decode_copy(message.copy_thunk, name, scope)


def _decode_memzero(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    target = scope.find_shaped_use(message.dest_buffer)
    return [make_fill(name, target)] if target.nbytes else []


def _decode_memset(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    target = scope.find_use(message.dest_buffer)
    if target.nbytes % 4 or target.offset % 4:
        raise Refusal(f"sets {target.nbytes} bytes at {target.offset} to a value of four")
    return [make_fill(name, target, message.value, 4)] if target.nbytes else []


def _decode_matmul(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    node = decode_matmul(message, name, scope.find_shaped_use)
    written = [use for role, use in node.operands if role in MatmulNode.WRITTEN]
    # `d_amax` may keep the greatest value from before.
    overwritten = set(MatmulNode.WRITTEN) - {"d_amax"}
    read = [use for role, use in node.operands if role not in overwritten]
    return [DeviceStep(node, tuple(dict.fromkeys(read)), tuple(dict.fromkeys(written)))]


def _decode_ffi_call(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    node = decode_ffi_call(message, name, scope.find_shaped_use, scope.check_call)
    read, written = (
        tuple(dict.fromkeys(use for use in uses if use is not None))
        for uses in (node.operands, node.outputs)
    )
    return [DeviceStep(node, read, written)]


def _decode_convolution(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    instruction = scope.instructions.get(name)
    precision = () if instruction is None else instruction.precision_config.operand_precision
    scratch = scope.find_use(message.scratch_buffer)
    node = decode_convolution(message, name, scope.find_shaped_use, precision, scratch)
    # A side input whose factor is 0 has the place of the result, and is not read.
    read = [scope.find_shaped_use(operand) for operand in message.operand_buffers]
    return [_make_cudnn_step(node, read, scope)]


def _decode_cudnn_graph(message: Any, name: str, scope: Scope) -> list[DeviceStep]:
    serialized = scope.cudnn_graphs.get(message.fingerprint, b"")
    node, zeroed = decode_cudnn_graph(message, name, scope.find_shaped_use, serialized)
    # What is zero before the call, the call may add to.
    read = [*[use for uid, use in node.operands if uid not in node.written], *zeroed]
    return [*[make_fill(name, use) for use in zeroed], _make_cudnn_step(node, read, scope)]


def _make_cudnn_step(node: CudnnNode, read: Iterable[BufferUse], scope: Scope) -> DeviceStep:
    problem = scope.check_call(node.call) if scope.check_call is not None else ""
    if problem:
        raise Refusal(problem)
    return DeviceStep(node, tuple(dict.fromkeys(read)), tuple(dict.fromkeys(node.written_ranges)))


def _open_sequence(message: Any, scope: Scope) -> tuple[Iterable[Any], Scope]:
    return message.thunks, scope


def _open_async(message: Any, scope: Scope) -> tuple[Iterable[Any], Scope]:
    return message.thunks.thunks, scope


_DECODERS: Mapping[str, Decoder] = {
    "custom_kernel": decode_custom_kernel,
    "kernel": decode_kernel,
    "cublas_lt_matmul": _decode_matmul,
    "convolution": _decode_convolution,
    "cudnn": _decode_cudnn_graph,
    "custom_call": _decode_ffi_call,
    "fft": decode_fft,
    "triangular_solve": decode_triangular_solve,
    "device_to_device_copy": _decode_wrapped_copy,
    "device_to_host_copy": _decode_wrapped_copy,
    "host_to_device_copy": _decode_wrapped_copy,
    "copy": _decode_copy,
    "memzero": _decode_memzero,
    "memset32bit_value": _decode_memset,
    "replica_id": decode_replica,
    "partition_id": decode_partition,
    "all_reduce": decode_all_reduce,
    "all_gather": decode_all_gather,
    "reduce_scatter": decode_reduce_scatter,
    "all_to_all": decode_all_to_all,
    "collective_permute": decode_permute,
}

# What these do depends on no iteration of a loop, and they take no memory that is theirs alone.
_SAME_IN_ALL_ITERATIONS = frozenset(
    [
        *("custom_kernel", "kernel", "cublas_lt_matmul", "convolution", "cudnn"),
        *("device_to_device_copy", "device_to_host_copy", "host_to_device_copy", "copy"),
        *("memzero", "memset32bit_value"),
    ]
)

# Why kinds are refused that say it not by their names. `PLAIN_KERNELS` of `compile_gpu.py` knows
# some of the words.
_REFUSED: Mapping[str, str] = {
    "gemm": "calls cuBLAS as XLA did before it went over to cublasLt",
    "norm": "calls a layer norm of cuDNN, whose graph XLA builds anew in each process",
    "rng_seed": "takes a new seed from the host at each run, and a replay has only its arguments",
    "select_k": "launches kernels of RAFT, which are inside of XLA",
}

# Kinds that consist of the thunks inside them.
_NESTED: Mapping[str, Callable[[Any, Scope], tuple[Iterable[Any], Scope]]] = {
    "sequential": _open_sequence,
    "async_start": _open_async,
}

# Kinds that decide how often, and at which addresses, the thunks inside them run.
_OPENERS: Mapping[str, Opener] = {
    "while": decode_while,
    "conditional": decode_conditional,
    "dynamic_slice_fusion": decode_slice_fusion,
}

_KNOWN = frozenset([*_DECODERS, *_NESTED, *_OPENERS, "async_done"])
