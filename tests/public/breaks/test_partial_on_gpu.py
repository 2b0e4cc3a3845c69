"""`mode="partial"` for a GPU: what no graph holds becomes a call of XLA between two graphs.

Regions are kernels over host memory, see `tests/fakes/regions_as_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.capturing.unlowered import UNLOWERED_PRIMITIVES
from tracegraph.lowering import compile_gpu
from tracegraph.runtime.errors import RefusedWork, UnsupportedError

X = jnp.linspace(0.5, 2.0, 16).reshape(4, 4)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    # As if no graph held these.
    for name in ("fft", "triangular_solve"):
        monkeypatch.setitem(UNLOWERED_PRIMITIVES, name, name)
    return capture_for_gpu(monkeypatch)


def spectrum(x: jax.Array) -> jax.Array:
    y = jnp.fft.ifft(jnp.fft.fft(x * 2) + 1)
    return jnp.abs(y) + x


def solve(x: jax.Array) -> jax.Array:
    return jnp.linalg.solve(x + 4 * jnp.eye(4), x * 2) + 1


def scan(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    total, rows = lax.scan(lambda c, row: (c + row, c * row), x[0] * 2, x)
    return total + 1, rows * 2


def callback_between(x: jax.Array) -> jax.Array:
    y = jnp.fft.fft(x)
    z = jax.pure_callback(np.real, jax.ShapeDtypeStruct(x.shape, x.dtype), y)
    return jnp.fft.fft(z).real


PROGRAMS: list[Callable[..., Any]] = [spectrum, solve, scan, callback_between]


def refuse_regions(monkeypatch: pytest.MonkeyPatch, name_op: Callable[[str], str]) -> list[str]:
    """Makes lowering refuse every region that computes a `sin`; returns the texts of all regions.

    `name_op` takes a region's text and returns XLA's name of the refused operation.
    """
    compile_to_kernels = compile_gpu._compile_to_kernels
    seen: list[str] = []

    def refuse(region: Any, *rest: Any, **named: Any) -> Any:
        types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in region.inputs]
        text = jax.jit(region.function).lower(*types).as_text(debug_info=True)
        seen.append(text)
        if "stablehlo.sine" not in text:
            return compile_to_kernels(region, *rest, **named)
        raise UnsupportedError(
            f"`{region.name}` has work that cannot be lowered: sine (1)",
            where="planted",
            why="planted",
            fix="none",
            anchor="unsupported",
            refused=[RefusedWork(region.name, "sine", "", name_op(text))],
        )

    monkeypatch.setattr(compile_gpu, "_compile_to_kernels", refuse)
    return seen


def find_sine(text: str) -> str:
    # A function that is bound as one call is a function of its own in the text, with other names.
    lines = (line.split('"')[1] for line in text.splitlines() if '/sin"' in line)
    return next(lines, "")


def list_stages(captured: Any, *arguments: Any) -> list[bool]:
    definition = captured.lower(*arguments).lowered.definition
    return [stage.is_captured for stage in definition.stages]


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_captures_equal_jit(device: CudaOnHost, function: Callable[..., Any]) -> None:
    captured = tg.capture(function, mode="partial")
    for x in (X, X * 3, X):
        got, wanted = captured(x), jax.jit(function)(x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), got, wanted)
    assert captured.cache_info() == (2, 1, 64, 1)


def test_runs_of_such_ops_are_one_call(device: CudaOnHost) -> None:
    def twice(x: jax.Array) -> jax.Array:
        return jnp.fft.ifft(jnp.fft.fft(x.astype(complex))).real

    assert list_stages(tg.capture(twice, mode="partial"), X) == [True, False, True]
    assert list_stages(tg.capture(callback_between, mode="partial"), X)[:3] == [True, False, False]


def test_whole_mode_cuts_nothing(device: CudaOnHost) -> None:
    # Kernels on the host hold what no graph on a GPU does.
    assert list_stages(tg.capture(spectrum), X) == [True]


def test_what_lowering_refuses_is_cut_out(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = refuse_regions(monkeypatch, find_sine)
    captured = tg.capture(lambda x: jnp.sin(x * 2) + 1, mode="partial", name="step")
    np.testing.assert_allclose(captured(X), jnp.sin(X * 2) + 1, rtol=1e-6)
    assert list_stages(captured, X) == [True, False, True]
    assert "tracegraph_op1/sin" in seen[0]
    report = captured.explain(X)
    assert "eager because `sin` becomes work that no graph on a GPU holds yet: sine (te" in report
    assert report.count("eager because") == 1
    with pytest.raises(tg.UnsupportedError, match=r"cannot be lowered: sine \(1\)"):
        tg.capture(lambda x: jnp.sin(x * 2) + 1)(X)


def test_a_region_runs_eagerly_where_xla_names_no_op(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_regions(monkeypatch, lambda text: "")
    captured = tg.capture(lambda x: jnp.sin(x * 2) + 1, mode="partial", verify=False)
    np.testing.assert_allclose(captured(X), jnp.sin(X * 2) + 1, rtol=1e-6)
    assert list_stages(captured, X) == [False]
    assert captured.explain(X).parts["regions"].count("is in one region with work") == 3


def test_an_op_that_is_named_in_vain_ends_in_an_eager_region(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The name of another op each time: the sine is cut out with its whole region at last.
    names = iter(f"jit(region0)/tracegraph_op{index}/mul" for index in (0, 2, 3, 4, 5))
    seen = refuse_regions(monkeypatch, lambda text: next(names))
    captured = tg.capture(lambda x: ((jnp.sin(x * 2) + 1) * 3 - x) / 2 + x, mode="partial")
    np.testing.assert_allclose(captured(X), ((jnp.sin(X * 2) + 1) * 3 - X) / 2 + X, rtol=1e-5)
    assert 3 <= sum("stablehlo.sine" in text for text in seen) <= 4


def test_a_refusal_that_lies_in_no_op_is_raised(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*rest: Any, **named: Any) -> Any:
        raise UnsupportedError("no plugin", where="w", why="y", fix="f", anchor="unsupported-jax")

    monkeypatch.setattr(compile_gpu, "_compile_to_kernels", refuse)
    for mode in ("whole", "partial"):
        with pytest.raises(tg.UnsupportedError, match="no plugin"):
            tg.capture(lambda x: x + 1, mode=mode)(X)
        report = tg.capture(lambda x: x + 1, mode=mode, name="step").explain(X)
        assert report.startswith("`step` cannot be captured")
        assert "violations\n  no plugin\n    where: w\n" in report


def test_a_donated_state_passes_an_eager_part(device: CudaOnHost) -> None:
    def step(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        w = jnp.fft.fft(state["w"] + x).real
        return {"w": w * 0.1}, w.sum()

    captured = tg.capture(step, mode="partial", donate_argnums=0)
    state, wanted = {"w": X * 1}, {"w": X * 1}
    for _ in range(3):
        state, total = captured(state, X)
        wanted, sum_wanted = jax.jit(step)(wanted, X)
        np.testing.assert_allclose(total, sum_wanted, rtol=1e-4)
    np.testing.assert_allclose(state["w"], wanted["w"], rtol=1e-4, atol=1e-5)


def test_a_report_for_a_gpu(device: CudaOnHost) -> None:
    captured = tg.capture(spectrum, mode="partial", name="step")
    report = captured.explain(X)
    for text in (
        "device: cuda:0: cpu\n",
        "cuts: 3 graphs, 2 eager parts\n",
        "eager because `fft` becomes work that no graph on a GPU holds yet: fft (tests/public",
        "nodes: 3 graphs: 3 kernels; ",
        "verification: at the first call: two replays compared with XLA's executables, bit for bit "
        "or within 0.05 of the largest magnitude (",
        "\n  XLA compiles each of the 5 regions by itself: their results may differ from one "
        "jax.jit in the last bits\n",
    ):
        assert text in report, report
    regions = report.parts["regions"]
    assert "region1: eager, one call between two graphs, reads" in regions
    assert "eager because `fft` becomes work that no graph on a GPU holds yet: fft\n" in regions
    captured(X)
    assert "1 of 1 results equal XLA's executables bit for bit" in captured.explain(X)
    quiet = tg.capture(lambda x: x + 1, verify=False).explain(X)
    assert "verification: none: verify=False" in quiet
    assert "1 graph: 1 kernel; 0 edges, 0 of them programmatic" in quiet
