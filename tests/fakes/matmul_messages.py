"""Messages of XLA's cublasLt thunk, from a schema of our own with field numbers of its own."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tracegraph.runtime.definition.nodes import BufferUse

Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {"int": Field.TYPE_INT64, "float": Field.TYPE_DOUBLE, "bool": Field.TYPE_BOOL}
ENUMS = {
    "Order": ("ORDER_UNKNOWN", "ORDER_COLUMN_MAJOR", "ORDER_ROW_MAJOR"),
    "Transpose": ("BLAS_NO_TRANSPOSE", "BLAS_CONJUGATE_TRANSPOSE", "BLAS_TRANSPOSE"),
    "Primitive": ("INVALID", "U4", "F32", "F64", "BF16", "F16", "C64", "C128", "S8", "S32")
    + ("F8E4M3FN", "F8E5M2", "F8E8M0FNU"),
    "Precision": ("ALG_UNSET", "ALG_DOT_F32_F32_F32", "ALG_DOT_TF32_TF32_F32")
    + ("ALG_DOT_TF32_TF32_F32_X3", "ALG_DOT_BF16_BF16_F32", "ALG_DOT_BF16_BF16_BF16")
    + ("ALG_DOT_F16_F16_F16", "ALG_DOT_F64_F64_F64", "ALG_DOT_ANY_F8_ANY_F8_F32")
    + ("ALG_DOT_ANY_F8_ANY_F8_F32_FAST_ACCUM",),
    "Compute": ("BLAS_COMPUTATION_TYPE_UNSET", "BLAS_COMPUTATION_TYPE_TF32_AS_F32")
    + ("BLAS_COMPUTATION_TYPE_F32", "BLAS_COMPUTATION_TYPE_F16", "BLAS_COMPUTATION_TYPE_NEW"),
    "Epilogue": ("EPILOGUE_DEFAULT", "EPILOGUE_SILU", "EPILOGUE_BIAS", "EPILOGUE_BIAS_THEN_RELU")
    + ("EPILOGUE_GELU", "EPILOGUE_GELU_WITH_AUX", "EPILOGUE_BIAS_THEN_GELU_WITH_AUX")
    + ("EPILOGUE_RELU", "EPILOGUE_BIAS_THEN_GELU"),
}
SLICES = ("a", "b", "c", "d", "bias", "aux", "workspace", "a_scale", "b_scale", "c_scale")
MESSAGES = {
    "Slice": {"index": "int", "size": "int"},
    "Layout": {
        "dtype": "Primitive",
        "transpose": "Transpose",
        "order": "Order",
        **dict.fromkeys(("num_rows", "num_cols", "batch_size", "leading_dim_stride"), "int"),
        "batch_stride": "int",
    },
    "Config": {
        **dict.fromkeys(("lhs_layout", "rhs_layout", "c_layout", "output_layout"), "Layout"),
        **dict.fromkeys(("alpha_real", "alpha_imag", "beta"), "float"),
        **dict.fromkeys(("compute_precision", "algorithm", "scale_mode"), "int"),
        **dict.fromkeys(("grad_x", "grad_y"), "bool"),
        "precision_algorithm": "Precision",
        "compute_type": "Compute",
    },
    "Thunk": {
        "epilogue": "Epilogue",
        **dict.fromkeys(("algorithm_idx", "autotune_workspace_size"), "int"),
        **dict.fromkeys((*SLICES, "d_scale", "d_amax"), "Slice"),
        "gemm_config": "Config",
    },
}


def _make_thunk_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package="t", syntax="proto3")
    for enum, values in ENUMS.items():
        described = file.enum_type.add(name=enum)
        for number, value in enumerate(values):
            described.value.add(name=value, number=number)
    for message, fields in MESSAGES.items():
        described_message = file.message_type.add(name=message)
        for number, (name, kind) in enumerate(fields.items(), start=1):
            described_message.field.append(_describe_field(name, number, kind))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Thunk"))


def _describe_field(name: str, number: int, kind: str) -> Any:
    field = Field(name=name, number=number, label=Field.LABEL_OPTIONAL)
    if kind in SCALARS:
        field.type = SCALARS[kind]
        return field
    field.type = Field.TYPE_ENUM if kind in ENUMS else Field.TYPE_MESSAGE
    field.type_name = f".t.{kind}"
    return field


Thunk = _make_thunk_class()


def make_layout(rows: int, columns: int, **changes: Any) -> dict[str, Any]:
    """Returns a layout of one dense float32 matrix, rows first."""
    layout = {"order": "ORDER_ROW_MAJOR", "dtype": "F32", "batch_size": 1}
    layout |= {"num_rows": rows, "num_cols": columns, "leading_dim_stride": columns}
    return layout | changes


def make_thunk(
    config: dict[str, Any] | None = None, layout: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """Returns the thunk of a matmul of 2 x 3 with 3 x 4.

    Args:
        config: changes of its config.
        layout: changes of each of its layouts.
        changes: of the thunk itself.
    """
    layouts = {"lhs_layout": (2, 3), "rhs_layout": (3, 4), "c_layout": (2, 4)}
    layouts |= {"output_layout": (2, 4)}
    made = {name: make_layout(*shape, **(layout or {})) for name, shape in layouts.items()}
    fields: dict[str, Any] = {role: {"index": i, "size": 1 << 16} for i, role in enumerate("abcd")}
    fields["gemm_config"] = {"alpha_real": 1.0, **made, **(config or {})}
    return Thunk(**(fields | changes))


def find_use(shaped_slice: Any) -> BufferUse:
    """Returns the byte range of a slice."""
    return BufferUse(f"#{shaped_slice.index}", 0, shaped_slice.size)
