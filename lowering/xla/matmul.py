"""Matmuls of cublasLt: from XLA's description of one to the arguments of one cublasLtMatmul call.

cublasLt writes columns first. Where XLA wants rows first, the matmul is turned around: instead of
D = A @ B it computes transpose(D) = transpose(B) @ transpose(A). No byte moves: A and B change
places, and every layout is read the other way (rows for columns, the other order).

Enum values are read by name from the message's own descriptors, and what is not listed here is
refused: the numbers, the fields and their meaning change between versions of XLA.

Note [Padded matmuls]
XLA pads matmuls of 16-bit floats with zeros to multiples of eight rows and columns, slices the
result, and takes a bias into the matmul through that slice. The bias stays as short as it was, and
cublasLt reads up to seven elements behind it, in `jax.jit` as here. They reach only what the slice
drops. They are in the same 16 or 32 bytes as the last element, as long as the bias begins at a
multiple of those. An offset keeps its remainder by 256 in every plan, so these bytes can be read.
They are none of the step's reads: whatever is in them, and when it is written, no result changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracegraph.lowering.xla.enums import read_name, read_value
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.runtime.definition.library_nodes import Matmul, MatmulNode, MatrixLayout
from tracegraph.runtime.definition.nodes import BufferUse

if TYPE_CHECKING:
    from google.protobuf.message import Message

# XLA's element types that cublasLt multiplies, with JAX's names.
DTYPES = {
    "F8E4M3FN": "float8_e4m3fn",
    "F8E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "C128": "complex128",
    "S8": "int8",
    "S32": "int32",
}
# Types that alpha and beta can have: cublasLt reads them with 4, 8 or 16 bytes each.
SCALE_DTYPES = ("float32", "float64", "complex64", "complex128", "int32")
ITEM_BYTES = {
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
EIGHT_BIT_FLOATS = ("float8_e4m3fn", "float8_e5m2")

ORDERS = {"ORDER_ROW_MAJOR": True, "ORDER_COLUMN_MAJOR": False}
TRANSPOSES = {"BLAS_NO_TRANSPOSE": "N", "BLAS_TRANSPOSE": "T", "BLAS_CONJUGATE_TRANSPOSE": "C"}

# XLA's epilogues of cublasLt; those with SILU exist for another vendor's library only.
EPILOGUES = {
    "EPILOGUE_DEFAULT": "DEFAULT",
    "EPILOGUE_RELU": "RELU",
    "EPILOGUE_BIAS": "BIAS",
    "EPILOGUE_BIAS_THEN_RELU": "RELU_BIAS",
    "EPILOGUE_GELU": "GELU",
    "EPILOGUE_GELU_WITH_AUX": "GELU_AUX",
    "EPILOGUE_BIAS_THEN_GELU": "GELU_BIAS",
    "EPILOGUE_BIAS_THEN_GELU_WITH_AUX": "GELU_AUX_BIAS",
}

# How the sum is made, where XLA names it itself.
COMPUTE_TYPES = {
    "BLAS_COMPUTATION_TYPE_F16": "16F",
    "BLAS_COMPUTATION_TYPE_F32": "32F",
    "BLAS_COMPUTATION_TYPE_F64": "64F",
    "BLAS_COMPUTATION_TYPE_I32": "32I",
    "BLAS_COMPUTATION_TYPE_F16_AS_F32": "32F_FAST_16F",
    "BLAS_COMPUTATION_TYPE_BF16_AS_F32": "32F_FAST_16BF",
    "BLAS_COMPUTATION_TYPE_TF32_AS_F32": "32F_FAST_TF32",
}
# How the sum is made, where the program names an algorithm (`jax.lax.DotAlgorithmPreset`).
# The split ones (X3, X6, X9) reach cublasLt only after XLA has split the operands itself.
ALGORITHM_COMPUTE_TYPES = {
    "ALG_DOT_F16_F16_F16": "16F",
    "ALG_DOT_F16_F16_F32": "32F",
    "ALG_DOT_BF16_BF16_F32": "32F_FAST_16BF",
    "ALG_DOT_BF16_BF16_F32_X3": "32F",
    "ALG_DOT_BF16_BF16_F32_X6": "32F",
    "ALG_DOT_BF16_BF16_F32_X9": "32F",
    "ALG_DOT_TF32_TF32_F32": "32F_FAST_TF32",
    "ALG_DOT_TF32_TF32_F32_X3": "32F",
    "ALG_DOT_F32_F32_F32": "32F",
    "ALG_DOT_F64_F64_F64": "64F",
    "ALG_DOT_ANY_F8_ANY_F8_F32": "32F",
    "ALG_DOT_ANY_F8_ANY_F8_F32_FAST_ACCUM": "32F",
}
# How the sum is made by the dtype of the result, where none is named. float32 and complex64
# may use TF32 on top: see `_find_compute_type`.
RESULT_COMPUTE_TYPES = {
    "float8_e4m3fn": "32F",
    "float8_e5m2": "32F",
    "float16": "32F",
    "bfloat16": "32F",
    "float32": "32F",
    "complex64": "32F",
    "float64": "64F",
    "complex128": "64F",
    "int32": "32I",
}
# The highest `jax.lax.Precision` (0 default, 1 high, 2 highest) at which XLA permits TF32.
TF32_PRECISION = 1
# Scaling of operands of eight bits: none, or one factor per operand. Beyond are factors per block.
LAST_SCALE_MODE = 1
# Which operands XLA pads, and to a multiple of how many rows: Note [Padded matmuls].
PADDED_DTYPES = ("float16", "bfloat16")
PADDED_ROWS = 8
# How many entries of cublasLt's list XLA considers.
ALGORITHM_COUNT = 128

# Factors of operands of eight bits are of float32.
_SCALE_BYTES = 4
OPTIONAL_ROLES = ("bias", "aux", "a_scale", "b_scale", "c_scale", "d_scale", "d_amax", "workspace")
# Which operand is where, once the matmul is turned around.
EXCHANGED_ROLES = {"a": "b", "b": "a", "a_scale": "b_scale", "b_scale": "a_scale"}


def decode_matmul(message: Any, name: str, use: Callable[[Message], BufferUse]) -> MatmulNode:
    """Returns the matmul that a thunk describes.

    Args:
        message: an ``xla.gpu.CublasLtMatmulThunkProto`` with listed fields only.
        name: of the instruction that it computes.
        use: maps a shaped slice of the thunk to the byte range that it names.

    Returns:
        The node. Where ``beta`` is 0 it has no operand ``c``: cublasLt is then given none.

    Raises:
        Refusal: a value or a combination that cublasLt is not called with.
    """
    if not message.HasField("gemm_config"):
        raise Refusal("has no `gemm_config`: the matmul's layouts are not given")
    config = message.gemm_config
    if config.scale_mode not in range(LAST_SCALE_MODE + 1):
        raise Refusal(f"has scale mode {config.scale_mode}: factors per block are not lowered")

    is_turned = read_value(config.output_layout, "order", ORDERS)
    matmul = _build_matmul(message, is_turned)
    operands = _read_operands(message, is_turned, use)
    _check_epilogue(matmul.epilogue, operands)
    for role in ("a", "b", "c", "d"):
        if role in operands:
            _check_extent(getattr(matmul, role), role, operands[role])
    if "AUX" in matmul.epilogue.split("_"):
        _check_extent(matmul.d, "aux", operands["aux"])
    for role, wanted in _list_vectors(matmul).items():
        if role not in operands or operands[role].nbytes >= wanted:
            continue
        if role != "bias" or not _is_padded_bias(matmul, operands[role], wanted):
            found = operands[role].nbytes
            raise Refusal(f"has the operand `{role}` of {found} bytes: {wanted} are read there")
    return MatmulNode(name, matmul, tuple(operands.items()))


def _read_operands(
    message: Any, is_turned: bool, use: Callable[[Message], BufferUse]
) -> dict[str, BufferUse]:
    has_c = message.gemm_config.beta != 0
    operands = {}
    for role in ("a", "b", "c", "d", *OPTIONAL_ROLES):
        field = EXCHANGED_ROLES.get(role, role) if is_turned else role
        is_needed = role not in OPTIONAL_ROLES
        if is_needed and not message.HasField(field):
            raise Refusal(f"has no operand `{field}`: a matmul has A, B, C and D")
        if message.HasField(field) and (role != "c" or has_c):
            operands[role] = use(getattr(message, field))
    return operands


def _build_matmul(message: Any, is_turned: bool) -> Matmul:
    config = message.gemm_config
    a, b, c, d = _read_layouts(config, is_turned)
    algorithm = read_name(config, "precision_algorithm")
    compute_type = _find_compute_type(config, algorithm, a.dtype, d.dtype)
    is_fast_by_default = config.compute_precision == 0 and (
        a.dtype in EIGHT_BIT_FLOATS or b.dtype in EIGHT_BIT_FLOATS
    )
    if not 0 <= message.algorithm_idx < ALGORITHM_COUNT or message.autotune_workspace_size < 0:
        raise Refusal(
            f"has algorithm {message.algorithm_idx} of those with "
            f"{message.autotune_workspace_size} bytes of workspace: XLA asks for "
            f"{ALGORITHM_COUNT} algorithms"
        )
    return Matmul(
        a=a,
        b=b,
        c=c,
        d=d,
        alpha=complex(config.alpha_real, config.alpha_imag),
        beta=config.beta,
        compute_type=compute_type,
        scale_type=_find_scale_type(compute_type, d.dtype),
        epilogue=read_value(message, "epilogue", EPILOGUES),
        algorithm_index=message.algorithm_idx,
        workspace_limit_bytes=message.autotune_workspace_size,
        has_fast_accumulation=(
            is_fast_by_default
            if algorithm == "ALG_UNSET"
            else algorithm == "ALG_DOT_ANY_F8_ANY_F8_F32_FAST_ACCUM"
        ),
    )


def _read_layouts(config: Any, is_turned: bool) -> tuple[MatrixLayout, ...]:
    """Returns the layouts of A, B, C and D, turned around where the matmul is."""
    a, b, c, d = (
        _read_layout(getattr(config, f"{part}_layout")) for part in ("lhs", "rhs", "c", "output")
    )
    # cublasLt wants equal counts; an operand without a batch is repeated by its stride of 0.
    batch_count = max(a.batch_count, b.batch_count)
    a = dataclasses.replace(a, batch_count=batch_count)
    b = dataclasses.replace(b, batch_count=batch_count)
    if not is_turned:
        return a, b, c, d
    return _turn(b), _turn(a), _turn(c), _turn(d)


def _read_layout(layout: Any) -> MatrixLayout:
    sizes = (layout.num_rows, layout.num_cols, layout.leading_dim_stride, layout.batch_size)
    if min(sizes) < 1 or layout.batch_stride < 0:
        raise Refusal(f"has a layout of rows, columns, stride, batch {sizes}: one is too small")
    return MatrixLayout(
        dtype=read_value(layout, "dtype", DTYPES),
        rows=layout.num_rows,
        columns=layout.num_cols,
        leading_stride=layout.leading_dim_stride,
        is_row_order=read_value(layout, "order", ORDERS),
        batch_count=layout.batch_size,
        batch_stride=layout.batch_stride,
        transpose=read_value(layout, "transpose", TRANSPOSES),
    )


def _turn(layout: MatrixLayout) -> MatrixLayout:
    """Returns the layout of the transposed matrix in the same bytes."""
    return dataclasses.replace(
        layout,
        rows=layout.columns,
        columns=layout.rows,
        is_row_order=not layout.is_row_order,
    )


def _find_compute_type(config: Any, algorithm: str, a_dtype: str, d_dtype: str) -> str:
    """Returns how the sum is made: as XLA names it, as the program asks, or by the result."""
    if read_name(config, "compute_type") != "BLAS_COMPUTATION_TYPE_UNSET":
        return read_value(config, "compute_type", COMPUTE_TYPES)
    if algorithm != "ALG_UNSET":
        return read_value(config, "precision_algorithm", ALGORITHM_COMPUTE_TYPES)
    if d_dtype not in RESULT_COMPUTE_TYPES:
        raise Refusal(f"has a result of {d_dtype}: cublasLt does not sum in it")
    is_wide = d_dtype in ("float32", "complex64") and a_dtype == d_dtype
    if is_wide and config.compute_precision <= TF32_PRECISION:
        return "32F_FAST_TF32"
    return RESULT_COMPUTE_TYPES[d_dtype]


def _find_scale_type(compute_type: str, d_dtype: str) -> str:
    """Returns the dtype of alpha and beta: the result's, but float32 for plain float32 sums."""
    if compute_type == "32F" and d_dtype != "complex64":
        return "float32"
    if d_dtype not in SCALE_DTYPES:
        raise Refusal(f"scales {d_dtype} in {compute_type}: its factors would have 8 or 16 bits")
    return d_dtype


def _check_epilogue(epilogue: str, operands: dict[str, BufferUse]) -> None:
    for part, role in (("BIAS", "bias"), ("AUX", "aux")):
        if part in epilogue.split("_") and role not in operands:
            raise Refusal(f"has the epilogue {epilogue} and no `{role}`: its address is missing")


def _list_vectors(matmul: Matmul) -> dict[str, int]:
    """Returns the bytes of each operand that is no matrix: a bias per row of D, and factors."""
    scales: dict[str, int] = dict.fromkeys(
        ("a_scale", "b_scale", "c_scale", "d_scale", "d_amax"), _SCALE_BYTES
    )
    if "BIAS" not in matmul.epilogue.split("_"):
        return scales
    # Beside results of eight bits cublasLt reads a bias of sixteen.
    item_bytes = 2 if matmul.d.dtype in EIGHT_BIT_FLOATS else ITEM_BYTES[matmul.d.dtype]
    return scales | {"bias": matmul.d.rows * item_bytes}


def _is_padded_bias(matmul: Matmul, bias: BufferUse, wanted: int) -> bool:
    """True for a bias whose missing elements belong to rows that XLA has padded D with.

    See Note [Padded matmuls].
    """
    unit = PADDED_ROWS * wanted // matmul.d.rows
    is_padded = matmul.a.dtype in PADDED_DTYPES and wanted % unit == 0
    return is_padded and bias.offset % unit == 0 and 0 < wanted - bias.nbytes < unit


def _check_extent(layout: MatrixLayout, role: str, operand: BufferUse) -> None:
    """Refuses a layout that reaches beyond its operand's bytes."""
    inner, outer = layout.rows, layout.columns
    if layout.is_row_order:
        inner, outer = outer, inner
    last = (layout.batch_count - 1) * layout.batch_stride + (outer - 1) * layout.leading_stride
    wanted = (last + inner) * ITEM_BYTES[layout.dtype]
    if inner > layout.leading_stride or wanted > operand.nbytes:
        raise Refusal(
            f"has the operand `{role}` of {operand.nbytes} bytes: its layout takes {wanted} bytes, "
            f"{inner} elements every {layout.leading_stride}"
        )
