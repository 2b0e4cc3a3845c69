"""Workspaces of matmuls: what a graph holds, what is permitted, 100 captures."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import jax
import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost, floats, kernel, make_cuda_replay, make_device
from tests.fakes.definitions import make_definition, make_stage
from tests.fakes.fake_nvmath import FakeLt, make_nvmath
from tracegraph.lowering.device_program import DeviceStep, list_device_steps
from tracegraph.lowering.limit_workspaces import limit_workspaces
from tracegraph.lowering.planning.split_temporaries import split_allocations
from tracegraph.lowering.workspaces import measure_workspaces
from tracegraph.lowering.xla.program import Allocation, AllocationKind, XlaProgram
from tracegraph.runtime.cuda.libraries.cublaslt import CublasLt
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.library_nodes import Matmul, MatmulNode, MatrixLayout
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.errors import UnsupportedError

LAYOUT = MatrixLayout("float32", 2, 2, 2)
WORKSPACE_BYTES = 1 << 20
MAP = "7f0000-7f1000 r-xp 00000000 08:01 42        /opt/cu13/libcublasLt.so.13"


def make_matmul(name: str, operands: str, nbytes: int = WORKSPACE_BYTES) -> MatmulNode:
    """Returns a matmul of float32[2, 2]; the last operand is the workspace unless it is ``-``."""
    a, b, d, workspace = operands.split()
    uses = [(role, BufferUse(each, 0, 16)) for role, each in zip("abd", (a, b, d), strict=True)]
    if workspace != "-":
        uses.append(("workspace", BufferUse(workspace, 0, nbytes)))
    matmul = Matmul(
        LAYOUT,
        LAYOUT,
        LAYOUT,
        LAYOUT,
        1.0,
        0.0,
        "32F",
        "float32",
        workspace_limit_bytes=WORKSPACE_BYTES,
    )
    return MatmulNode(name, matmul, tuple(uses))


def define(*nodes: MatmulNode, offsets: dict[str, int] | None = None) -> GraphDefinition:
    """Returns a graph of matmuls whose workspaces ``v`` and ``w`` are side by side."""
    room = jax.ShapeDtypeStruct((WORKSPACE_BYTES,), np.uint8)
    places = {"x": 0, "y": 4096, "t": 8192, "v": 1 << 14, "w": (1 << 14) + WORKSPACE_BYTES}
    return make_definition(
        make_stage(*nodes, edges=[(i, i + 1) for i in range(len(nodes) - 1)]),
        types={"v": room, "w": room},
        offsets=places | (offsets or {}),
        arena_bytes=(1 << 14) + 2 * WORKSPACE_BYTES,
    )


@pytest.mark.parametrize(
    ("nodes", "offsets", "expected"),
    [
        (["x x y -"], {}, "no workspace"),
        (
            ["x x y w"],
            {},
            "workspace of 1 matmul: 1,048,576 bytes at most, together 1,048,576 bytes of the arena",
        ),
        (["x x t w", "t t y w"], {}, "2 matmuls: 1,048,576 bytes at most, together 1,048"),
        (["x x t v", "t t y w"], {}, "at most, together 2,097,152 bytes of the arena"),
        (["x x t v", "t t y w"], {"w": (1 << 14) + 512}, "together 1,049,088 bytes of the arena"),
        (["x x t v", "t t y w"], {"w": 1 << 14}, "together 1,048,576 bytes of the arena"),
    ],
)
def test_the_workspaces_of_a_graph(
    nodes: list[str], offsets: dict[str, int], expected: str
) -> None:
    matmuls = [make_matmul(f"dot.{index}", text) for index, text in enumerate(nodes)]
    assert expected in str(measure_workspaces(define(*matmuls, offsets=offsets)))


def test_other_nodes_have_none() -> None:
    definition = make_definition(make_stage(kernel("double", "x", "y")))
    assert measure_workspaces(definition).count == 0


def make_program(workspace_bytes: int) -> XlaProgram:
    matmul = make_matmul("dot", "#p #p #o #t", workspace_bytes)
    uses = dict(matmul.operands)
    step = DeviceStep(matmul, (uses["a"],), (uses["d"], uses["workspace"]))
    kinds = {"#p": AllocationKind.PARAMETER, "#o": AllocationKind.OUTPUT}
    allocations = tuple(Allocation(name, 16, kind) for name, kind in kinds.items())
    temporary = Allocation("#t", workspace_bytes, AllocationKind.TEMPORARY)
    other = kernel("double", "#p", "#o")
    second = DeviceStep(other, (uses["a"],), (uses["d"],))
    return XlaProgram("f", (*allocations, temporary), (step, second), ("#o",))


def plan_bytes(program: XlaProgram) -> list[int]:
    return [part.nbytes for part in split_allocations(program.steps, {"#t"}, ()).parts]


@pytest.mark.parametrize(
    ("permitted_bytes", "expected"),
    [(None, [4096]), (1 << 20, [4096]), (4096, [4096]), (1024, [1024]), (0, [])],
)
def test_only_what_is_permitted_is_planned(
    permitted_bytes: int | None, expected: list[int]
) -> None:
    program = make_program(4096)
    limited = limit_workspaces(program, lambda _: None, permitted_bytes)
    assert plan_bytes(limited) == expected
    matmul = next(list_device_steps(limited.steps)).node
    assert isinstance(matmul, MatmulNode)
    assert dict(matmul.operands)["workspace"].nbytes == sum(expected)
    assert limited.steps[1] is program.steps[1]
    assert [use for role, use in matmul.operands if role != "workspace"] == [
        use for role, use in make_matmul("dot", "#p #p #o -").operands if role != "workspace"
    ]


@pytest.mark.parametrize(("needed_bytes", "permitted_bytes"), [(64, None), (0, 4096), (512, 0)])
def test_what_the_algorithm_needs_comes_before_what_is_permitted(
    needed_bytes: int, permitted_bytes: int | None
) -> None:
    # An algorithm that needs more than is permitted is never chosen.
    limited = limit_workspaces(make_program(4096), lambda _: needed_bytes, permitted_bytes)
    assert plan_bytes(limited) == ([needed_bytes] if needed_bytes else [])


def test_a_gpu_is_asked_what_the_algorithm_needs(device: CudaOnHost, lt: FakeLt) -> None:
    matmul = make_matmul("dot", "x x y w")
    assert device.find_workspace_bytes(matmul) == 4096
    lt.algorithms = [(0, 0)]
    other = dataclasses.replace(matmul.matmul, alpha=2.0)
    assert device.find_workspace_bytes(dataclasses.replace(matmul, matmul=other)) == 0
    assert list(lt.alive.values()) == ["create"]


def test_without_the_bindings_nothing_is_said(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> Any:
        raise UnsupportedError("nvmath is missing", where="", why="", fix="", anchor="x")

    monkeypatch.setitem(device._libraries, "matmul", CublasLt(load, lambda: MAP))
    assert device.find_workspace_bytes(make_matmul("dot", "x x y w")) is None


def test_the_library_gets_no_more_than_what_was_planned() -> None:
    nvmath = make_nvmath()
    lt: FakeLt = nvmath.bindings.cublasLt
    lt.algorithms = [(2048, 0), (512, 0)]
    limited = limit_workspaces(make_program(4096), lambda _: 1024, None)
    matmul = next(list_device_steps(limited.steps)).node
    assert isinstance(matmul, MatmulNode)
    CublasLt(lambda: nvmath, lambda: MAP).enqueue(matmul, lambda use: 4096, 77)
    (call,) = lt.list_calls("matmul")
    # The entry of the list that fits.
    assert (call["algorithm"], call["workspace"]) == (1, (4096, 1024))


@pytest.fixture
def lt() -> FakeLt:
    return make_nvmath().bindings.cublasLt


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, lt: FakeLt) -> CudaOnHost:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    device = make_device(monkeypatch)
    nvmath = make_nvmath()
    nvmath.bindings.cublasLt = lt
    lt.algorithms = [(4096, 0)]
    monkeypatch.setitem(device._libraries, "matmul", CublasLt(lambda: nvmath, lambda: MAP))
    return device


def capture(device: CudaOnHost) -> Any:
    replay = make_cuda_replay(device, define(make_matmul("dot", "x x y w")))
    replay.load([(0, floats([1, 2, 3, 4]))])
    replay.launch()
    return replay


def test_repeat_graph_capture_cublas_workspace_memory(device: CudaOnHost, lt: FakeLt) -> None:
    """As PyTorch tests it: a hundred captures of one matmul, each in a graph of its own."""
    capture(device)
    gc.collect()
    handles, alive = device.driver.live_handles(), dict(lt.alive)
    reserved_bytes = device.allocator.statistics.all.reserved_bytes.current
    for _ in range(100):
        replay = capture(device)
        (call,) = lt.list_calls("matmul")[-1:]
        # The workspace lies in the arena, and so in the pool that statistics count.
        (start, nbytes) = replay.arena.ranges[0]
        address, used_bytes = call["workspace"]
        assert start <= address
        assert address + used_bytes <= start + nbytes
        del replay
    gc.collect()
    assert device.allocator.statistics.all.reserved_bytes.current == reserved_bytes
    assert device.driver.live_handles() == handles
    # One handle of the library, and one question for the algorithm, whatever is captured.
    assert lt.alive == alive
    assert len(lt.list_calls("create")) == len(lt.list_calls("heuristic")) == 1
    # Each is captured twice: Note [Moved libraries].
    assert len(lt.list_calls("matmul")) == 202
