"""TRACEGRAPH_LAUNCH_BLOCKING=1: a call returns when its work is done, and raises its own errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost, floats, kernel, make_cuda_replay, make_device
from tests.fakes.definitions import make_definition, make_stage
from tests.fakes.ffi_handlers import failing, make_capsule
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.replaying.jit_call import _make_blocking
from tracegraph.runtime.cuda.graphs.stages import BlockingStage, CudaStage

X = jnp.arange(1.0, 5.0)
ERRORS = (jax.errors.JaxRuntimeError, ValueError)
DOUBLE = make_definition(make_stage(kernel("double", "x", "y")))


@pytest.fixture(scope="module")
def handler() -> str:
    """A handler that writes sevens, but for what `failing` encloses."""
    name = "tracegraph_fails_late"
    jax.ffi.register_ffi_target(name, make_capsule("fill_or_fail"), platform="cpu")
    return name


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEGRAPH_LAUNCH_BLOCKING", "1")


def call_handler(handler: str, x: Any) -> Any:
    return jax.ffi.ffi_call(handler, jax.ShapeDtypeStruct((4,), jnp.int8))(x * 2) + 1


def make_functions(handler: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]]:
    """Returns per case a captured function, its arguments, and what picks the handler's result."""

    def two(x: Any) -> Any:
        return call_handler(handler, x), x + 1

    def step(state: Any, x: Any) -> Any:
        return state + 1, call_handler(handler, x)

    def one(x: Any) -> Any:
        return call_handler(handler, x)

    return {
        "one result": (tg.capture(one), (X,), lambda result: result),
        "two results": (tg.capture(two), (X,), lambda result: result[0]),
        "state": (tg.capture(step, donate_argnums=0), (jnp.zeros(3), X), lambda result: result[1]),
    }


@pytest.mark.usefixtures("blocking")
@pytest.mark.parametrize("case", ["one result", "two results", "state"])
def test_a_failure_on_the_host_is_raised_by_its_call(handler: str, case: str) -> None:
    captured, args, pick = make_functions(handler)[case]
    results = captured(*args)
    for _ in range(2):
        args = (results[0], X) if case == "state" else args
        with failing(), pytest.raises(ERRORS, match="planted: the matrix is odd"):
            captured(*args)
        args = (jnp.zeros(3), X) if case == "state" else args
        results = captured(*args)
        np.testing.assert_array_equal(pick(results), [8] * 4)


@pytest.mark.usefixtures("blocking")
def test_results_are_ready_when_a_call_returns() -> None:
    captured = tg.capture(lambda x: jnp.linalg.matrix_power(x * 0.01, 9))
    x = jnp.ones((300, 300))
    for _ in range(3):
        assert captured(x).is_ready()


@pytest.mark.parametrize("value", ["0", "1"])
def test_unset_no_call_is_wrapped(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRACEGRAPH_LAUNCH_BLOCKING", value)
    captured: Any = tg.capture(lambda x: x + 1)
    captured(X)
    is_wrapped = isinstance(captured._latest.lock_free_call, functools.partial)
    assert is_wrapped == (value == "1")


def test_a_function_that_runs_as_jit_waits() -> None:
    run = _make_blocking(jax.jit(lambda x: jnp.linalg.matrix_power(x * 0.01, 9)))
    assert run(jnp.ones((300, 300))).is_ready()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    return make_device(monkeypatch, is_deferred=True)


@pytest.mark.parametrize("value", ["0", "1"])
def test_a_graph_on_a_gpu_is_waited_for(
    late: CudaOnHost, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TRACEGRAPH_LAUNCH_BLOCKING", value)
    replay = make_cuda_replay(late, DOUBLE)
    replay.load([(0, floats([1] * 4))])
    replay.launch()
    assert late.context.is_idle() == (value == "1")
    (stage,) = replay.stages
    assert type(stage) is (BlockingStage if value == "1" else CudaStage)


@pytest.mark.usefixtures("blocking")
def test_a_graph_on_a_stream_of_its_own_is_waited_for(late: CudaOnHost) -> None:
    replay, side = make_cuda_replay(late, DOUBLE), tg.Stream()
    replay.load([(0, floats([1] * 4))])
    with tg.stream(side):
        replay.launch()
    assert late.driver.query_stream(late.context.order.find_stream(side))
    assert late.context.is_idle()


@pytest.mark.usefixtures("blocking")
def test_an_error_on_a_gpu_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = capture_for_gpu(monkeypatch)
    captured = tg.capture(lambda x: x * 2 + 1, name="step", verify=False)
    np.testing.assert_array_equal(captured(X), X * 2 + 1)
    (symbol,) = [name for name in device.driver.kernels if name.startswith("region")]
    compute = device.driver.kernels[symbol]

    def fail(parameters: tuple[bytes, ...]) -> None:
        compute(parameters)
        device.driver.error = "CUDA_ERROR_ILLEGAL_ADDRESS"
        device.driver.fail_on = "synchronize_stream"

    monkeypatch.setitem(device.driver.kernels, symbol, fail)
    with pytest.raises(tg.CudaError) as raised:
        captured(X)
    assert raised.value.what == "CUDA_ERROR_ILLEGAL_ADDRESS from synchronize_stream"
    assert raised.value.where.startswith("call of `step`: ")
    monkeypatch.setitem(device.driver.kernels, symbol, compute)
    device.driver.fail_on = "synchronize_stream"
    with pytest.raises(tg.CudaError) as raised:
        captured(X)
    assert raised.value.where.startswith("work before the call of `step`: ")
    np.testing.assert_array_equal(captured(X), X * 2 + 1)
