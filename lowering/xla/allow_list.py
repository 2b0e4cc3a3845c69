"""The fields of XLA's messages that are interpreted. A set field that is not here is refused.

XLA adds fields between versions, and a field that is set has a meaning. So each message that a
decoder reads is listed with the fields that it reads and those that it may pass over, each of these
with the reason. Nothing else may be set: an addition upstream ends in a refusal, not in a guess.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.schema import COMPUTATION

if TYPE_CHECKING:
    from google.protobuf.message import Message


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of one message that may be set.

    Attributes:
        read: interpreted; the installed schema must have each.
        newer: interpreted where the installed schema has them.
        ignored: passed over, with the reason.
    """

    read: frozenset[str]
    newer: frozenset[str] = frozenset()
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)


class _Verdict(enum.Enum):
    PASS = enum.auto()
    REFUSE = enum.auto()
    LOOK_INTO = enum.auto()


def _fields(read: str, *, newer: str = "", **ignored: str) -> Fields:
    return Fields(frozenset(read.split()), frozenset(newer.split()), ignored)


_SERIAL = "steps are in serial order; what may overlap follows from byte ranges"
_LABEL = "a label for people"
_SHAPE = "addresses and byte counts are all that a step needs"
_MOVED = "how XLA moves the bytes"
_OTHER = "of another thunk kind, which refuses by itself"

ALLOWED: dict[str, Fields] = {
    # The executable and its allocations.
    "xla.gpu.GpuExecutableProto": _fields(
        "hlo_module_with_config binary module_name program_shape buffer_allocations"
        " output_info_map constants thunks dnn_compiled_graphs",
        buffer_assignment="how the allocations came about",
        asm_text="the source of `binary`, or of kernels that have none and are refused",
        gpu_compute_capability="the driver refuses kernels of another capability",
        executable_abi_version="which libraries XLA itself links",
        cpu_target_machine_options="for work on the host, " + _OTHER,
        buffer_allocations_debug_summary=_LABEL,
        gpu_topology="the counts of replicas and partitions are checked instead",
    ),
    "xla.gpu.GpuExecutableProto.RepeatedBufferAllocations": _fields("values"),
    "xla.BufferAllocationProto": _fields(
        "index size is_thread_local is_entry_computation_parameter parameter_number color"
        " parameter_shape_index is_constant",
        maybe_live_out="the output map says which results there are",
        assigned="which values share the allocation: byte ranges say so",
        is_tuple="tables of addresses, which no kernel reads",
        is_parameter_aliased_with_output="the output map says which",
    ),
    "xla.gpu.GpuExecutableProto.OutputInfoMapEntry": _fields("shape_index output_info"),
    "xla.ShapeIndexProto": _fields("indexes"),
    "xla.gpu.GpuExecutableProto.OutputInfoProto": _fields(
        "allocation_index alias_config",
        passthrough="then the allocation is the parameter's own",
    ),
    "xla.HloInputOutputAliasProto.AliasEntryProto": _fields(
        "parameter_number parameter_shape_index",
        output_shape_index="is given with the entry",
        kind="whether it must or may: JAX's donation is always given",
    ),
    "xla.gpu.GpuExecutableProto.ConstantInfoProto": _fields("symbol_name content allocation_index"),
    "xla.gpu.DenseDataIntermediateProto": _fields("data"),
    "xla.ProgramShapeProto": _fields("parameters result", parameter_names=_LABEL),
    "xla.ShapeProto": _fields("element_type dimensions is_dynamic_dimension tuple_shapes layout"),
    "xla.LayoutProto": _fields(
        "minor_to_major element_size_in_bits tail_padding_alignment_in_elements"
    ),
    # Literals; a field for each element type.
    "xla.LiteralProto": _fields(
        "shape preds s8s s16s s32s s64s u8s u16s u32s u64s f16s bf16s f32s f64s c64s c128s s4s u4s",
        newer="s1s s2s u1s u2s f4e2m1fns f6e2m3fns f6e3m2fns f8e3m4s f8e4m3b11fnuzs f8e4m3fns"
        " f8e4m3fnuzs f8e4m3s f8e5m2fnuzs f8e5m2s f8e8m0fnus",
    ),
    # What every thunk has. Its kinds are looked up in `thunks.py`.
    "xla.gpu.ThunkInfoProto": _fields(
        "profile_annotation",
        thunk_id=_LABEL,
        concurrent_region_id=_SERIAL,
    ),
    "xla.gpu.ThunkSequenceProto": _fields("thunks"),
    "xla.ShapedSliceProto": _fields("slice", shape=_SHAPE),
    "xla.buffer_assignment.BufferAllocationSliceProto": _fields(
        "offset size buffer_allocation_index", element_type=_SHAPE
    ),
    # Kernels.
    "xla.gpu.CustomKernelThunkProto": _fields(
        "args written custom_kernel use_pdl zeroed_output_buffer_indices tma_metadata"
    ),
    "xla.gpu.CustomKernelProto": _fields(
        "kernel_spec block_dims thread_dims cluster_dim shared_memory_bytes", name=_LABEL
    ),
    "stream_executor.KernelLoaderSpecProto": _fields(
        "cubin ptx arity kernel_name kernel_args_packing_spec"
    ),
    "stream_executor.CudaCubinProto": _fields("data"),
    "stream_executor.CudaPtxProto": _fields("data"),
    "stream_executor.KernelArgsPackingSpecProto": _fields("kernel_arguments"),
    "stream_executor.KernelArgPackingSpecProto": _fields("relocations data"),
    "stream_executor.KernelArgPackingRelocationProto": _fields("kind argument_index"),
    "stream_executor.BlockDimProto": _fields("coordinates"),
    "stream_executor.ThreadDimProto": _fields("coordinates"),
    "stream_executor.ClusterDimProto": _fields("coordinates"),
    "stream_executor.Dim3DProto": _fields("x y z"),
    "stream_executor.gpu.TmaMetadataProto": _fields("arg_index_to_tma_info"),
    "stream_executor.gpu.TmaDescriptorProto": _fields(
        "element_size global_dims global_strides box_dims element_strides interleave swizzle"
        " l2_promotion float_oob_fill"
    ),
    "xla.gpu.KernelThunkProto": _fields(
        "args written kernel_name launch_dimensions cluster_dim shmem_bytes tma_metadata"
        " zeroed_output_buffer_indices use_pdl",
        args_shape=_SHAPE,
    ),
    "xla.gpu.LaunchDimensionsProto": _fields("block_counts thread_counts_per_block"),
    # Matmuls.
    "xla.gpu.CublasLtMatmulThunkProto": _fields(
        "gemm_config epilogue algorithm_idx autotune_workspace_size"
        " a b c d bias aux a_scale b_scale c_scale d_scale d_amax workspace",
        canonical_hlo="the key under which XLA keeps what it measured",
    ),
    "xla.GemmConfigProto": _fields(
        "lhs_layout rhs_layout c_layout output_layout alpha_real alpha_imag beta"
        " compute_precision precision_algorithm compute_type scale_mode",
        algorithm="XLA takes the algorithm from `algorithm_idx`",
        grad_x="does not reach cublasLt",
        grad_y="does not reach cublasLt",
    ),
    "xla.GemmConfigProto.MatrixLayout": _fields(
        "order num_rows num_cols batch_size leading_dim_stride batch_stride transpose dtype"
    ),
    # Fourier transforms and triangular solves.
    "xla.gpu.FftThunkProto": _fields(
        "fft_type fft_length input_buffer output_buffer input_shape output_shape"
    ),
    "xla.gpu.TriangularSolveThunkProto": _fields(
        "options a_buffer b_buffer",
        temp_buffer="holds addresses, which are written once elsewhere",
    ),
    "xla.TriangularSolveOptions": _fields("left_side lower unit_diagonal transpose_a"),
    # Calls of cuDNN.
    "xla.gpu.CudnnThunkProto": _fields(
        "fingerprint args output_args sdpa_dropout_seed", newer="should_memzero"
    ),
    "xla.gpu.ConvolutionThunkProto": _fields(
        "conv_descriptor operand_buffers result_buffers scratch_buffer"
    ),
    "xla.gpu.GpuConvDescriptorProto": _fields(
        "kind backend_config operand0_shape operand1_shape result_shape window dnums",
        scratch_size="the scratch buffer has that size",
        feature_group_count="follows from the features of input and filter",
    ),
    "xla.gpu.CudnnConvBackendConfig": _fields(
        "activation_mode conv_result_scale side_input_scale algorithm reordered_int8_nchw_vect"
        " leakyrelu_alpha serialized_graph"
    ),
    "stream_executor.dnn.AlgorithmProto": _fields(
        "algo_id tuning_knobs is_cudnn_frontend",
        math_type="the engine and its knobs say it",
        workspace_size="the scratch buffer has that size",
    ),
    "xla.Window": _fields("dimensions"),
    "xla.WindowDimension": _fields(
        "stride padding_low padding_high window_dilation base_dilation window_reversal",
        size="the filter's shape says it",
    ),
    "xla.ConvolutionDimensionNumbers": _fields(
        "kernel_input_feature_dimension kernel_output_feature_dimension kernel_spatial_dimensions"
        " input_batch_dimension input_feature_dimension output_batch_dimension"
        " output_feature_dimension input_spatial_dimensions output_spatial_dimensions"
    ),
    # Calls of `jax.ffi`.
    "xla.gpu.CustomCallThunkProto": _fields(
        "target_name operands results opaque api_version attributes called_computation",
        execution_state="made again from the attributes",
        use_pdl="for commands that a handler records itself",
    ),
    "xla.NullableShapedSliceProto": _fields("shaped_slice"),
    "xla.ffi.AttributesMapProto": _fields("attrs"),
    "xla.ffi.AttributeProto": _fields("scalar array str dict"),
    "xla.ffi.ScalarProto": _fields("b i8 i16 i32 i64 u8 u16 u32 u64 f32 f64"),
    "xla.ffi.ArrayProto": _fields("i8 i16 i32 i64 u8 u16 u32 u64 f32 f64"),
    **{
        f"xla.ffi.ArrayProto.{kind}ArrayProto": _fields("values")
        for kind in (
            *("Int8", "Int16", "Int32", "Int64", "Uint8", "Uint16", "Uint32", "Uint64"),
            *("Float", "Double"),
        )
    },
    # Memory and order.
    "xla.gpu.CopyThunkProto": _fields("source_buffer destination_buffer mem_size"),
    "xla.gpu.DeviceToDeviceCopyThunkProto": _fields("copy_thunk"),
    "xla.gpu.DeviceToHostCopyThunkProto": _fields("copy_thunk"),
    "xla.gpu.HostToDeviceCopyThunkProto": _fields("copy_thunk"),
    "xla.gpu.MemzeroThunkProto": _fields("dest_buffer"),
    "xla.gpu.Memset32BitValueThunkProto": _fields("dest_buffer value"),
    "xla.gpu.ReplicaIdThunkProto": _fields("dest_buffer"),
    "xla.gpu.PartitionIdThunkProto": _fields("dest_buffer"),
    # Collectives.
    "xla.gpu.AllReduceThunkProto": _fields("collective_config buffers reduction_kind"),
    "xla.gpu.ReduceScatterThunkProto": _fields("collective_config buffers reduction_kind"),
    "xla.gpu.AllGatherThunkProto": _fields(
        "collective_config buffers",
        collectives_mode=_MOVED,
        enable_gxl=_MOVED,
    ),
    "xla.gpu.AllToAllThunkProto": _fields(
        "collective_config buffers has_split_dimension",
        p2p_memcpy_enabled=_MOVED,
    ),
    "xla.gpu.CollectivePermuteThunkProto": _fields(
        "collective_config buffers source_target_pairs",
        connected_components_enabled=_MOVED,
        collectives_mode=_MOVED,
    ),
    "xla.gpu.CollectiveConfigProto": _fields(
        "operand_element_type replica_groups group_mode use_symmetric_buffer"
    ),
    "xla.gpu.CollectiveBufferProto": _fields(
        "source_buffer destination_buffer",
        element_count="the byte ranges say it",
        source_memory_space="its allocation says it",
        destination_memory_space="its allocation says it",
    ),
    "xla.ReplicaGroup": _fields("replica_ids"),
    "xla.SourceTarget": _fields("source target"),
    "xla.gpu.SequentialThunkProto": _fields("thunks"),
    "xla.gpu.WhileThunkProto": _fields(
        "condition_result_buffer_index condition_thunk_sequence body_thunk_sequence trip_count"
    ),
    "xla.gpu.ConditionalThunkProto": _fields("branch_index_buffer branch_thunks"),
    "xla.gpu.AsyncStartThunkProto": _fields(
        "thunks",
        async_execution_id=_SERIAL,
        computation_stream_id=_SERIAL,
        communication_stream_id=_SERIAL,
        memcpy_stream_id=_SERIAL,
    ),
    "xla.gpu.AsyncDoneThunkProto": _fields("", async_execution_id=_SERIAL),
    "xla.gpu.DynamicSliceFusionThunkProto": _fields(
        "parameters results parameter_buffers result_buffers slice_allocations embedded_thunks",
        verify_offsets="a check of XLA's own",
    ),
    "xla.gpu.DynamicSliceFusionThunkProto.ParameterProto": _fields(
        "parameter_number slice_config slice_offsets",
        parameter_shape=_SHAPE,
        slice_shape=_SHAPE,
    ),
    "xla.gpu.DynamicSliceFusionThunkProto.ResultProto": _fields(
        "result_number update_config update_offsets",
        parameter_number="the parameter that is updated in place has the result's bytes",
        result_shape=_SHAPE,
        update_shape=_SHAPE,
    ),
    "xla.gpu.DynamicSliceFusionThunkProto.OffsetProto": _fields(
        "",
        dimension_number="a slice with offsets and no constant byte offset is refused",
        offset="a slice with offsets and no constant byte offset is refused",
    ),
    "xla.gpu.DynamicSliceConfig": _fields(
        "byte_offset byte_stride loop_index",
        newer="linear",
    ),
    "xla.gpu.DynamicSliceConfig.Linear": _fields("byte_offset byte_stride"),
}

# A thunk is looked into by the decoder of its kind; of the HLO, which computes nothing, only what
# is read.
_CHECKED_ELSEWHERE = frozenset(("xla.gpu.ThunkProto", "xla.HloModuleProtoWithConfig"))


def check_listed(message: Message, within: str = "") -> None:
    """Raises `Refusal` when a field is set that is not on the list.

    Args:
        message: as for `find_unlisted`.
        within: reads on after the field's name.
    """
    if (found := find_unlisted(message)) is not None:
        raise Refusal(f"sets {found}{within}, whose meaning is not known to this version")


def find_unlisted(message: Message) -> str | None:
    """Returns the first set field below a message that is not on the list, or None.

    Args:
        message: walked down to, not into, the thunks that it holds.

    Returns:
        ``message.field``, or the message's own name if it is not listed at all.
    """
    schema = message.DESCRIPTOR
    if _is_listed(schema):
        return None
    if schema.full_name not in ALLOWED:
        return schema.full_name
    for descriptor, value in message.ListFields():
        verdict = _judge(descriptor)
        if verdict is _Verdict.PASS:
            continue
        if verdict is _Verdict.REFUSE:
            return f"{schema.full_name}.{descriptor.name}"
        for child in _list_messages(descriptor, value):
            if (found := find_unlisted(child)) is not None:
                return found
    return None


# Programs hold thousands of messages of few types, so that types are judged once, not messages.
@functools.lru_cache(maxsize=4096)
def _judge(field: Any) -> _Verdict:
    """Returns what is to be done where a field of a listed message is set."""
    fields = ALLOWED[field.containing_type.full_name]
    if field.name in fields.ignored:
        return _Verdict.PASS
    if field.name not in fields.read and field.name not in fields.newer:
        return _Verdict.REFUSE
    if field.message_type is None or _is_listed(field.message_type):
        return _Verdict.PASS
    return _Verdict.LOOK_INTO


@functools.lru_cache(maxsize=512)
def _is_listed(schema: Any) -> bool:
    """True when every field that the schema has below a message is on the list."""
    todo, seen = [schema], set(_CHECKED_ELSEWHERE)
    while todo:
        message = todo.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        fields = Fields(frozenset(("key", "value")))
        if not message.GetOptions().map_entry:
            if message.full_name not in ALLOWED:
                return False
            fields = ALLOWED[message.full_name]
        if not {*fields.read, *fields.newer, *fields.ignored}.issuperset(message.fields_by_name):
            return False
        followed = (f for f in message.fields if f.name not in fields.ignored)
        todo += [field.message_type for field in followed if field.message_type is not None]
    return True


def _list_messages(descriptor: Any, value: Any) -> Any:
    if not descriptor.is_repeated:
        return (value,)
    return value.values() if descriptor.message_type.GetOptions().map_entry else value


@functools.lru_cache(maxsize=1)
def check_schema(schema: Any) -> None:
    """Raises `Refusal` when a field that is read is not in the installed schema.

    Args:
        schema: the message descriptor of a program; messages that it cannot hold are not missed.
    """
    # A program holds its computations as bytes.
    todo, seen = [schema, schema.file.pool.FindMessageTypeByName(COMPUTATION)], set()
    while todo:
        message = todo.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        fields = ALLOWED.get(message.full_name)
        if fields is not None and (missing := fields.read - set(message.fields_by_name)):
            name = f"{message.full_name}.{min(missing)}"
            raise Refusal(f"is of another version of XLA: its format has no {name}")
        todo += [field.message_type for field in message.fields if field.message_type is not None]
