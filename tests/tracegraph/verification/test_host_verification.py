"""Verification on the host: same executables, nothing compiled twice, planted faults are caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.lowering import compile as compile_module
from tracegraph.lowering import lower
from tracegraph.runtime.host import graph as host_graph
from tracegraph.runtime.host.buffer import HostBuffer

X = jnp.arange(1.0, 9.0)
COMPILED = "/jax/core/compile/backend_compile_duration"


def loop(x: jax.Array) -> jax.Array:
    """Three regions if the loop is refused: what it takes, the loop, what its results give."""
    a, b = x + 1, x * 2
    a, b = jax.lax.while_loop(lambda c: c[0].sum() < 999, lambda c: (c[0] * c[1], c[1]), (a, b))
    return a - b + x


def update(state: dict[str, jax.Array], x: jax.Array) -> Any:
    return {"v": state["v"] * 2 + x, "w": state["w"] - x}, (state["w"] * x).sum()


def update_before_a_loop(state: dict[str, jax.Array], x: jax.Array) -> Any:
    new, y = update(state, x)
    return new, y + jax.lax.while_loop(lambda c: c < 99, lambda c: c * 2 + 1, y)


def make_state() -> dict[str, jax.Array]:
    return {"v": X + 1, "w": X + 2}


def run_loop() -> Any:
    return tg.capture(loop, mode="partial", control_flow="refuse")(X)


def run_update() -> Any:
    return tg.capture(update, donate_argnums=0)(make_state(), X)


def run_update_before_a_loop() -> Any:
    captured = tg.capture(
        update_before_a_loop, donate_argnums=0, mode="partial", control_flow="refuse"
    )
    return captured(make_state(), X)


def run_streams() -> Any:
    side = tg.Stream()

    def fork(x: jax.Array) -> jax.Array:
        a = x * 3
        side.wait_stream(tg.current_stream())
        with tg.stream(side):
            b = a + 5
        c = a * 7
        tg.current_stream().wait_stream(side)
        return b - c

    return tg.capture(fork)(X)


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """The programs that XLA compiles during the test, by name."""
    # What is compiled once in a process comes before.
    tg.capture(lambda x: x + 1)(X)
    names: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == COMPILED:
            names.append(kwargs["fun_name"].removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


def test_one_compilation_of_a_whole_function(compilations: list[str]) -> None:
    table = jax.device_put(np.arange(8.0, dtype=np.float32))
    state = jax.tree.map(lambda leaf: leaf, make_state())
    compilations.clear()
    captured = tg.capture(lambda s, x, k: (update(s, x * k), table + x), donate_argnums=0)
    (state, _), _ = captured(state, X, 2.0)
    assert compilations == ["region0"]
    (state, _), _ = captured(state, X, 3.0)
    assert compilations == ["region0"]
    report = captured.explain(state, X, 2.0)
    assert "4 of 4 results equal XLA's executable bit for bit\n" in f"{report}\n"


def test_one_compilation_per_region(compilations: list[str]) -> None:
    captured = tg.capture(loop, mode="partial", control_flow="refuse")
    captured(X)
    captured(X + 1)
    assert sorted(compilations) == ["region0", "region1", "region2"]


def test_one_compilation_of_regions_with_weak_types(compilations: list[str]) -> None:
    def function(x: jax.Array, k: Any) -> Any:
        """The loop carries a weak type, from an argument and from the region before."""
        y, _ = jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] * 2, c[1] + 1), (k, k * 2))
        return x * y, y

    captured = tg.capture(function, mode="partial", control_flow="refuse")
    product, y = captured(X, 3.0)
    assert jax.typeof(y).weak_type
    assert np.array_equal(product, np.asarray(X) * 12)
    captured(X, 3.0)
    assert sorted(compilations) == ["region0", "region1", "region2"]


def test_the_verification_does_not_run_the_function() -> None:
    calls: list[int] = []
    tg.capture(lambda x: (calls.append(1), x * 2)[1])(X)
    assert len(calls) == 2


@pytest.mark.parametrize("run", [run_loop, run_update, run_update_before_a_loop, run_streams])
def test_without_a_fault_all_is_equal(run: Callable[[], Any]) -> None:
    run()


def expect_refusal(run: Callable[[], Any]) -> None:
    with pytest.raises(tg.VerificationError) as caught:
        run()
    assert "differs from XLA's executable" in caught.value.what


def test_a_wrong_memory_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that live at once have the same bytes."""
    plan_memory = lower.plan_memory

    def plan_badly(name: str, lifetimes: Any) -> Any:
        plan = plan_memory(name, lifetimes)
        place = min(offset for name, offset in plan.offsets.items() if name.startswith("%"))
        offsets = {name: min(offset, place) for name, offset in plan.offsets.items()}
        return dataclasses.replace(plan, offsets=offsets)

    monkeypatch.setattr(lower, "plan_memory", plan_badly)
    expect_refusal(run_loop)


def test_a_missing_copy_into_state(monkeypatch: pytest.MonkeyPatch) -> None:
    frame_program = compile_module.frame_program

    def forget(*given: Any) -> Any:
        program = frame_program(*given)
        assert program.steps
        return dataclasses.replace(program, steps=program.steps[1:])

    monkeypatch.setattr(compile_module, "frame_program", forget)
    expect_refusal(run_update_before_a_loop)


def test_a_missing_copy_of_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBuffer, "write", lambda self, value: None)
    monkeypatch.setattr(HostBuffer, "make_writer", lambda self: self.write)
    expect_refusal(run_loop)


def test_a_call_that_is_not_pointed_at_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first replay copied in would do for the second, were it still there."""
    monkeypatch.setattr(HostBuffer, "make_writer", lambda self: lambda value: None)
    expect_refusal(lambda: tg.capture(lambda x: x + 1)(X))


def test_a_wrong_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two results is written into the other's input."""
    place = compile_module.place_donated_results

    def swap(request: Any) -> Any:
        renamed, copies = place(request)
        return dict(zip(renamed, reversed(renamed.values()), strict=True)), copies

    monkeypatch.setattr(compile_module, "place_donated_results", swap)
    expect_refusal(run_update)


@pytest.mark.parametrize("side", ["reads", "writes"])
def test_a_region_that_is_wired_to_the_wrong_value(
    monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    make_call = compile_module.make_call

    def swap(*given: Any, **options: Any) -> Any:
        call = make_call(*given, **options)
        return dataclasses.replace(call, **{side: getattr(call, side)[::-1]})

    monkeypatch.setattr(compile_module, "make_call", swap)
    expect_refusal(run_loop)


def test_a_result_that_is_not_copied_into_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = host_graph._bind_result_copies
    monkeypatch.setattr(
        host_graph, "_bind_result_copies", lambda r, kept: bind(r, kept[1:] or kept)
    )
    expect_refusal(run_loop)


def test_a_region_before_the_one_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bind_stage = host_graph.bind_stage
    monkeypatch.setattr(host_graph, "bind_stage", lambda *given: bind_stage(*given)[::-1])
    expect_refusal(run_streams)


def test_a_callback_that_gives_other_results_is_the_users() -> None:
    numbers = iter(range(1, 99))

    def function(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda v: v * next(numbers), jax.typeof(x), x) + 1

    with pytest.raises(tg.VerificationError) as caught:
        tg.capture(function, mode="partial")(X)
    assert caught.value.fix.startswith("callbacks must give the same results")


def flatten(report: str) -> str:
    return " ".join(report.split())


def test_a_callback_may_differ_a_little_and_the_report_names_it() -> None:
    scales = iter([1.0, 1.0 + 1e-6, *[1.0] * 9])

    def function(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda v: v * np.float32(next(scales)), jax.typeof(x), x)

    captured = tg.capture(function, mode="partial")
    before = flatten(captured.explain(X))
    assert "bit for bit or within 0.05 of the largest magnitude (Python code in `pure_c" in before
    captured(X)
    report = flatten(captured.explain(X))
    assert "0 of 1 results equal XLA's executable bit for bit within 0.05 of the largest" in report
    assert "(Python code in `pure_callback`): result" in report


def test_the_report_says_that_regions_may_differ_from_one_jit() -> None:
    note = "XLA compiles each of the 3 regions by itself: their results may differ from one jax.jit"
    captured = tg.capture(loop, mode="partial", control_flow="refuse")
    assert note in flatten(captured.explain(X))
    captured(X)
    report = flatten(captured.explain(X))
    assert f"1 of 1 results equal XLA's executables bit for bit {note}" in report


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "floats": (lambda x: jnp.tanh(x @ x.reshape(8, 1)) * jnp.log1p(x).sum(), (X,)),
    "scan": (lambda x: jax.lax.scan(lambda c, y: (c * 0.3 + y, c), 0.1, x), (X,)),
    "keys": (lambda k: (jax.random.normal(k, (3,)), jax.random.split(k)), (jax.random.key(3),)),
    "scalars": (lambda x, k: (x * k, k, x.sum() / 3), (X, 0.1)),
    "gradient": (jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x) / (x + 1) ** 1.5)), (X,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_whole_function_has_the_bits_and_types_of_jit(name: str) -> None:
    function, args = PROGRAMS[name]
    captured = tg.capture(function)
    wanted = jax.tree.leaves(jax.jit(function)(*args))
    for _ in range(3):
        for got, want in zip(jax.tree.leaves(captured(*args)), wanted, strict=True):
            assert jax.typeof(got) == jax.typeof(want)
            if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
                got, want = jax.random.key_data(got), jax.random.key_data(want)
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
