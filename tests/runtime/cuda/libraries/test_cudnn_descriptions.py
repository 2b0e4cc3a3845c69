"""What cuDNN is asked for: operations, types, engines and knobs, as XLA chose them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.cudnn_calls import (
    BIAS,
    CONVOLUTION,
    ENGINES,
    GRAPH,
    W_TENSOR,
    X_TENSOR,
    Y_TENSOR,
    list_operations,
    make_cudnn,
    make_cudnn_device,
)
from tests.fakes.fake_cudnn import Engine, FakeCudnn
from tracegraph.lowering.xla.convolution import ACTIVATIONS, DTYPES
from tracegraph.runtime.cuda.libraries.cudnn_backend import Kind
from tracegraph.runtime.cuda.libraries.cudnn_convolutions import (
    DATA_TYPES,
    EPILOGUE_DTYPES,
    SUM_DTYPES,
)
from tracegraph.runtime.definition.cudnn_calls import (
    ITEM_BYTES,
    Activation,
    Algorithm,
    B,
    Direction,
    Epilogue,
    W,
    X,
    Y,
    Z,
)


@pytest.fixture
def library() -> FakeCudnn:
    return FakeCudnn(dict(ENGINES))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, library: FakeCudnn) -> CudaOnHost:
    return make_cudnn_device(monkeypatch, library)


def test_tables_know_the_dtypes_and_activations_that_are_decoded() -> None:
    assert set(DTYPES.values()) == set(ITEM_BYTES) <= set(DATA_TYPES)
    assert set(ACTIVATIONS.values()) == set(Activation)
    assert {*SUM_DTYPES.values(), *EPILOGUE_DTYPES.values()} <= set(DATA_TYPES)


@pytest.mark.parametrize(
    ("direction", "prefix", "names"),
    [
        (Direction.FORWARD, "FORWARD", ("X", "W", "Y")),
        (Direction.BACKWARD_DATA, "BWD_DATA", ("DX", "W", "DY")),
        (Direction.BACKWARD_FILTER, "BWD_FILTER", ("X", "DW", "DY")),
    ],
)
def test_convolution_is_described_as_xla_describes_it(
    library: FakeCudnn, direction: Direction, prefix: str, names: tuple[str, ...]
) -> None:
    call = dataclasses.replace(CONVOLUTION, direction=direction)
    (operation,) = list_operations(library, call)
    prefix = f"OPERATION_CONVOLUTION_{prefix}_"
    assert (operation[prefix + "ALPHA"], operation[prefix + "BETA"]) == ([1.0], [0.0])
    (convolution,) = operation[prefix + "CONV_DESC"]
    assert convolution == {
        "kind": Kind.CONVOLUTION,
        "CONVOLUTION_COMP_TYPE": [0],
        "CONVOLUTION_CONV_MODE": [1],
        "CONVOLUTION_SPATIAL_DIMS": [2],
        "CONVOLUTION_PRE_PADDINGS": [1, 1],
        "CONVOLUTION_POST_PADDINGS": [1, 1],
        "CONVOLUTION_DILATIONS": [2, 2],
        "CONVOLUTION_FILTER_STRIDES": [2, 2],
    }
    tensors = zip(names, (X, W, Y), (X_TENSOR, W_TENSOR, Y_TENSOR), strict=True)
    for name, uid, tensor in tensors:
        assert operation[prefix + name] == [
            {
                "kind": Kind.TENSOR,
                "TENSOR_DATA_TYPE": [0],
                "TENSOR_DIMENSIONS": list(tensor.dims),
                "TENSOR_STRIDES": list(tensor.strides),
                "TENSOR_UNIQUE_ID": [uid],
                "TENSOR_BYTE_ALIGNMENT": [32],
            }
        ]


@pytest.mark.parametrize(
    ("dtype", "sum_type", "factor"),
    [("bfloat16", 0, [1.0]), ("int8", 4, [1.0]), ("float64", 1, ("double", 1.0))],
)
def test_sums_are_made_in_the_type_that_xla_names(
    library: FakeCudnn, dtype: str, sum_type: int, factor: Any
) -> None:
    x, w, y = (dataclasses.replace(t, dtype=dtype) for t in (X_TENSOR, W_TENSOR, Y_TENSOR))
    window = dataclasses.replace(CONVOLUTION.window, is_flipped=True)
    call = dataclasses.replace(CONVOLUTION, x=x, w=w, y=y, window=window)
    (operation,) = list_operations(library, call)
    (convolution,) = operation["OPERATION_CONVOLUTION_FORWARD_CONV_DESC"]
    assert convolution["CONVOLUTION_COMP_TYPE"] == [sum_type]
    assert convolution["CONVOLUTION_CONV_MODE"] == [0]
    assert operation["OPERATION_CONVOLUTION_FORWARD_ALPHA"] == factor


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (Activation.NONE, None),
        (Activation.RELU, {"POINTWISE_MODE": [100]}),
        (Activation.RELU6, {"POINTWISE_MODE": [100], "POINTWISE_RELU_UPPER_CLIP": [6.0]}),
        (Activation.ELU, {"POINTWISE_MODE": [103]}),
        (
            Activation.LEAKY_RELU,
            {"POINTWISE_MODE": [100], "POINTWISE_RELU_LOWER_CLIP_SLOPE": [0.25]},
        ),
    ],
)
def test_what_follows_is_described_as_xla_describes_it(
    library: FakeCudnn, activation: Activation, expected: dict[str, Any] | None
) -> None:
    epilogue = Epilogue(BIAS, activation, slope=0.25)
    operations = list_operations(library, dataclasses.replace(CONVOLUTION, epilogue=epilogue))
    convolution, *sums = operations
    assert convolution["OPERATION_CONVOLUTION_FORWARD_Y"][0]["TENSOR_IS_VIRTUAL"] == [True]
    if expected is not None:
        *sums, last = sums
        (pointwise,) = last["OPERATION_POINTWISE_PW_DESCRIPTOR"]
        assert pointwise == {"kind": Kind.POINTWISE, "POINTWISE_MATH_PREC": [0], **expected}
        assert last["OPERATION_POINTWISE_YDESC"][0]["TENSOR_UNIQUE_ID"] == [Y]
    else:
        assert sums[-1]["OPERATION_POINTWISE_YDESC"][0]["TENSOR_UNIQUE_ID"] == [Y]
    added = [each["OPERATION_POINTWISE_BDESC"][0]["TENSOR_UNIQUE_ID"][0] for each in sums]
    is_plain = activation in (Activation.NONE, Activation.RELU)
    assert added == ([Z, B] if is_plain else [B])


def test_factors_belong_to_the_side_input(library: FakeCudnn) -> None:
    epilogue = Epilogue(BIAS, Activation.ELU, scale=2.0, side_scale=0.5)
    operations = list_operations(library, dataclasses.replace(CONVOLUTION, epilogue=epilogue))
    names = ("OPERATION_POINTWISE_ALPHA1", "OPERATION_POINTWISE_ALPHA2")
    assert [[each[name][0] for name in names] for each in operations[1:3]] == [[2, 0.5], [1, 1]]


def test_plan_has_the_engine_and_the_knobs_that_xla_chose(library: FakeCudnn) -> None:
    owner = make_cudnn(library)
    assert owner.find_problem(CONVOLUTION) == ""
    (plan,) = library.list_alive(Kind.EXECUTION_PLAN)
    (config,) = plan["EXECUTION_PLAN_ENGINE_CONFIG"]
    assert config["ENGINECFG_ENGINE"][0]["ENGINE_GLOBAL_INDEX"] == [5]
    knobs = [
        (each["KNOB_CHOICE_KNOB_TYPE"][0], each["KNOB_CHOICE_KNOB_VALUE"][0])
        for each in config["ENGINECFG_KNOB_CHOICES"]
    ]
    assert knobs == [(3, 7), (9, 0)]


@pytest.mark.parametrize(
    ("engines", "algorithm", "workspace_bytes", "chosen"),
    [
        (ENGINES, Algorithm(), 64, 5),
        (ENGINES, Algorithm(), 32, 6),
        # Rounds its input; needs tensor cores, where float32 must not.
        ({1: Engine(notes=(1,)), 2: Engine(notes=(0,))}, Algorithm(), 0, 2),
        ({2: Engine(notes=(0,)), 3: Engine()}, Algorithm(allows_tf32=False), 0, 3),
    ],
)
def test_where_xla_chose_none_the_first_recommended_that_fits_is_taken(
    engines: dict[int, Engine], algorithm: Algorithm, workspace_bytes: int, chosen: int
) -> None:
    library = FakeCudnn(engines)
    call = dataclasses.replace(CONVOLUTION, algorithm=algorithm, workspace_bytes=workspace_bytes)
    owner = make_cudnn(library)
    assert owner.find_problem(call) == ""
    (plan,) = owner._recent.values()
    (config,) = library.alive[plan.parts.plan].values["EXECUTION_PLAN_ENGINE_CONFIG"]
    assert config["ENGINECFG_ENGINE"][0]["ENGINE_GLOBAL_INDEX"] == [chosen]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": Algorithm(7)}, "by engine 7, which cuDNN 9.24.1 refuses: .*no such engine"),
        (
            {"algorithm": Algorithm(6, ((3, 1),))},
            "by engine 6 with knobs 3=1, which cuDNN 9.24.1 refuses: .*no such knob",
        ),
        ({"workspace_bytes": 8}, "the plan needs 48 bytes of workspace, not 8"),
        ({"algorithm": Algorithm(), "workspace_bytes": 8}, "no engine fits into 8 bytes"),
    ],
)
def test_what_the_library_does_not_know_is_known_before(
    device: CudaOnHost, library: FakeCudnn, changes: dict[str, Any], reason: str
) -> None:
    call = dataclasses.replace(CONVOLUTION, **changes)
    problem = device.find_call_problem(call)
    assert problem.startswith("is forward, of float32 [2, 8, 16, 16] with [16, 4, 3")
    assert re.search(reason, problem)
    assert not library.alive
    assert device.find_call_problem(CONVOLUTION) == ""


def test_a_graph_of_another_version_is_known_before(device: CudaOnHost, library: FakeCudnn) -> None:
    call = dataclasses.replace(GRAPH, plan=b"of another version")
    problem = device.find_call_problem(call)
    assert problem.startswith("is a compiled graph of 5 tensors, which cuDNN 9.24.1 refuses")
    assert not library.alive
