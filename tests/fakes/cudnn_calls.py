"""Calls of cuDNN, and an owner of the stand-in of its library, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.cuda_on_host import CudaOnHost, make_device
from tests.fakes.definitions import SIZE
from tests.fakes.fake_cudnn import Engine, Execution, FakeCudnn
from tracegraph.runtime.cuda.libraries.cudnn import Cudnn
from tracegraph.runtime.cuda.libraries.cudnn_backend import Kind
from tracegraph.runtime.definition.cudnn_calls import (
    Algorithm,
    CompiledGraph,
    Convolution,
    CudnnCall,
    Direction,
    Tensor,
    W,
    Window,
    X,
    Y,
)
from tracegraph.runtime.definition.library_nodes import CudnnNode
from tracegraph.runtime.definition.nodes import BufferUse

X_TENSOR = Tensor("float32", (2, 8, 16, 16), (2048, 1, 128, 8))
W_TENSOR = Tensor("float32", (16, 4, 3, 3), (36, 1, 12, 4))
Y_TENSOR = Tensor("float32", (2, 16, 7, 7), (784, 1, 112, 16))
BIAS = Tensor("float32", (1, 16, 1, 1), (16, 1, 16, 16))
CONVOLUTION = Convolution(
    Direction.FORWARD,
    X_TENSOR,
    W_TENSOR,
    Y_TENSOR,
    Window((1, 1), (2, 2), (2, 2)),
    Algorithm(5, ((3, 7), (9, 0))),
    workspace_bytes=64,
)
GRAPH = CompiledGraph(
    b"the plan", (1, 2, 3, 7, 10), ((10, b"\0\0\0\x3e"),), ((7, 32),), 64, 64 + 256
)
ENGINES = {5: Engine((3, 9), 48), 6: Engine((), 16)}


def make_cudnn_device(monkeypatch: pytest.MonkeyPatch, library: FakeCudnn) -> CudaOnHost:
    """Returns a device whose cuDNN adds what it executes to the graph that is captured."""
    device = make_device(monkeypatch)
    device._cudnn._load = library.make_backend

    def act(execution: Execution) -> None:
        if execution.stream in device.driver._captures:
            device.driver.add_captured(execution.stream, "work of cuDNN")

    library.act = act
    return device


def use(buffer: str) -> BufferUse:
    return BufferUse(buffer, 0, 4 * SIZE)


def node(
    name: str, reads: str, target: str, call: CudnnCall = CONVOLUTION, workspace: str = "s"
) -> CudnnNode:
    """Returns a call on whole buffers."""
    uids = (X, W, Y) if isinstance(call, Convolution) else (1, 2, 3)
    operands = tuple(
        (uid, use(buffer)) for uid, buffer in zip(uids, (*reads.split(), target), strict=True)
    )
    return CudnnNode(name, call, operands, (uids[-1],), use(workspace))


def make_cudnn(library: FakeCudnn) -> Cudnn:
    """Returns the library of a GPU that is not there."""
    order: Any = FakeOrder()
    return Cudnn(order, lambda: pytest.fail("asks for memory"), library.make_backend)


def list_operations(library: FakeCudnn, call: Convolution) -> list[dict[str, Any]]:
    """Returns the operations of the graph that a call is described as."""
    owner = make_cudnn(library)
    assert owner.find_problem(call) == ""
    (graph,) = library.list_alive(Kind.OPERATIONGRAPH)
    return graph["OPERATIONGRAPH_OPS"]


class FakeOrder:
    """A stream without a GPU."""

    stream = 0x77

    def use_context(self) -> Any:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
