"""Programs of XLA that fail: nothing reads what they have not made, and the next call works."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.failed_arrays import make_failed_array
from tests.fakes.ffi_handlers import failing, make_capsule
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.oracles import error_lines
from tracegraph.capturing.unlowered import UNLOWERED_PRIMITIVES
from tracegraph.lowering import reference
from tracegraph.runtime.cuda.graphs.stages import CudaStage, EagerStage
from tracegraph.verification import reference_run

X = jnp.arange(1.0, 5.0)


@pytest.fixture(scope="module")
def handler() -> str:
    """A handler that writes sevens, but for what `failing` encloses."""
    jax.ffi.register_ffi_target("tracegraph_fails", make_capsule("fill_or_fail"), platform="cpu")
    return "tracegraph_fails"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    monkeypatch.setitem(UNLOWERED_PRIMITIVES, "sort", "sort")
    return capture_for_gpu(monkeypatch)


def call_handler(handler: str, x: Any) -> Any:
    return jax.ffi.ffi_call(handler, jax.ShapeDtypeStruct((4,), jnp.int8))(x * 2) + 1


def assert_reference_failed(error: BaseException, name: str, words: str) -> None:
    error_lines.match(
        error,
        f"XLA's executable for `{name}` failed when it was called to verify the new graph",
        "verification at capture: ",
        "a graph is used only if it computes what XLA's executable computes",
        "mend what XLA names",
    )
    assert words in str(error)
    assert isinstance(error.__cause__, jax.errors.JaxRuntimeError | ValueError)


def test_a_handler_that_fails_at_the_capture(handler: str) -> None:
    captured: Any = tg.capture(lambda x: call_handler(handler, x), name="step")
    for _ in range(2):
        with failing(), pytest.raises(tg.VerificationError) as caught:
            captured(X)
        assert_reference_failed(caught.value, "step", "planted: the matrix is odd")
        assert captured.cache_info().currsize == 0
    np.testing.assert_array_equal(captured(X), [8] * 4)
    assert captured.cache_info().misses == 1


@pytest.mark.parametrize("verify", [True, False])
def test_a_handler_that_fails_later(handler: str, verify: bool) -> None:
    def step(state: Any, x: Any) -> Any:
        return state + 1, call_handler(handler, x)

    captured: Any = tg.capture(step, donate_argnums=0, verify=verify)
    for count in range(3):
        state, result = captured(jnp.float32(count), X)
        assert float(state) == count + 1
        np.testing.assert_array_equal(result, [8] * 4)
        with failing(), pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="planted"):
            np.asarray(captured(jnp.float32(count), X)[1])
    assert captured.cache_info().misses == 1


@pytest.mark.parametrize("verify", [True, False])
def test_a_callback_that_fails_in_partial_mode(verify: bool) -> None:
    is_broken = [True]

    def call_back(x: Any) -> Any:
        if is_broken:
            raise ValueError("planted")
        return x

    def step(x: Any) -> Any:
        return jax.pure_callback(call_back, jax.ShapeDtypeStruct(X.shape, X.dtype), x * 2) + 1

    captured: Any = tg.capture(step, mode="partial", verify=verify, prefer="graph")
    for _ in range(2):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="planted"):
            captured(X)
    for _ in range(2):
        is_broken.clear()
        np.testing.assert_array_equal(captured(X), X * 2 + 1)
        is_broken.append(True)
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="planted"):
            captured(X)
    assert captured.cache_info().misses == 1


def test_a_reference_that_was_never_made(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the executable returns arrays that hold the error; their addresses are none."""

    def run_regions(regions: Any, inputs: Any) -> Any:
        values = reference.run_regions(regions, inputs)
        return values | {name: make_failed_array() for each in regions for name in each.outputs}

    captured: Any = tg.capture(lambda x: x * 2 + 1, name="step")
    with monkeypatch.context() as patch:
        patch.setattr(reference_run, "run_regions", run_regions)
        # It would be read by its address.
        patch.setattr(device.comparison, "find_unequal", None)
        with pytest.raises(tg.VerificationError) as caught:
            captured(X)
    assert_reference_failed(caught.value, "step", "CpuCallback error")
    assert captured.cache_info().currsize == 0
    np.testing.assert_array_equal(captured(X), X * 2 + 1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of each graph that is launched, of those of one capture."""
    seen: list[int] = []
    make = CudaStage.__init__

    def count(stage: CudaStage, *arguments: Any) -> None:
        make(stage, *arguments)
        launch, number = stage.launch, len(made)
        made.append(stage)

        def run() -> None:
            seen.append(number)
            launch()

        stage.launch = run

    made: list[CudaStage] = []
    monkeypatch.setattr(CudaStage, "__init__", count)
    return seen


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("verify", [True, False])
def test_no_graph_reads_what_an_eager_part_has_not_made(
    launched: list[int], verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_broken = [True]
    make = EagerStage.__init__

    def break_calls(stage: EagerStage, *arguments: Any) -> None:
        make(stage, *arguments)
        ((executable, reads, writes),) = stage._calls

        def run(*arrays: Any) -> Any:
            return make_failed_array() if is_broken else executable(*arrays)

        stage._calls = [(run, reads, writes)]

    monkeypatch.setattr(EagerStage, "__init__", break_calls)
    captured: Any = tg.capture(
        lambda x: jnp.sort(x * -1) * 2, mode="partial", verify=verify, prefer="graph"
    )
    for _ in range(2):
        launched.clear()
        with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
            captured(X)
        assert len(launched) == 1
    for _ in range(2):
        is_broken.clear()
        np.testing.assert_array_equal(captured(X), jnp.sort(X * -1) * 2)
        is_broken.append(True)
        launched.clear()
        with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
            captured(X)
        assert len(launched) == 1
