"""The descriptions of convolutions against the real cuDNN, for an H200 that is only described.

Needs the wheels of cuDNN, of 9.8 or later, and of cuBLAS: 1.2 GB, and no driver. A
device that is described stands in the place of the handle, which takes a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import importlib.util
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.paths import DATA
from tracegraph.runtime.cuda.libraries.cudnn_backend import (
    Attribute,
    CudnnBackend,
    CudnnError,
    Kind,
    ValueType,
)
from tracegraph.runtime.cuda.libraries.cudnn_plans import PlanMaker, PlanParts
from tracegraph.runtime.definition.cudnn_calls import (
    Activation,
    Algorithm,
    CompiledGraph,
    Convolution,
    Direction,
    Epilogue,
    Tensor,
    Window,
)

WORKSPACE_BYTES = 1 << 26
KNOB_COUNT = 64


class DeviceKind(enum.IntEnum):
    """Of a description of a device."""

    DEVICEPROP = 38


class DeviceAttribute(enum.Enum):
    """Where a description of a device is set, with the types as `Attribute` has them."""

    JSON = 2702, ValueType.CHAR
    ENGINEHEUR = 204, ValueType.BACKEND_DESCRIPTOR
    EXECUTION_PLAN = 407, ValueType.BACKEND_DESCRIPTOR
    ENGINE = 1307, ValueType.BACKEND_DESCRIPTOR

    @property
    def number(self) -> int:
        return self.value[0]

    @property
    def value_type(self) -> ValueType:
        return self.value[1]


class DescribedBackend(CudnnBackend):
    """Sets the description of a device where a handle would be set."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        description: Any = {DeviceAttribute.JSON: (DATA / "cudnn" / "h200.json").read_bytes()}
        kind: Any = DeviceKind.DEVICEPROP
        self.device = super().make(kind, description)

    def make(self, kind: Kind, values: Any) -> int:
        handles = (Attribute.OPERATIONGRAPH_HANDLE, Attribute.EXECUTION_PLAN_HANDLE)
        kept = {name: value for name, value in values.items() if name not in handles}
        if kind.name in DeviceAttribute.__members__:
            # A plan takes the device before its text.
            kept = {DeviceAttribute[kind.name]: self.device, **kept}
        return super().make(kind, kept)


def find_library(package: str, name: str) -> str:
    """Returns the path of a library of a wheel of NVIDIA; skips the test without it."""
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec(package)
        for folder in (found and found.submodule_search_locations) or ():
            for path in pathlib.Path(folder, "lib").glob(f"{name}.so.*"):
                return str(path)
    pytest.skip(f"needs the wheel of {package}, which is not installed")


@pytest.fixture(scope="module")
def backend() -> DescribedBackend:
    path = find_library("nvidia.cudnn", "libcudnn")
    # cuDNN looks for it where the other wheels are, and ends the process where it is not.
    ctypes.CDLL(find_library("nvidia.cublas", "libcublasLt"), ctypes.RTLD_GLOBAL)
    return DescribedBackend(ctypes.CDLL(path))


def dense(dims: tuple[int, ...], dtype: str, *, has_features_last: bool) -> Tensor:
    order = [1, *reversed(range(2, len(dims))), 0] if has_features_last else None
    strides, step = [0] * len(dims), 1
    for dim in order or reversed(range(len(dims))):
        strides[dim], step = step, step * dims[dim]
    return Tensor(dtype, dims, tuple(strides))


def make_call(
    direction: Direction, dtype: str = "float32", *, has_features_last: bool = True, **changes: Any
) -> Convolution:
    x, w, y = (
        dense(dims, dtype, has_features_last=has_features_last)
        for dims in ((2, 8, 16, 16), (16, 8, 3, 3), (2, 16, 16, 16))
    )
    window = Window((1, 1), (1, 1), (1, 1))
    call = Convolution(direction, x, w, y, window, workspace_bytes=WORKSPACE_BYTES)
    return dataclasses.replace(call, **changes)


def make_plan(backend: CudnnBackend, call: Any) -> PlanParts:
    return PlanMaker(backend, 0).make_plan(call)


def read_algorithm(backend: CudnnBackend, parts: PlanParts) -> Algorithm:
    """Returns engine and knobs of a plan, as XLA reads and keeps them."""

    def read(owner: int, attribute: Attribute, kind: Kind, count: int) -> Iterator[int]:
        made = []
        for _ in range(count):
            with backend.open_descriptor(kind) as descriptor:
                made.append(descriptor)
        yield from backend.read_descriptors(owner, attribute, made)

    (config,) = read(parts.plan, Attribute.EXECUTION_PLAN_ENGINE_CONFIG, Kind.ENGINECFG, 1)
    (engine,) = read(config, Attribute.ENGINECFG_ENGINE, Kind.ENGINE, 1)
    choices = read(config, Attribute.ENGINECFG_KNOB_CHOICES, Kind.KNOB_CHOICE, KNOB_COUNT)
    knobs = [
        (
            backend.read_numbers(choice, Attribute.KNOB_CHOICE_KNOB_TYPE)[0],
            backend.read_numbers(choice, Attribute.KNOB_CHOICE_KNOB_VALUE)[0],
        )
        for choice in choices
    ]
    (number,) = backend.read_numbers(engine, Attribute.ENGINE_GLOBAL_INDEX)
    return Algorithm(number, tuple(knobs))


def check_round_trip(backend: CudnnBackend, call: Convolution) -> None:
    """Checks that engine and knobs, kept and set again, give the same plan."""
    chosen = make_plan(backend, call)
    algorithm = read_algorithm(backend, chosen)
    again = make_plan(backend, dataclasses.replace(call, algorithm=algorithm))
    assert read_algorithm(backend, again) == algorithm
    assert again.workspace_bytes == chosen.workspace_bytes


@pytest.mark.parametrize("has_features_last", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("direction", Direction)
def test_plans_of_convolutions_are_made_again_from_engine_and_knobs(
    backend: DescribedBackend, direction: Direction, dtype: str, has_features_last: bool
) -> None:
    check_round_trip(backend, make_call(direction, dtype, has_features_last=has_features_last))


@pytest.mark.parametrize("name", ["groups", "one dimension", "three dimensions"])
def test_other_shapes(backend: DescribedBackend, name: str) -> None:
    sizes: dict[str, tuple[Any, Any, Any, Window]] = {
        "groups": (
            *((2, 8, 16, 16), (16, 4, 3, 3), (2, 16, 7, 7)),
            Window((1, 1), (2, 2), (2, 2)),
        ),
        "one dimension": (
            *((2, 8, 16, 1), (16, 8, 3, 1), (2, 16, 16, 1)),
            Window((1, 0), (1, 1), (1, 1)),
        ),
        "three dimensions": (
            *((2, 8, 8, 8, 8), (16, 8, 3, 3, 3), (2, 16, 8, 8, 8)),
            Window((1,) * 3, (1,) * 3, (1,) * 3),
        ),
    }
    *dims, window = sizes[name]
    x, w, y = (dense(each, "float32", has_features_last=True) for each in dims)
    check_round_trip(backend, make_call(Direction.FORWARD, x=x, w=w, y=y, window=window))


# Others are compiled at run time, which asks for the driver's library.
@pytest.mark.parametrize("activation", [Activation.NONE, Activation.RELU])
def test_what_follows_a_convolution(backend: DescribedBackend, activation: Activation) -> None:
    bias = Tensor("float32", (1, 16, 1, 1), (16, 1, 16, 16))
    epilogue = Epilogue(bias, activation, slope=0.25)
    call = make_call(Direction.FORWARD, epilogue=epilogue)
    check_round_trip(backend, call)


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (Algorithm(9999), "cudnnBackendFinalize(ENGINE) returned CUDNN_STATUS_NOT_SUPPORTED"),
        (Algorithm(0, ((77, 5),)), "returned CUDNN_STATUS_NOT_SUPPORTED"),
    ],
)
def test_an_engine_or_a_knob_that_is_not_known_is_refused(
    backend: DescribedBackend, algorithm: Algorithm, reason: str
) -> None:
    with pytest.raises(CudnnError) as raised:
        make_plan(backend, make_call(Direction.FORWARD, algorithm=algorithm))
    assert reason in str(raised.value)


def test_a_graph_in_another_form_is_refused(backend: DescribedBackend) -> None:
    with pytest.raises(CudnnError, match=r"cudnnBackendFinalize\(EXECUTION_PLAN\) returned"):
        make_plan(backend, CompiledGraph(b'{"cudnnVersion": 1}', (1,)))
