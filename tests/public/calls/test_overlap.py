"""The second trace runs while XLA compiles: what it finds still comes first."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.capturing import capture_lowering
from tracegraph.lowering import compiler
from tracegraph.lowering.kernels.loops.loop_kernels import list_loop_kernels
from tracegraph.runtime.definition.nodes import KernelCode

SECONDS = 240.0
X = np.arange(4, dtype=np.float32)


@pytest.fixture(params=["host", "gpu"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "gpu":
        capture_for_gpu(monkeypatch)
    return request.param


def replace_compilation(
    monkeypatch: pytest.MonkeyPatch, compile_program: Callable[[Callable[[], Any]], Any]
) -> None:
    """Puts a function in the place of XLA; it gets the real compilation."""
    carry = compiler.carry_settings
    monkeypatch.setattr(
        compiler,
        "carry_settings",
        lambda function: lambda: compile_program(carry(function)),
    )


def scale_by_clock(x: Any) -> jax.Array:
    return x * (time.perf_counter_ns() % 1_000_000_007)


def test_a_clock_is_found_beside_the_compilation(target: str):
    captured = tg.capture(scale_by_clock)
    with pytest.raises(tg.CaptureError, match="Python work that changes from one trace"):
        captured(X)
    assert captured.cache_info().captures == 0
    assert captured.pool_bytes == 0


def test_a_failed_compilation_does_not_hide_it(target: str, monkeypatch: pytest.MonkeyPatch):
    def fail(compile_it: Callable[[], Any]) -> Any:
        raise RuntimeError("XLA fails")

    replace_compilation(monkeypatch, fail)
    with pytest.raises(tg.CaptureError, match="Python work that changes") as caught:
        tg.capture(scale_by_clock)(X)
    assert caught.value.__context__ is None
    # The compilation's own error is raised when the traces agree.
    with pytest.raises(RuntimeError, match="XLA fails"):
        tg.capture(jnp.sin)(X)


def test_an_error_before_the_compilation_does_not_hide_it(monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no regions")

    monkeypatch.setattr(capture_lowering, "make_request", fail)
    with pytest.raises(tg.CaptureError, match="Python work that changes"):
        tg.capture(scale_by_clock)(X)
    with pytest.raises(RuntimeError, match="no regions"):
        tg.capture(jnp.sin)(X)


def test_the_second_trace_runs_in_the_calling_thread_before_the_compilation_ends(
    target: str, monkeypatch: pytest.MonkeyPatch
):
    traced_in: list[threading.Thread] = []
    compiled_in: list[threading.Thread] = []
    has_second = threading.Event()

    def function(x: Any) -> jax.Array:
        traced_in.append(threading.current_thread())
        if len(traced_in) == 2:
            has_second.set()
        return x * 2

    def compile_later(compile_it: Callable[[], Any]) -> Any:
        compiled_in.append(threading.current_thread())
        assert has_second.wait(SECONDS)
        return compile_it()

    replace_compilation(monkeypatch, compile_later)
    captured = tg.capture(function, verify=False)
    assert np.array_equal(captured(X), X * 2)
    assert traced_in == [threading.current_thread()] * 2
    assert compiled_in[0] is not threading.current_thread()


def test_an_error_of_the_users_in_the_second_trace_passes(target: str):
    traces: list[int] = []

    def function(x: Any) -> jax.Array:
        traces.append(1)
        if len(traces) == 2:
            raise ZeroDivisionError
        return x * 2

    captured = tg.capture(function)
    with pytest.raises(ZeroDivisionError):
        captured(X)
    assert captured.cache_info().captures == 0
    assert np.array_equal(captured(X), X * 2)


@pytest.mark.parametrize("mode", ["whole", "partial"])
def test_it_is_traced_twice_where_nothing_is_compiled(mode: Any):
    traces: list[int] = []

    def function(x: Any) -> jax.Array:
        traces.append(1)
        return x

    captured = tg.capture(function, mode=mode, verify=False)
    assert np.array_equal(captured(X), X)
    assert len(traces) == 2


def test_settings_of_the_calling_thread_hold_in_both(target: str, monkeypatch: pytest.MonkeyPatch):
    traced: list[Any] = []
    compiled: list[Any] = []

    def look(compile_it: Callable[[], Any]) -> Any:
        compiled.append(jax.dtypes.canonicalize_dtype(np.float64))
        return compile_it()

    def function(x: Any) -> jax.Array:
        traced.append(jax.dtypes.canonicalize_dtype(np.float64))
        return x * 2

    carry = compiler.carry_settings
    monkeypatch.setattr(compiler, "carry_settings", lambda function: carry(lambda: look(function)))
    with jax.enable_x64(True):
        result = tg.capture(function, verify=False)(np.arange(4, dtype=np.float64))
    assert traced == [np.float64] * 2
    assert compiled[0] == np.float64
    assert result.dtype == np.float64


def test_phases_add_up_to_the_time_that_passed(target: str):
    captured = tg.capture(lambda x: jnp.sin(x) * 2)
    start = time.perf_counter()
    captured.lower(X)
    captured(X)
    assert sum(captured.timings().values()) <= time.perf_counter() - start


# What loads something, and what needs it; what is verified is compared.
USERS: dict[str, Callable[[Any], Any]] = {
    "": lambda x: x * x,
    "preload_matmuls": lambda x: x @ x,
    "preload_convolutions": lambda x: jnp.convolve(x, x),
    "preload_kernels": lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y + 1, x),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("verify", [True, False])
def test_what_a_graph_may_need_is_loaded_while_xla_compiles(
    monkeypatch: pytest.MonkeyPatch, user: str, verify: bool
):
    device = capture_for_gpu(monkeypatch)
    loaded: list[str] = []
    kernels: list[KernelCode] = []
    is_prepared = threading.Event()

    def preload_kernels(codes: Sequence[KernelCode]) -> None:
        loaded.append("preload_kernels")
        kernels.extend(codes)

    def compile_late(compile_it: Callable[[], Any]) -> Any:
        # The last preparation runs as long as this one waits for it.
        assert is_prepared.wait(SECONDS)
        return compile_it()

    replace_compilation(monkeypatch, compile_late)
    for name in ("preload_comparison", "preload_matmuls", "preload_convolutions"):
        monkeypatch.setattr(device, name, functools.partial(loaded.append, name))
    monkeypatch.setattr(device, "preload_kernels", preload_kernels)
    monkeypatch.setattr(capture_lowering, "collect_ahead", is_prepared.set)
    function = USERS[user]
    # Calls inside of it are looked into.
    captured = tg.capture(jax.jit(function), verify=verify)
    assert np.array_equal(captured(X), jax.jit(function)(X))
    assert loaded == ["preload_comparison"] * verify + [user] * bool(user)
    assert kernels == (list_loop_kernels(device.target.architecture) if kernels else [])
    assert bool(kernels) == (user == "preload_kernels")


def test_dead_objects_are_looked_for_while_xla_compiles(monkeypatch: pytest.MonkeyPatch):
    capture_for_gpu(monkeypatch)
    has_looked = threading.Event()

    def compile_late(compile_it: Callable[[], Any]) -> Any:
        assert has_looked.wait(SECONDS)
        return compile_it()

    replace_compilation(monkeypatch, compile_late)
    monkeypatch.setattr(capture_lowering, "collect_ahead", has_looked.set)
    assert np.array_equal(tg.capture(lambda x: x + 1)(X), X + 1)


@pytest.mark.parametrize(("outputs", "shapes"), [("fresh", [(4,), ()]), ("static", [])])
def test_memory_for_new_results_is_prepared_once_per_type(
    monkeypatch: pytest.MonkeyPatch, outputs: Any, shapes: list[tuple[int, ...]]
):
    device = capture_for_gpu(monkeypatch)
    prepared: list[tuple[int, ...]] = []
    are_prepared = threading.Event()

    def compile_late(compile_it: Callable[[], Any]) -> Any:
        assert are_prepared.wait(SECONDS)
        return compile_it()

    def prepare(shape: tuple[int, ...], dtype: Any) -> None:
        prepared.append(shape)
        if len(prepared) == len(shapes):
            are_prepared.set()

    if not shapes:
        are_prepared.set()
    replace_compilation(monkeypatch, compile_late)
    monkeypatch.setattr(device, "prepare_result", prepare)
    captured = tg.capture(
        lambda s, x: (s + 1, x * 2, x.sum(), x * 3), donate_argnums=0, outputs=outputs
    )
    results = captured(jnp.ones((3, 2)), X)
    assert np.array_equal(results[3], X * 3)
    assert prepared == shapes


@pytest.mark.parametrize("verify", [True, False])
def test_copies_of_many_arguments_are_prepared_for_the_verification(
    monkeypatch: pytest.MonkeyPatch, verify: bool
):
    device = capture_for_gpu(monkeypatch)
    prepared: list[Any] = []
    copied: list[Any] = []
    are_prepared = threading.Event()
    copy_arrays = device.comparison.copy_arrays

    def compile_late(compile_it: Callable[[], Any]) -> Any:
        assert are_prepared.wait(SECONDS)
        return compile_it()

    def prepare(types: Any) -> None:
        prepared.append(types)
        are_prepared.set()

    def note(arrays: Any, *, is_rotated: bool) -> list[Any]:
        copied.append([(array.shape, array.dtype) for array in arrays])
        return copy_arrays(arrays, is_rotated=is_rotated)

    if not verify:
        are_prepared.set()
    replace_compilation(monkeypatch, compile_late)
    monkeypatch.setattr(device, "prepare_copies", prepare)
    monkeypatch.setattr(device.comparison, "copy_arrays", note)

    # State and small arguments have memory of the graph's own; a large one is read where it is.
    def step(state: Any, large: Any, key: Any, x: Any) -> Any:
        noise = jax.random.uniform(key, x.shape)
        return [each + x + noise for each in state], large.sum()

    state = [jnp.full(4, i, jnp.float32) for i in range(20)]
    large = jnp.ones((1 << 18) + 4, jnp.float32)
    captured = tg.capture(step, donate_argnums=0, verify=verify)
    captured(state, large, jax.random.key(0), jnp.asarray(X))
    assert [len(each) for each in prepared] == [22] * verify
    assert copied == prepared * 2
