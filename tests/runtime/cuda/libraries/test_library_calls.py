"""Transforms, scalings and solves in graphs, with stand-ins that compute on host memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost, make_cuda_replay, make_device
from tests.fakes.definitions import make_definition, make_stage, take_results
from tests.fakes.fake_libraries import BLAS_MAPS, FFT_MAPS, FakeBlas, FakeFft, make_libraries
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.scope import Scope
from tracegraph.runtime.cuda.libraries.cublas import MIB, CuBlas, count_workspace_bytes
from tracegraph.runtime.cuda.libraries.cufft import CuFft
from tracegraph.runtime.definition.library_calls import (
    LibraryCall,
    Scale,
    Transform,
    TriangularSolve,
)
from tracegraph.runtime.definition.library_nodes import LibraryCallNode
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode
from tracegraph.runtime.errors import CudaError, UnsupportedError
from tracegraph.runtime.plan_cache import PlanCache

FORWARD = Transform("C2C", False, (8,), (8,), (8,), 3)
REAL = Transform("R2C", False, (4, 6), (4, 6), (4, 4))
INVERSE = Transform("Z2D", True, (5,), (3,), (5,), 2)
SOLVE = TriangularSolve("float32", True, True, False, "N", 3, 2)


@dataclasses.dataclass
class Bench:
    """A device with stand-ins for its libraries."""

    device: CudaOnHost
    fft: FakeFft
    blas: FakeBlas
    cache: PlanCache[Any]

    def run(self, call: LibraryCall, *, workspace: int = 64, **arrays: Any) -> list[np.ndarray]:
        """Captures a call on copies of arrays and replays it; returns all of them afterwards.

        Args:
            call: its operands are the arrays, by role.
            workspace: bytes.
            arrays: by role, in the order of the results.
        """
        replay = self.capture(call, workspace=workspace, **arrays)
        replay.settle()
        replay.load(list(enumerate(arrays.values())))
        replay.launch()
        return [np.asarray(result) for result in take_results(replay)]

    def capture(self, call: LibraryCall, *, workspace: int = 64, **arrays: Any) -> Any:
        """Captures a call on copies of arrays."""
        uses = {role: BufferUse(f"{role}.own", 0, each.nbytes) for role, each in arrays.items()}
        copies = [CopyNode(role, use._replace(buffer=role), use) for role, use in uses.items()]
        operands = [*uses.items()]
        if workspace:
            operands.append(("workspace", BufferUse("workspace", 0, workspace)))
        node = LibraryCallNode("call", call, tuple(operands))
        edges = [(index, len(copies)) for index in range(len(copies))]
        types = {f"{role}{tail}": each for role, each in arrays.items() for tail in ("", ".own")}
        types["workspace"] = np.zeros(max(workspace, 1), np.uint8)
        outputs = " ".join(use.buffer for use in uses.values())
        definition = make_definition(
            make_stage(*copies, node, edges=edges),
            inputs=" ".join(arrays),
            outputs=outputs,
            types=types,
        )
        return make_cuda_replay(self.device, definition)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    device = make_device(monkeypatch)
    nvmath = make_libraries(device.driver)
    cache: PlanCache[Any] = PlanCache()
    context = device.context
    maps = FFT_MAPS + BLAS_MAPS
    monkeypatch.setattr(device, "_cufft", CuFft(context.order, cache, lambda: nvmath, lambda: maps))
    monkeypatch.setattr(device, "_cublas", CuBlas(context, lambda: nvmath, lambda: maps))
    return Bench(device, nvmath.bindings.cufft, nvmath.bindings.cublas, cache)


def complexes(*shape: int, dtype: Any = np.complex64) -> np.ndarray:
    rng = np.random.default_rng(len(shape))
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)


def test_transform_of_a_batch(bench: Bench) -> None:
    x = complexes(3, 8)
    _, result = bench.run(FORWARD, source=x, target=np.zeros_like(x))
    np.testing.assert_allclose(result, np.fft.fft(x), rtol=1e-5)
    _, rank, *rest = bench.fft.calls[2][1]
    assert (rank, rest) == (1, [[8], [8], 1, 8, [8], 1, 8, 41, 3])


def test_transform_of_reals_in_two_dimensions(bench: Bench) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    _, result = bench.run(REAL, source=x, target=np.zeros((4, 4), np.complex64))
    np.testing.assert_allclose(result, np.fft.rfft2(x), rtol=1e-5)


def test_transform_to_reals_is_not_scaled(bench: Bench) -> None:
    x = np.fft.rfft(np.arange(10.0).reshape(2, 5))
    spoiled, result = bench.run(INVERSE, source=x, target=np.zeros((2, 5)))
    np.testing.assert_allclose(result, 5 * np.arange(10.0).reshape(2, 5), atol=1e-12)
    # That is why lowering gives it a copy, and why it counts as written.
    assert np.isnan(spoiled).all()
    assert "source" in INVERSE.written


def test_workspace_and_stream_are_set_before_the_call(bench: Bench) -> None:
    x = complexes(3, 8)
    bench.capture(FORWARD, source=x, target=np.zeros_like(x))
    names = [name for name, _ in bench.fft.calls]
    assert names[3:] == ["set_stream", "set_work_area", "exec_c2c"]


def test_a_stream_is_the_graph_s_own_and_outlives_it(bench: Bench) -> None:
    x = complexes(3, 8)
    graphs = [bench.capture(FORWARD, source=x, target=np.zeros_like(x)) for _ in range(2)]
    streams = [arguments[1] for name, arguments in bench.fft.calls if name == "set_stream"]
    assert len(set(streams)) == 2
    graphs.clear()
    assert set(streams) <= set(bench.device.driver.live_handles())
    bench.capture(FORWARD, source=x, target=np.zeros_like(x))
    assert bench.fft.calls[-3][1][1] in streams


def test_transform_without_workspace(bench: Bench) -> None:
    bench.fft.workspace_bytes = 0
    x = complexes(3, 8)
    _, result = bench.run(FORWARD, workspace=0, source=x, target=np.zeros_like(x))
    np.testing.assert_allclose(result, np.fft.fft(x), rtol=1e-5)


def test_a_plan_that_needs_more_than_was_planned_is_an_error(bench: Bench) -> None:
    x = complexes(3, 8)
    bench.fft.workspace_bytes = 128
    with pytest.raises(CudaError, match="cuFFT needs 128 bytes to work in, and not 64"):
        bench.capture(FORWARD, source=x, target=np.zeros_like(x))


def test_planning_and_capturing_share_a_plan(bench: Bench) -> None:
    x = complexes(3, 8)
    assert bench.device.plan_library_call(FORWARD) == 64
    bench.run(FORWARD, source=x, target=np.zeros_like(x))
    bench.run(FORWARD, source=x, target=np.zeros_like(x))
    assert [name for name, _ in bench.fft.calls].count("create") == 1
    assert bench.cache.keys == (FORWARD,)


def test_a_plan_of_a_living_graph_outlives_the_cache(bench: Bench) -> None:
    x = complexes(3, 8)
    replay = bench.capture(FORWARD, source=x, target=np.zeros_like(x))
    bench.cache.clear()
    assert (bench.cache.size, len(bench.fft.alive)) == (0, 1)
    del replay
    bench.cache.clear()
    assert bench.fft.alive == {}


@pytest.mark.parametrize("call", ["create", "make_plan_many64", "set_auto_allocation"])
def test_a_plan_that_fails_leaves_nothing(bench: Bench, call: str) -> None:
    bench.fft.fail_on = call
    with pytest.raises(CudaError, match="failed: CUFFT_INVALID_PLAN") as raised:
        bench.device.plan_library_call(FORWARD)
    assert "C2C forward of 8, 3 times" in str(raised.value)
    assert (bench.fft.alive, bench.cache.size) == ({}, 0)
    assert bench.device.plan_library_call(FORWARD) == 64


def test_a_call_that_fails_leaves_the_device_usable(bench: Bench) -> None:
    x = complexes(3, 8)
    bench.fft.fail_on = "exec_c2c"
    with pytest.raises(CudaError, match="cufftExecC2C failed: CUFFT_INVALID_PLAN") as raised:
        bench.capture(FORWARD, source=x, target=np.zeros_like(x))
    assert "fft call" in str(raised.value)
    assert not bench.device.driver._captures
    _, result = bench.run(FORWARD, source=x, target=np.zeros_like(x))
    np.testing.assert_allclose(result, np.fft.fft(x), rtol=1e-5)


def test_another_library_than_that_of_xla_is_refused(bench: Bench) -> None:
    maps = FFT_MAPS + FFT_MAPS.replace("42", "43").replace("/opt", "/usr/lib")
    cufft, nvmath = bench.device._cufft, make_libraries(bench.device.driver)
    other = CuFft(cufft._order, PlanCache(), lambda: nvmath, lambda: maps)
    with pytest.raises(CudaError, match="2 copies of libcufft are loaded"):
        other.find_plan(FORWARD)
    assert nvmath.bindings.cufft.alive == {}
    blas = CuBlas(bench.device.context, lambda: nvmath, lambda: "")
    with pytest.raises(CudaError, match="0 copies of libcublas are loaded"):
        blas.open()
    assert nvmath.bindings.cublas.alive == []


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_scale(bench: Bench, dtype: str) -> None:
    x = complexes(10, dtype=np.complex128).astype(dtype) if dtype[0] == "c" else np.ones(10, dtype)
    factor = float(np.finfo(dtype).dtype.type(1) / 10)
    (result,) = bench.run(Scale(dtype, 10, factor), workspace=0, target=x)
    assert (result == x * np.asarray(factor, dtype)).all()
    name, (count, used, _) = bench.blas.calls[-1]
    letter = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}[dtype]
    assert (name, count, used) == (f"{letter}scal", 10, np.asarray(factor, dtype))


@pytest.mark.parametrize("is_left", [True, False])
@pytest.mark.parametrize("is_lower", [True, False])
@pytest.mark.parametrize("is_unit", [True, False])
@pytest.mark.parametrize("transpose", ["N", "T", "C"])
def test_solve(
    bench: Bench, *, is_left: bool, is_lower: bool, is_unit: bool, transpose: str
) -> None:
    for dtype, count in (("float64", 1), ("complex128", 3)):
        order = 3 if is_left else 2
        solve = TriangularSolve(dtype, is_left, is_lower, is_unit, transpose, 3, 2, count)
        a = complexes(count, order, order, dtype=np.complex128) + 3 * np.eye(order)
        b = complexes(count, 3, 2, dtype=np.complex128)
        a, b = (np.real(each) if dtype == "float64" else each for each in (a, b))
        # Columns first.
        given = [np.ascontiguousarray(each.swapaxes(1, 2)) for each in (a, b)]
        _, found = bench.run(solve, a=given[0], b=given[1])
        triangle = np.tril(a) if is_lower else np.triu(a)
        if is_unit:
            triangle[:, range(order), range(order)] = 1
        operator = {"N": triangle, "T": triangle.swapaxes(1, 2)}.get(transpose)
        if operator is None:
            operator = triangle.conj().swapaxes(1, 2)
        x = found.swapaxes(1, 2)
        product = operator @ x if is_left else x @ operator
        np.testing.assert_allclose(product, b, atol=1e-10)


def test_workspace_of_a_solve_is_set_after_the_stream(bench: Bench) -> None:
    bench.capture(SOLVE, a=np.eye(3, dtype=np.float32), b=np.ones((2, 3), np.float32))
    names = [name for name, _ in bench.blas.calls]
    assert names == ["create", "set_stream", "set_workspace", "strsm"]
    assert bench.blas.calls[2][1][1] == 64


def test_addresses_of_a_batch_are_written_once(bench: Bench) -> None:
    solve = dataclasses.replace(SOLVE, batch_count=4)
    a = np.stack([np.eye(3, dtype=np.float32) * (i + 1) for i in range(4)])
    b = np.ones((4, 2, 3), np.float32)
    replay = bench.capture(solve, a=a, b=b)
    replay.settle()
    replay.load([(0, a), (1, b)])
    before = bench.device.driver.count_calls("copy_async")
    for _ in range(2):
        replay.launch()
        result = np.asarray(take_results(replay)[1].jax())
        assert [part[0, 0] for part in result] == [1, 0.5, np.float32(1) / 3, 0.25]
    assert bench.device.driver.count_calls("copy_async") - before <= 2


def test_a_failed_solve_leaves_the_device_usable(bench: Bench) -> None:
    arrays: dict[str, Any] = {"a": np.eye(3, dtype=np.float32), "b": np.ones((2, 3), np.float32)}
    for call in ("create", "set_workspace", "strsm"):
        bench.blas.fail_on = call
        with pytest.raises(CudaError, match="failed: CUBLAS_STATUS_INVALID_VALUE"):
            bench.capture(SOLVE, **arrays)
    _, result = bench.run(SOLVE, **arrays)
    assert (result == 1).all()


def test_workspace_is_that_of_a_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_workspace_bytes(SOLVE, 9) == 32 * MIB
    assert count_workspace_bytes(SOLVE, 8) == 4 * MIB
    assert count_workspace_bytes(Scale("float32", 4, 0.5), 9) == 0
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert count_workspace_bytes(SOLVE, 9) == 128 << 10
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert count_workspace_bytes(SOLVE, 9) == 0


def test_missing_bindings_are_named_with_their_package(bench: Bench) -> None:
    def load() -> Any:
        raise UnsupportedError(
            "the package `nvmath` is missing",
            where="here",
            why="planted",
            fix="pip install nvmath-python",
            anchor="unsupported",
        )

    cufft = CuFft(bench.device.context.order, PlanCache(), load)
    with pytest.raises(UnsupportedError, match="the package `nvmath` is missing"):
        cufft.find_plan(FORWARD)
    scope = Scope((), plan_call=lambda call: cufft.find_plan(call).workspace_bytes)  # type: ignore[arg-type]
    with pytest.raises(Refusal, match=r"`nvmath` is missing \(pip install nvmath-python\)"):
        scope.add_workspace(FORWARD)
