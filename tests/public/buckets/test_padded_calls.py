"""Calls of functions with buckets that need padding: what they copy, and what they never run."""

from __future__ import annotations

import functools
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost, place
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.processes import run_program
from tracegraph.buckets import rules
from tracegraph.buckets.bucket_calls import Served
from tracegraph.buckets.padded import Padded
from tracegraph.buckets.padded_call import pad_with_zeros
from tracegraph.runtime.cuda.buffer import CudaBuffer
from tracegraph.runtime.streams.stream_capture import thread_state

WEIGHTS = {"w": np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    monkeypatch.setattr(thread_state, "streams", [])
    # On a GPU all arrays of JAX are aligned so.
    monkeypatch.setattr(Served, "_place", lambda self, size: place(size, dtype=np.int32))
    return capture_for_gpu(monkeypatch)


@pytest.fixture(params=["host", "gpu"])
def device(request: pytest.FixtureRequest) -> None:
    if request.param == "gpu":
        request.getfixturevalue("gpu")


def step(weights: Any, x: Any, ids: Any) -> Any:
    is_true = (jnp.arange(x.shape[0]) < tg.bucket_size("x", 0))[:, None]
    hidden = jnp.tanh(x @ weights["w"])
    return {"hidden": hidden, "sum": jnp.where(is_true, hidden, 0).sum(0), "ids": ids + 1}


def make_step(**options: Any) -> Any:
    buckets = {"x": {0: (4, 8, 16)}, "ids": {0: (4, 8, 16)}}
    return tg.capture(step, buckets=buckets, verify=False, **options)


def make_arguments(size: int, make: Callable[..., Any] = place) -> tuple[Any, ...]:
    x = np.linspace(0, 1, size * 5, dtype=np.float32).reshape(size, 5)
    ids = np.arange(size, dtype=np.int32)
    return jax.tree.map(place, WEIGHTS), make(x), make(ids, dtype=np.int32)


def check(found: Any, size: int) -> None:
    _, x, ids = make_arguments(size, np.array)
    hidden = np.tanh(x @ WEIGHTS["w"])
    np.testing.assert_allclose(found["hidden"], hidden, rtol=1e-5)
    np.testing.assert_allclose(found["sum"], hidden.sum(0), rtol=1e-5)
    np.testing.assert_array_equal(found["ids"], ids + 1)


def list_compiled(call: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the programs that JAX compiles in a call: all that it runs for the first time."""
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, "jax"):
        call()
    texts = [record.getMessage() for record in caplog.records]
    return [text.split()[1] for text in texts if text.startswith("Compiling ")]


@pytest.mark.parametrize("name", ["host", "gpu"])
def test_another_size_of_a_bucket_runs_no_program(
    name: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "gpu":
        request.getfixturevalue("gpu")
    function, arguments = make_step(), [make_arguments(size) for size in (11, 13, 14)]
    for each in arguments[:2]:
        function(*each)
    found = list_compiled(lambda: check(function(*arguments[2]), 14), caplog)
    # Memory for the results on a GPU comes from a program that does nothing else.
    assert found == (["jit(allocate)"] if name == "gpu" else [])


@pytest.mark.usefixtures("device")
def test_padding_by_programs_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    """What the test above looks for is there where arguments are padded by JAX."""
    function = make_step()
    function._pad = pad_with_zeros
    for size in (11, 13):
        function(*make_arguments(size))
    # Another test may have padded such arrays before.
    jax.clear_caches()
    found = list_compiled(lambda: function(*make_arguments(12)), caplog)
    assert sum("_pad" in each for each in found) == 2


@pytest.mark.usefixtures("device")
def test_captures_compile_no_program_that_pads(caplog: pytest.LogCaptureFixture) -> None:
    function, arguments = make_step(), make_arguments(2, jnp.array)
    jax.clear_caches()
    found = list_compiled(lambda: function.warm_up(*arguments), caplog)
    assert found
    assert not any("_pad" in each or "zeros" in each for each in found)
    function = make_step()
    committed = jax.device_put(arguments, jax.devices("cpu")[0])
    found = list_compiled(lambda: function.warm_up(*committed), caplog)
    # Two arrays in each of three buckets.
    assert sum("_pad" in each for each in found) == 6


SIZES = tuple(range(4, 44, 4))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_first_call_of_a_bucket_finds_its_graph(
    is_loaded: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function: Any = tg.capture(lambda x: x * 2, buckets={"x": {0: SIZES}})
    function.warm_up(jnp.zeros(1))
    if is_loaded:
        function.save(tmp_path / "double.tg")
        function = tg.load(tmp_path / "double.tg")
        for size in SIZES:
            function(jnp.ones(size))
        function._calls._served.clear()

    def work_out(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the signature of a call is worked out")

    monkeypatch.setattr(function if is_loaded else function._graphs, "_prepare", work_out)
    for size in SIZES:
        np.testing.assert_array_equal(function(jnp.ones(size - 1)), np.full(size - 1, 2.0))


def test_a_size_that_is_new_moves_nothing_that_a_user_forbids() -> None:
    function = make_step()
    for size in (6, 8):
        function(*make_arguments(size))
    arguments = make_arguments(4)
    function(*arguments)
    function._calls._served[(4,)].size_trees.clear()
    with jax.transfer_guard("disallow"):
        found = function(*arguments)
    check(found, 4)


def list_calls(device: CudaOnHost, call: Callable[[], Any]) -> list[str]:
    calls = device.driver.calls
    first = len(calls)
    call()
    return [each.name for each in calls[first:]]


def test_a_gpu_copies_each_padded_array_once(gpu: CudaOnHost) -> None:
    function, arguments = make_step(), make_arguments(6)
    for _ in range(2):
        function(*arguments)
    found = list_calls(gpu, lambda: function(*arguments))
    # In go `x` and `ids`, out go `hidden` and `ids`; all others are read and written in place.
    assert found == ["copy_async"] * 2 + ["launch"] + ["copy_async"] * 2
    copied = sum(call.arguments[2] for call in gpu.driver.calls[-5:] if call.name == "copy_async")
    assert copied == 4 * 6 * (5 + 1 + 3 + 1)
    function._pad = pad_with_zeros
    assert list_calls(gpu, lambda: function(*arguments)) != found


def test_a_full_call_on_a_gpu_copies_nothing(gpu: CudaOnHost) -> None:
    function, arguments = make_step(), make_arguments(8)
    for _ in range(2):
        function(*arguments)
    assert list_calls(gpu, lambda: function(*arguments)) == ["launch"]


def test_rows_of_an_inner_axis_are_one_copy(gpu: CudaOnHost) -> None:
    function: Any = tg.capture(
        lambda x: x * 2, buckets={"x": {0: (4, 8), 1: {"columns": (3, 6)}}}, verify=False
    )
    x = place(np.arange(10).reshape(2, 5))
    for _ in range(3):
        np.testing.assert_array_equal(function(x), 2 * np.asarray(x))
    found = list_calls(gpu, lambda: function(x))
    assert found == ["copy_rows_async", "launch", "copy_rows_async"]


def fill_inputs(function: Any, byte: int) -> None:
    """Fills the static inputs of all graphs, but for what they own."""
    for capture in function._graphs._cache.list_latest():
        replay = capture.graph.replay
        for buffer in replay.inputs[: len(capture.graph.names)]:
            if isinstance(buffer, CudaBuffer):
                buffer.context.fill(buffer.address, byte, buffer.nbytes)
            else:
                buffer.fill_bytes(byte)


def find_changed(function: Any, *arguments: Any) -> set[str]:
    """Returns the results that depend on what was in the static inputs before the call."""
    function(*arguments)
    outcomes = []
    for byte in (0, 0xFF, 0x7B):
        fill_inputs(function, byte)
        outcomes.append({k: np.array(v).tobytes() for k, v in function(*arguments).items()})
    return {key for each in outcomes[1:] for key in each if each[key] != outcomes[0][key]}


@pytest.mark.usefixtures("device")
def test_what_is_left_in_the_static_inputs_reaches_no_result() -> None:
    function = make_step()
    assert not find_changed(function, *make_arguments(6))
    assert not find_changed(function, *make_arguments(3))


@pytest.mark.usefixtures("device")
def test_what_is_left_behind_shows_where_a_rule_lets_padding_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apply_wrongly(context: Any) -> list[Padded]:
        axes = context.op.params["axes"]
        left = [p for axis, p in enumerate(context.operands[0].axes) if axis not in axes]
        return [Padded(tuple(left))]

    monkeypatch.setitem(rules.ALL_RULES, "reduce_sum", apply_wrongly)
    function: Any = tg.capture(
        lambda x: {"wrong": x.sum(0), "right": x * 2}, buckets={"x": {0: (4, 8)}}, verify=False
    )
    assert find_changed(function, make_arguments(6)[1]) == {"wrong"}


TABLE = np.arange(20, dtype=np.float32).reshape(5, 4)
WHOLE = (8, 4, 6)
VALUES = np.linspace(-9, 9, 8 * 4 * 6, dtype=np.float32).reshape(WHOLE)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("shape", [(3, 4, 6), (8, 4, 5), (3, 4, 5), (8, 2, 6), (5, 3, 2)])
@pytest.mark.parametrize("make", [place, np.array, jnp.array])
def test_any_axes_may_be_padded(shape: tuple[int, ...], make: Callable[..., Any]) -> None:
    axes = {0: {"a": (8,)}, 1: {"b": (4,)}, 2: {"c": (6,)}}
    function: Any = tg.capture(lambda x: (x + 1, x.T * 2), buckets={"x": axes}, verify=False)
    values = VALUES[tuple(map(slice, shape))]
    for _ in range(3):
        found = function(make(values))
        np.testing.assert_array_equal(found[0], values + 1)
        np.testing.assert_array_equal(found[1], values.T * 2)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "dtype", ["bool", "int4", "int8", "bfloat16", "float16", "complex64", "uint32"]
)
def test_any_dtype_may_be_padded(dtype: str) -> None:
    function: Any = tg.capture(
        lambda x: jnp.where(x == 1, x, x), buckets={"x": {0: (4, 8)}}, verify=False
    )
    values = jnp.arange(15).reshape(5, 3) % 3
    for x in (values.astype(dtype), np.array(values.astype(dtype))):
        for _ in range(2):
            found = function(x)
            assert (found.shape, found.dtype) == ((5, 3), jnp.dtype(dtype))
            np.testing.assert_array_equal(np.array(found), np.array(x))


@pytest.mark.usefixtures("device")
def test_results_of_graphs_are_padded_arguments() -> None:
    function = make_step()
    double: Any = tg.capture(lambda x: x * 2, verify=False)
    static: Any = tg.capture(lambda x: x * 2, verify=False, outputs="static")
    weights, x, ids = make_arguments(6)
    for half in (x / 2, x / 2):
        for make in (double, static):
            check(function(weights, make(half), ids), 6)
    # Its own results, which were cut.
    again = function(weights, x, function(weights, x, ids)["ids"])
    np.testing.assert_array_equal(again["ids"], np.asarray(ids) + 2)


@pytest.mark.usefixtures("device")
def test_results_keep_their_values_and_are_arrays_like_others() -> None:
    function, results = make_step(), []
    for size in (6, 7, 6, 15, 8, 3):
        results.append((function(*make_arguments(size)), size))
    for found, size in results:
        check(found, size)
        np.testing.assert_array_equal(jnp.sum(found["ids"]), size * (size + 1) // 2)


@pytest.mark.usefixtures("device")
def test_arguments_of_another_type_are_captured_anew() -> None:
    function = make_step()
    weights, x, ids = make_arguments(6)
    for _ in range(2):
        check(function(weights, x, ids), 6)
        found = function(weights, x, place(np.asarray(ids), dtype=np.float32))
        assert found["ids"].dtype == np.float32
        np.testing.assert_array_equal(found["ids"], np.asarray(ids) + 1)
    assert function.cache_info().captures == 2


@pytest.mark.usefixtures("device")
def test_a_deleted_argument_is_refused_and_the_next_call_works() -> None:
    function, (weights, x, ids) = make_step(), make_arguments(6)
    check(function(weights, x, ids), 6)
    gone = jnp.array(x)
    gone.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        function(weights, gone, ids)
    check(function(weights, x, ids), 6)


def test_the_default_device_may_change() -> None:
    program = """
    import jax, jax.numpy as jnp, numpy as np, tracegraph as tg
    function = tg.capture(lambda x: x + tg.bucket_size(), buckets={"x": {0: (4, 8)}})
    one, other = jax.devices()
    for device in (other, one, other):
        with jax.default_device(device):
            for _ in range(2):
                found = function(jnp.zeros(3))
                np.testing.assert_array_equal(found, np.full(3, 3.0))
                assert found.devices() == {device}
    """
    flags = "--xla_force_host_platform_device_count=2"
    assert run_program(program, XLA_FLAGS=flags, JAX_PLATFORMS="cpu") == ""


@pytest.mark.usefixtures("gpu")
def test_a_refused_call_leaves_no_argument_that_seems_loaded() -> None:
    """Other graphs write the memory of arguments that were loaded and then not used."""

    def multiply(x: Any, weights: Any, y: Any) -> Any:
        if y.dtype != np.float32:
            raise TypeError("wanted float32")
        return x @ weights["w"] + y

    function: Any = tg.capture(multiply, buckets={"x": {0: (4, 8)}}, verify=False)
    # Not aligned as XLA wants it, so that the graphs copy them.
    misplaced = functools.partial(place, skip=64)
    ones = [misplaced(np.ones((size, 64))) for size in (4, 8)]
    first, second = ({"w": misplaced(np.full((64, 3), n))} for n in (1, 2))
    y = place(np.zeros(3))
    for x in reversed(ones):
        function(x, first, y)
    with pytest.raises(TypeError):
        function(ones[0], second, place(np.zeros(3), dtype=np.float16))
    function(ones[1], first, y)
    np.testing.assert_array_equal(function(ones[0], second, y), np.full((4, 3), 128.0))


@pytest.mark.parametrize("name", ["weights", "state"])
def test_trees_that_are_whole_are_looked_at_in_each_call(name: str) -> None:
    donated: Any = {"donate_argnames": "state"} if name == "state" else {}

    def add(state: Any, weights: Any, x: Any) -> Any:
        return {"n": state["n"] + tg.bucket_size()}, x + weights["w"]

    function: Any = tg.capture(add, buckets={"x": {0: (4, 8)}}, **donated)
    state: Any = {"n": jnp.int32(0)}
    new, weights = state, {"w": jnp.ones(3)}
    for number, size in enumerate((3, 6, 5, 2, 4), start=1):
        weights["w"] = jnp.full(3, float(number))
        new, found = function(state, weights, jnp.zeros((size, 3)))
        np.testing.assert_array_equal(found, np.full((size, 3), number))
        state = new if name == "state" else state
    assert int(new["n"]) == (20 if name == "state" else 4)
