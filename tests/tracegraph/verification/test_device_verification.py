"""Verification on a GPU against XLA's executable, with kernels that are wrong on purpose."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost, view_floats
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.oracles import error_lines
from tracegraph.runtime.cuda import buffer
from tracegraph.verification import capture_verification, device_verification
from tracegraph.verification.other_inputs import OtherInputs

X = jnp.arange(1.0, 5.0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    return capture_for_gpu(monkeypatch)


def two(x: jax.Array) -> dict[str, jax.Array]:
    return {"sum": x + 1, "double": x * 2}


def read_report(captured: Any) -> str:
    """Returns what the verification of the one captured graph said."""
    (capture,) = captured._cache.list_latest()
    return str(capture.verification)


def spoil(
    device: CudaOnHost, change: Callable[[list[np.ndarray], int], None], turns: range
) -> list[int]:
    """Lets `change` see the float32[4] ranges of each new kernel after some of its launches.

    It takes the ranges, inputs first, and the number of the launch. Returns the launches so far.
    """
    launches: list[int] = []

    class Kernels(dict[str, Any]):
        def __setitem__(self, symbol: str, kernel: Callable[..., None]) -> None:
            def run(parameters: tuple[bytes, ...]) -> None:
                kernel(parameters)
                if len(launches) in turns:
                    addresses = [int.from_bytes(each, "little") for each in parameters]
                    change([view_floats(address) for address in addresses], len(launches))
                launches.append(len(launches))

            super().__setitem__(symbol, run)

    device.driver.kernels = Kernels(device.driver.kernels)
    return launches


def test_right_kernels_pass_bit_for_bit(device: CudaOnHost) -> None:
    captured = tg.capture(two)
    assert np.array_equal(captured(X)["double"], X * 2)
    assert "2 of 2 results equal XLA's executable bit for bit" in read_report(captured)


def test_the_collector_is_paused_from_memory_to_the_last_result(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, bool] = {}
    bind, run = device.bind_buffers, device_verification.run_reference

    def note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            seen[name] = gc.isenabled()
            return function(*arguments)

        return noted

    monkeypatch.setattr(device, "bind_buffers", note("instantiate", bind))
    monkeypatch.setattr(device_verification, "run_reference", note("verify", run))
    assert np.array_equal(tg.capture(two)(X)["double"], X * 2)
    assert seen == {"instantiate": False, "verify": False}
    assert gc.isenabled()


@pytest.mark.parametrize("turn", [0, 1])
def test_a_wrong_kernel_is_named_and_leaves_nothing(device: CudaOnHost, turn: int) -> None:
    before = device.driver.live_handles()

    def change(ranges: list[np.ndarray], _: int) -> None:
        ranges[1 if np.array_equal(ranges[1], ranges[0] * 2) else 2][3] += 1

    spoil(device, change, range(turn, turn + 1))
    captured = tg.capture(two)
    with pytest.raises(tg.VerificationError) as caught:
        captured(X)
    error_lines.match(
        caught.value,
        "the replay of `two` differs from XLA's executable in 1 of 1 results",
        "result['double'] (relative difference 1",
        "a graph that computes something else than the function must not be used",
        "internal error in tracegraph",
    )
    del caught
    gc.collect()
    left = set(device.driver.live_handles().items()) - set(before.items())
    assert {kind for _, kind in left} <= {"host memory", "event", "library"}
    # The kernels that compare and measure stay loaded; that of the graph is gone.
    assert device._kernels.library_count == 2
    # The next capture is right, for the fault was in one launch.
    assert np.array_equal(captured(X)["double"], X * 2)


def test_a_read_of_memory_that_nothing_has_written(device: CudaOnHost) -> None:
    def change(ranges: list[np.ndarray], _: int) -> None:
        # As if the kernel had missed one element.
        ranges[1][2] = np.asarray([0xFFFFFFFF], np.uint32).view(np.float32)[0]

    spoil(device, change, range(2))
    with pytest.raises(tg.VerificationError, match=r"relative difference (inf|nan)"):
        tg.capture(lambda x: x + 1)(X)


def test_only_other_arguments_show_a_kernel_that_ignores_its_input(device: CudaOnHost) -> None:
    seen: list[np.ndarray] = []

    def change(ranges: list[np.ndarray], _: int) -> None:
        seen.append(ranges[1].copy())
        ranges[1][:] = seen[0]

    spoil(device, change, range(2))
    with pytest.raises(tg.VerificationError):
        tg.capture(lambda x: x + 1)(X)
    assert len(seen) == 2


def test_a_kernel_that_writes_into_an_argument(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Arrays on the host are aligned to less than those on a GPU, and would be copied.
    monkeypatch.setattr(buffer, "ALIGNMENT", 4)

    def change(ranges: list[np.ndarray], _: int) -> None:
        ranges[0][0] += 1

    # In the second replay the kernel is pointed at the argument itself.
    spoil(device, change, range(1, 2))
    with pytest.raises(tg.VerificationError):
        tg.capture(lambda x: x + 1)(X)


def test_arguments_are_copied_once_for_each_replay(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    copy_arrays = device.comparison.copy_arrays

    def count(arrays: Any, *, is_rotated: bool) -> list[Any]:
        copied.append(len(arrays))
        return copy_arrays(arrays, is_rotated=is_rotated)

    monkeypatch.setattr(device.comparison, "copy_arrays", count)
    constant = jnp.arange(4.0)
    tg.capture(lambda s, x: (s + x + constant, s), donate_argnums=0)(jnp.ones(4), X)
    assert copied == [2, 2]


def test_every_wrong_result_is_named(device: CudaOnHost) -> None:
    def change(ranges: list[np.ndarray], _: int) -> None:
        for each in ranges[1:]:
            each[0] += 1

    spoil(device, change, range(1))
    with pytest.raises(tg.VerificationError) as caught:
        tg.capture(two)(X)
    assert "result['double']" in caught.value.where
    assert "result['sum']" in caught.value.where


@pytest.mark.parametrize("error", [1e-6, 0.5])
@pytest.mark.parametrize("atomics", [(), ("add.1",)])
def test_float_atomics_are_the_one_reason_for_a_tolerance(
    monkeypatch: pytest.MonkeyPatch, atomics: tuple[str, ...], error: float
) -> None:
    device = capture_for_gpu(monkeypatch, float_atomics=atomics)

    def change(ranges: list[np.ndarray], turn: int) -> None:
        # Another result in each replay.
        ranges[1 + turn][0] *= 1 + error

    spoil(device, change, range(2))
    captured = tg.capture(two)
    if atomics and error < 1e-4:
        captured(X)
        report = read_report(captured)
        assert "0 of 2 results equal XLA's executable bit for bit" in report
        tolerated = (
            "within 0.05 of the largest magnitude (float atomics in add.1): result['double'], "
        )
        assert tolerated + "result['sum']" in report
        return
    with pytest.raises(tg.VerificationError, match="relative difference"):
        captured(X)


def test_without_verification_nothing_is_compared(device: CudaOnHost) -> None:
    def change(ranges: list[np.ndarray], _: int) -> None:
        ranges[1][0] += 1

    launches = spoil(device, change, range(9))
    captured = tg.capture(lambda x: x + 1, verify=False)
    assert np.array_equal(captured(X), [3, 3, 4, 5])
    assert len(launches) == 1


def test_no_memory_for_the_comparison(device: CudaOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    captured = tg.capture(two)
    with monkeypatch.context() as patch:
        patch.setattr(device.comparison, "copy_arrays", refuse)
        with pytest.raises(tg.OutOfMemoryError) as caught:
            captured(X)
    error_lines.match(
        caught.value,
        "no memory is left to verify `two`",
        "verification at capture: RESOURCE_EXHAUSTED: Out of memory",
        "the comparison needs copies",
        "capture with verify=False",
    )
    assert np.array_equal(captured(X)["sum"], X + 1)


def test_other_errors_of_jax_come_as_they_are(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: planted")

    monkeypatch.setattr(device.comparison, "copy_arrays", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="planted"):
        tg.capture(two)(X)


def test_arguments_are_left_as_they_were(device: CudaOnHost) -> None:
    state, x = {"w": jnp.ones(4)}, jnp.full(4, 2.0)
    plain = state["w"]
    captured = tg.capture(lambda s, x: ({"w": s["w"] + x}, s["w"].sum()), donate_argnums=0)
    out, total = captured(state, x)
    # Donated by the call itself, not by its verification.
    assert plain.is_deleted()
    assert float(total) == 4
    for turn in range(2, 5):
        out, total = captured(out, x)
        assert np.array_equal(out["w"], [1 + 2 * turn] * 4)
    assert np.array_equal(x, [2] * 4)


def test_state_whose_old_value_is_a_result(device: CudaOnHost) -> None:
    captured = tg.capture(lambda s: (s + 1, s), donate_argnums=0)
    new, old = captured(jnp.ones(4))
    assert np.array_equal(new, [2] * 4)
    assert np.array_equal(old, [1] * 4)
    new, older = captured(new)
    assert np.array_equal(new, [3] * 4)
    assert np.array_equal(older, [2] * 4)
    assert np.array_equal(old, [1] * 4)


def test_arguments_of_every_sort(device: CudaOnHost) -> None:
    constant = jnp.arange(4.0)
    key = jax.random.key(7)

    def function(x: Any, scale: Any, shift: Any, key: Any) -> Any:
        return x * scale + shift + constant, jax.random.split(key), x.astype(jnp.int8)

    captured = tg.capture(function)
    other = jax.device_put(jnp.ones((4, 4)), Format(Layout((1, 0)), X.sharding))
    for x in (np.ones((4, 4), np.float32), other):
        got, wanted = captured(x, 2, 0.5, key), jax.jit(function)(x, 2, 0.5, key)
        for one, reference in zip(got, wanted, strict=True):
            assert one.dtype == reference.dtype
            assert bool((one == reference).all())


def test_a_matrix_of_another_layout_is_verified_and_replayed(device: CudaOnHost) -> None:
    values = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    other = jax.device_put(values, Format(Layout((1, 0)), X.sharding))
    captured = tg.capture(lambda x: x - x.T)
    for _ in range(2):
        assert np.array_equal(captured(other), values - values.T)
        assert np.array_equal(captured(jnp.asarray(values)), values - values.T)


def note_copies(device: CudaOnHost, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Notes how many arguments are copied, and whether as others."""
    copied: list[tuple[int, bool]] = []
    copy_arrays = device.comparison.copy_arrays

    def note(arrays: Any, *, is_rotated: bool) -> list[Any]:
        copied.append((len(arrays), is_rotated))
        return copy_arrays(arrays, is_rotated=is_rotated)

    monkeypatch.setattr(device.comparison, "copy_arrays", note)
    return copied


def test_a_loop_that_would_not_end_on_other_arguments(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(x: jax.Array, n: Any) -> jax.Array:
        """Begins with 1 and finds 8; from 3, the other half's first, it would run for ever."""
        return jax.lax.while_loop(lambda c: c != 8, lambda c: c * 2, x[0]) + n

    copied = note_copies(device, monkeypatch)
    captured = tg.capture(search)
    assert float(captured(X, 1)) == 9
    assert copied == [(2, False), (2, False)]
    report = read_report(captured)
    assert "1 of 1 results equal XLA's executable bit for bit; all arguments keep their" in report
    assert "test_device_verification.py:" in report
    # Without that choice both arguments are others: the reference would not return.
    unguarded = OtherInputs((True, True))
    monkeypatch.setattr(capture_verification, "choose_other_inputs", lambda _: unguarded)
    copy_arrays = device.comparison.copy_arrays

    def stop(arrays: Any, *, is_rotated: bool) -> list[Any]:
        assert not is_rotated, "for ever"
        return copy_arrays(arrays, is_rotated=is_rotated)

    monkeypatch.setattr(device.comparison, "copy_arrays", stop)
    with pytest.raises(AssertionError, match="for ever"):
        tg.capture(search)(X, 1)


def test_other_floats_take_other_branches(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(n: Any, x: jax.Array) -> jax.Array:
        y = jax.lax.fori_loop(0, n, lambda i, c: c * 2, x)
        return jax.lax.cond(x[0] > 2, lambda v: v - 1, lambda v: v + 1, y)

    copied = note_copies(device, monkeypatch)
    captured = tg.capture(step)
    assert np.array_equal(captured(2, X), X * 4 + 1)
    assert copied == [(2, False), (1, True), (1, False)]
    assert "arguments of integers keep their values in both replays" in read_report(captured)


def test_only_other_arguments_show_a_branch_that_was_frozen(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that always takes the branch of its capture: as if the condition were not read."""
    taken: list[np.ndarray] = []

    def freeze(ranges: list[np.ndarray], _: int) -> None:
        taken.append(ranges[1] - ranges[0])
        ranges[1][:] = ranges[0] + taken[0]

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0] > 2, lambda v: v - 1, lambda v: v + 1, x)

    spoil(device, freeze, range(2))
    with pytest.raises(tg.VerificationError):
        tg.capture(step)(X)
    assert [float(each[0]) for each in taken] == [1.0, -1.0]
