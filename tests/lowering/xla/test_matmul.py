"""cublasLt thunks to matmuls: exchange of operands, types, and every refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.matmul_messages import (
    ENUMS,
    SLICES,
    Thunk,
    find_use,
    make_layout,
    make_thunk,
)
from tracegraph.lowering.xla.matmul import EPILOGUES, decode_matmul
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.runtime.definition.library_nodes import MatmulNode, MatrixLayout
from tracegraph.runtime.definition.nodes import BufferUse

F8 = {"dtype": "F8E4M3FN"}


def decode(thunk: Any) -> MatmulNode:
    return decode_matmul(thunk, "dot.1", find_use)


def check_refused(thunk: Any, *parts: str) -> None:
    with pytest.raises(Refusal) as raised:
        decode(thunk)
    for part in parts:
        assert part in str(raised.value)


def test_a_product_with_rows_first_is_turned_around():
    node = decode(make_thunk())
    assert dict(node.operands)["a"].buffer == "#1"
    assert dict(node.operands)["b"].buffer == "#0"
    assert node.matmul.a == MatrixLayout("float32", 4, 3, 4)
    assert node.matmul.b == MatrixLayout("float32", 3, 2, 3)
    assert node.matmul.d == MatrixLayout("float32", 4, 2, 4)


def test_a_product_with_columns_first_is_kept():
    columns = {"order": "ORDER_COLUMN_MAJOR", "leading_dim_stride": 8}
    node = decode(make_thunk(layout=columns))
    assert dict(node.operands)["a"].buffer == "#0"
    assert node.matmul.a == MatrixLayout("float32", 2, 3, 8)
    assert node.matmul.d == MatrixLayout("float32", 2, 4, 8)


@pytest.mark.parametrize("order", ["ORDER_ROW_MAJOR", "ORDER_COLUMN_MAJOR"])
def test_scales_and_transposes_follow_their_operand(order: str):
    slices = {role: {"index": i, "size": 1 << 16} for i, role in enumerate(SLICES)}
    lhs = make_layout(2, 3, order=order, leading_dim_stride=8, transpose="BLAS_TRANSPOSE")
    output = make_layout(2, 4, order=order, leading_dim_stride=8)
    node = decode(make_thunk({"lhs_layout": lhs, "output_layout": output}, **slices))
    buffers = {role: use.buffer for role, use in node.operands}
    place = {buffers["a"]: "a", buffers["b"]: "b"}["#0"]
    assert place == ("b" if order == "ORDER_ROW_MAJOR" else "a")
    other = "a" if place == "b" else "b"
    assert buffers[f"{place}_scale"] == f"#{SLICES.index('a_scale')}"
    assert buffers[f"{other}_scale"] == f"#{SLICES.index('b_scale')}"
    assert getattr(node.matmul, place).transpose == "T"
    assert getattr(node.matmul, other).transpose == "N"
    assert buffers["c_scale"] == f"#{SLICES.index('c_scale')}"


def test_c_is_an_operand_only_where_it_is_added():
    assert [role for role, _ in decode(make_thunk()).operands] == ["a", "b", "d"]
    node = decode(make_thunk({"beta": 0.5}))
    assert [role for role, _ in node.operands] == ["a", "b", "c", "d"]
    assert node.matmul.beta == 0.5


def test_an_operand_without_a_batch_is_repeated():
    batch = {"batch_size": 5, "batch_stride": 8}
    config = {"rhs_layout": make_layout(3, 4, batch_size=5, batch_stride=12)}
    config |= {"output_layout": make_layout(2, 4, **batch), "c_layout": make_layout(2, 4, **batch)}
    matmul = decode(make_thunk(config)).matmul
    assert (matmul.b.batch_count, matmul.b.batch_stride) == (5, 0)
    assert (matmul.a.batch_count, matmul.a.batch_stride) == (5, 12)


@pytest.mark.parametrize(
    ("dtype", "config", "compute_type", "scale_type"),
    [
        ("F32", {}, "32F_FAST_TF32", "float32"),
        ("F32", {"compute_precision": 1}, "32F_FAST_TF32", "float32"),
        ("F32", {"compute_precision": 2}, "32F", "float32"),
        ("F32", {"precision_algorithm": "ALG_DOT_F32_F32_F32"}, "32F", "float32"),
        ("F32", {"precision_algorithm": "ALG_DOT_TF32_TF32_F32"}, "32F_FAST_TF32", "float32"),
        ("F32", {"precision_algorithm": "ALG_DOT_TF32_TF32_F32_X3"}, "32F", "float32"),
        ("F32", {"precision_algorithm": "ALG_DOT_BF16_BF16_F32"}, "32F_FAST_16BF", "float32"),
        ("F32", {"compute_type": "BLAS_COMPUTATION_TYPE_F32"}, "32F", "float32"),
        ("C64", {}, "32F_FAST_TF32", "complex64"),
        ("C64", {"compute_precision": 2}, "32F", "complex64"),
        ("C128", {}, "64F", "complex128"),
        ("F64", {}, "64F", "float64"),
        ("F64", {"precision_algorithm": "ALG_DOT_F64_F64_F64"}, "64F", "float64"),
        ("BF16", {}, "32F", "float32"),
        ("F16", {"compute_precision": 2}, "32F", "float32"),
        ("F8E4M3FN", {}, "32F", "float32"),
        ("S32", {}, "32I", "int32"),
    ],
)
def test_compute_and_scale_types(
    dtype: str, config: dict[str, Any], compute_type: str, scale_type: str
):
    matmul = decode(make_thunk(config, {"dtype": dtype})).matmul
    assert (matmul.compute_type, matmul.scale_type) == (compute_type, scale_type)


def test_narrow_operands_are_not_summed_in_tf32():
    narrow = {"lhs_layout": make_layout(2, 3, dtype="BF16")}
    narrow |= {"rhs_layout": make_layout(3, 4, dtype="BF16")}
    assert decode(make_thunk(narrow)).matmul.compute_type == "32F"


@pytest.mark.parametrize(
    ("layout", "config", "is_fast"),
    [
        (F8, {}, True),
        (F8, {"compute_precision": 1}, False),
        (F8, {"precision_algorithm": "ALG_DOT_ANY_F8_ANY_F8_F32"}, False),
        (F8, {"precision_algorithm": "ALG_DOT_ANY_F8_ANY_F8_F32_FAST_ACCUM"}, True),
        ({}, {}, False),
    ],
)
def test_fast_accumulation(layout: dict[str, Any], config: dict[str, Any], is_fast: bool):
    config = {"scale_mode": 1, **config}
    assert decode(make_thunk(config, layout)).matmul.has_fast_accumulation is is_fast


@pytest.mark.parametrize("epilogue", sorted(set(ENUMS["Epilogue"]) & set(EPILOGUES)))
def test_epilogues(epilogue: str):
    extra = {"bias": {"index": 7, "size": 16}, "aux": {"index": 8, "size": 32}}
    node = decode(make_thunk(epilogue=epilogue, **extra))
    assert node.matmul.epilogue == EPILOGUES[epilogue]
    assert dict(node.operands)["bias"].buffer == "#7"


def test_algorithm_and_workspace():
    thunk = make_thunk({"alpha_real": 0.1, "alpha_imag": 2.0}, algorithm_idx=127)
    thunk.autotune_workspace_size = 1 << 25
    thunk.workspace.size = 1 << 20
    node = decode(thunk)
    assert node.matmul.algorithm_index == 127
    assert node.matmul.workspace_limit_bytes == 1 << 25
    assert dict(node.operands)["workspace"].nbytes == 1 << 20
    assert node.matmul.alpha == 0.1 + 2.0j
    assert "#0" in node.results


def make_biased(columns: int, nbytes: int, dtype: str = "BF16", result: str = "BF16") -> Any:
    """Returns a matmul of 8 x 8 with 8 x ``columns`` and a bias; its result has rows first."""
    shapes = {"lhs_layout": (8, 8, dtype), "rhs_layout": (8, columns, dtype)}
    shapes |= dict.fromkeys(("c_layout", "output_layout"), (8, columns, result))
    layouts = {
        name: make_layout(rows, size, leading_dim_stride=size, dtype=kind)
        for name, (rows, size, kind) in shapes.items()
    }
    bias = {"index": 7, "size": nbytes}
    return make_thunk(layouts, epilogue="EPILOGUE_BIAS", bias=bias)


@pytest.mark.parametrize(
    ("columns", "nbytes", "types"),
    [
        (8, 8, ("BF16", "BF16")),
        (8, 4, ("BF16", "BF16")),
        (8, 2, ("F16", "F16")),
        (8, 4, ("BF16", "F32")),
        (136, 130 * 4, ("BF16", "F32")),
    ],
)
def test_a_bias_may_end_where_xla_padded_the_matmul(columns: int, nbytes: int, types: Any):
    node = decode(make_biased(columns, nbytes, *types))
    assert dict(node.operands)["bias"] == BufferUse("#7", 0, nbytes)


@pytest.mark.parametrize(
    ("columns", "nbytes", "types", "wanted"),
    [
        (8, 0, ("BF16", "BF16"), 16),
        (16, 16, ("BF16", "BF16"), 32),
        (12, 20, ("BF16", "BF16"), 24),
        (8, 16, ("F32", "F32"), 32),
    ],
)
def test_a_bias_that_ends_elsewhere_is_refused(columns: int, nbytes: int, types: Any, wanted: int):
    thunk = make_biased(columns, nbytes, *types)
    check_refused(thunk, f"`bias` of {nbytes} bytes: {wanted} are read there")


@pytest.mark.parametrize("offset", [2, 8, 24])
def test_a_short_bias_between_the_places_of_values_is_refused(offset: int):
    def find_moved(piece: Any) -> BufferUse:
        use = find_use(piece)
        return use._replace(offset=offset if use.nbytes == 8 else 0)

    with pytest.raises(Refusal, match="`bias` of 8 bytes: 16 are read"):
        decode_matmul(make_biased(8, 8), "dot", find_moved)


@pytest.mark.parametrize(
    ("thunk", "parts"),
    [
        (Thunk(), ("no `gemm_config`",)),
        (make_thunk({"scale_mode": 2}), ("scale mode 2", "per block")),
        (make_thunk({"scale_mode": -1}), ("scale mode -1",)),
        (make_thunk(epilogue="EPILOGUE_SILU"), ("EPILOGUE_SILU",)),
        (make_thunk(epilogue=99), ("sets t.Thunk.epilogue to 99",)),
        (make_thunk(epilogue="EPILOGUE_BIAS"), ("BIAS", "no `bias`")),
        (make_thunk(epilogue="EPILOGUE_GELU_WITH_AUX"), ("GELU_AUX", "no `aux`")),
        (make_thunk(layout={"dtype": "U4"}), ("dtype to U4",)),
        (make_thunk(layout={"dtype": "F8E8M0FNU"}), ("dtype to F8E8M0FNU",)),
        (make_thunk(layout={"dtype": 77}), ("dtype to 77",)),
        (make_thunk(layout={"dtype": "S8"}), ("int8",)),
        (make_thunk(layout={"order": "ORDER_UNKNOWN"}), ("order to ORDER_UNKNOWN",)),
        (make_thunk(layout={"transpose": 9}), ("transpose to 9",)),
        (make_thunk(layout={"num_rows": 0}), ("too small",)),
        (make_thunk(layout={"batch_size": 0}), ("too small",)),
        (make_thunk(layout={"batch_stride": -1}), ("too small",)),
        (make_thunk(layout={"leading_dim_stride": 1}), ("every 1",)),
        (make_thunk(layout={"batch_size": 1 << 40, "batch_stride": 8}), ("65536 bytes",)),
        (make_thunk(d={"index": 3, "size": 31}), ("`d` of 31 bytes", "takes 32 bytes")),
        # Turned around, D has 4 rows: one number of the bias for each.
        (
            make_thunk(epilogue="EPILOGUE_BIAS", bias={"index": 4, "size": 15}),
            ("`bias` of 15 bytes: 16 are read there",),
        ),
        (
            make_thunk(
                epilogue="EPILOGUE_BIAS",
                layout={"dtype": "F8E4M3FN"},
                bias={"index": 4, "size": 7},
            ),
            ("`bias` of 7 bytes: 8 are read there",),
        ),
        (
            make_thunk(epilogue="EPILOGUE_GELU_WITH_AUX", aux={"index": 4, "size": 31}),
            ("`aux` of 31 bytes", "takes 32 bytes"),
        ),
        (make_thunk(a_scale={"index": 4, "size": 3}), ("`b_scale` of 3 bytes: 4 are read",)),
        (make_thunk({"compute_type": "BLAS_COMPUTATION_TYPE_NEW"}), ("COMPUTATION_TYPE_NEW",)),
        (make_thunk({"precision_algorithm": "ALG_DOT_BF16_BF16_BF16"}), ("BF16_BF16_BF16",)),
        (make_thunk({"precision_algorithm": 50}), ("precision_algorithm to 50",)),
        (
            make_thunk({"precision_algorithm": "ALG_DOT_F16_F16_F16"}, {"dtype": "F16"}),
            ("float16", "16F"),
        ),
        (make_thunk(algorithm_idx=128), ("algorithm 128",)),
        (make_thunk(algorithm_idx=-1), ("algorithm -1",)),
        (make_thunk(autotune_workspace_size=-1), ("-1 bytes of workspace",)),
    ],
)
def test_refusals(thunk: Any, parts: tuple[str, ...]):
    check_refused(thunk, *parts)


@pytest.mark.parametrize("role", ["a", "b", "c", "d"])
def test_a_missing_operand_is_refused(role: str):
    thunk = make_thunk()
    thunk.ClearField(role)
    check_refused(thunk, f"no operand `{role}`")


def test_ignored_fields_change_nothing():
    config = {"algorithm": 5, "grad_x": True, "grad_y": True}
    assert decode(make_thunk(config)) == decode(make_thunk())


def view(memory: np.ndarray, layout: MatrixLayout) -> np.ndarray:
    """The matrices of a batch as cublasLt sees them, after its own transposition."""
    strides = (1, layout.leading_stride)
    if layout.is_row_order:
        strides = strides[::-1]
    shape = (layout.batch_count, layout.rows, layout.columns)
    steps = [memory.itemsize * step for step in (layout.batch_stride, *strides)]
    matrices = np.lib.stride_tricks.as_strided(memory, shape, steps)
    return matrices if layout.transpose == "N" else matrices.swapaxes(1, 2)


def multiply(node: MatmulNode, memory: dict[str, np.ndarray]) -> None:
    """What cublasLt does in a matmul, in NumPy."""
    matmul = node.matmul
    buffers = {role: memory[use.buffer] for role, use in node.operands}
    multiplied = view(buffers["a"], matmul.a) @ view(buffers["b"], matmul.b)
    result = matmul.alpha.real * multiplied
    if "c" in buffers:
        result = result + matmul.beta * view(buffers["c"], matmul.c)
    if "bias" in buffers:
        # cublasLt adds one number to each row of D.
        result = result + buffers["bias"][: matmul.d.rows, None]
    view(buffers["d"], matmul.d)[...] = result


@st.composite
def draw_layouts(draw: st.DrawFn) -> list[dict[str, Any]]:
    rows, inner, columns, batch = (draw(st.integers(1, 4)) for _ in range(4))
    layouts = []
    for shape in ((rows, inner), (inner, columns), (rows, columns), (rows, columns)):
        order = draw(st.sampled_from(["ORDER_ROW_MAJOR", "ORDER_COLUMN_MAJOR"]))
        contiguous = shape[1] if order == "ORDER_ROW_MAJOR" else shape[0]
        leading = contiguous + draw(st.integers(0, 2))
        layout = make_layout(*shape, order=order, leading_dim_stride=leading, dtype="F64")
        layouts.append(layout | {"batch_size": batch, "batch_stride": leading * max(shape)})
    # XLA gives C the layout of the result.
    layouts[2] = layouts[3]
    if draw(st.booleans()):
        layouts[0] = layouts[0] | {"batch_size": 1, "batch_stride": 0}
    return layouts


def read_matrix(memory: np.ndarray, layout: dict[str, Any], batch: int) -> np.ndarray:
    """One matrix as XLA describes it, element by element."""
    start = batch * layout["batch_stride"]
    steps = (layout["leading_dim_stride"], 1)
    if layout["order"] == "ORDER_COLUMN_MAJOR":
        steps = steps[::-1]
    rows, columns = range(layout["num_rows"]), range(layout["num_cols"])
    return np.array([[memory[start + i * steps[0] + j * steps[1]] for j in columns] for i in rows])


@settings(max_examples=100)
@given(draw_layouts(), st.booleans(), st.sampled_from([0.0, 2.0]))
def test_the_turned_matmul_is_the_matmul(layouts: Any, has_bias: bool, beta: float):
    names = ("lhs_layout", "rhs_layout", "c_layout", "output_layout")
    has_bias = has_bias and layouts[3]["order"] == "ORDER_ROW_MAJOR"
    slices: dict[str, Any] = {"bias": {"index": 9, "size": 512}} if has_bias else {}
    config = {"alpha_real": 0.5, "beta": beta, **dict(zip(names, layouts, strict=True))}
    node = decode(
        make_thunk(config, epilogue="EPILOGUE_BIAS" if has_bias else "EPILOGUE_DEFAULT", **slices)
    )
    random = np.random.default_rng(0)
    memory = {f"#{i}": random.integers(-8, 8, 512).astype(np.float64) for i in range(10)}
    before = {name: array.copy() for name, array in memory.items()}
    multiply(node, memory)
    for batch in range(layouts[3]["batch_size"]):
        lhs, rhs, c = (read_matrix(before[f"#{i}"], layouts[i], batch) for i in range(3))
        wanted = 0.5 * lhs @ rhs + beta * c
        if has_bias:
            wanted = wanted + before["#9"][: wanted.shape[1]]
        np.testing.assert_array_equal(read_matrix(memory["#3"], layouts[3], batch), wanted)
