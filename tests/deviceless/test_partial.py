"""Partial mode on XLA's own programs: what is cut, by its name and by what the decoder refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.fakes import compilers
from tests.fakes.compilers import make_compiler
from tracegraph.capturing import capture_lowering
from tracegraph.capturing.capture_lowering import lower_checked
from tracegraph.capturing.unlowered import UNLOWERED_PRIMITIVES
from tracegraph.lowering.lower import Lowered
from tracegraph.runtime.definition.library_calls import LibraryCall
from tracegraph.runtime.errors import CudaError, UnsupportedError
from tracegraph.runtime.ffi.call import FfiCall
from tracegraph.tracing.checked_graph import CheckedGraph, check_trace, trace_call
from tracegraph.tracing.prepared_call import prepare_call

SQUARE = np.ones((64, 64), np.float32)
# Captured stages are True.
CUT = [True, False, True]


def transform_twice(x: Any) -> Any:
    y = jnp.fft.fft(jax.nn.relu(x))
    return jnp.abs(jnp.fft.fft(y * 2))


def loop(x: Any) -> Any:
    return lax.scan(lambda c, y: (c + y, c * 2), x[0] * 2, x)[1] + 1


def repeat(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] * 2), (0, x + 1))[1] * 2


def factorize_rows(x: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.linalg.cholesky(c @ c.T), None), x * 2, None, 3)[0] + 1


def factorize(x: Any) -> Any:
    return jnp.linalg.cholesky(x @ x.T) * 2


def draw(x: Any) -> Any:
    """Uses numbers that XLA draws with a seed of its own."""
    return lax.rng_uniform(0.0, 1.0, x.shape) * x


def rematerialize(x: Any) -> Any:
    inner = jax.checkpoint(lambda y: jnp.abs(jnp.fft.fft(jnp.sin(y))) @ y)
    return jax.grad(lambda y: inner(y * 2).sum())(x) + 1


BY_NAME = [
    pytest.param(lambda x: jnp.abs(jnp.fft.fft(x * 2)) + 1, (SQUARE,), CUT, "fft", id="fft"),
    pytest.param(transform_twice, (SQUARE,), [*CUT, False, True], "fft", id="twice"),
    pytest.param(
        lambda x: jnp.linalg.solve(x + 1, x) * 2,
        (SQUARE,),
        CUT,
        "triangular_solve",
        id="solve",
    ),
    pytest.param(rematerialize, (SQUARE,), CUT, "fft", id="remat"),
]
UNCUT = [
    pytest.param(lambda x: jnp.abs(jnp.fft.ifft(jnp.fft.fft(x * 2))) + 1, id="fft"),
    pytest.param(lambda x: jnp.linalg.solve(x + 1, x) * 2, id="solve"),
    pytest.param(loop, id="scan"),
    pytest.param(repeat, id="while"),
    pytest.param(factorize_rows, id="cholesky-in-scan"),
    pytest.param(factorize, id="cholesky"),
    pytest.param(lambda x: jnp.linalg.det(x + 1) * 2, id="det"),
    pytest.param(lambda x: jnp.linalg.eigh(x + 1)[0] * 2, id="eigh"),
    pytest.param(lambda x: jnp.linalg.qr(x + 1)[0] * 2, id="qr"),
    pytest.param(lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, 1)[0] + 1, id="one-round"),
    pytest.param(
        lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 8, unroll=True)[0] + 1,
        id="unrolled",
    ),
    pytest.param(
        lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 10, unroll=8)[0] + 1,
        id="unrolled-with-a-rest",
    ),
    pytest.param(lambda x: jnp.linalg.cholesky(x[:0, :0]), id="empty"),
    pytest.param(lambda x: jnp.sort(x)[0], id="sort"),
    pytest.param(
        lambda x: lax.conv(x.reshape(1, 8, 16, 32), x[:8, :8, None, None], (1, 1), "SAME"),
        id="convolution",
    ),
]


def lower(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    device: Any,
    mode: Any = "partial",
) -> tuple[CheckedGraph, Lowered]:
    options = tg.capture(function, mode=mode, name="step")._options
    prepared = prepare_call(function, options, tuple(arguments), {}, device=None, has_values=False)
    first = check_trace(prepared, trace_call(prepared))
    return lower_checked(prepared, first, make_compiler(device, takes_kernels=True))


def list_stages(lowered: Lowered) -> list[bool]:
    return [stage.is_captured for stage in lowered.definition.stages]


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the device refuse the calls of libraries."""

    def refuse(_: Any, call: LibraryCall) -> int:
        raise CudaError(
            f"{call.kind} failed", where="here", why="it is planted", fix="none", anchor="cuda"
        )

    monkeypatch.setattr(compilers.Target, "plan_library_call", refuse)


@pytest.mark.parametrize(("function", "arguments", "stages", "kind"), BY_NAME)
def test_work_that_no_graph_holds_is_cut_out(
    function: Any, arguments: Any, stages: Any, kind: str, h200: Any, monkeypatch: Any
) -> None:
    for name in ("fft", "triangular_solve"):
        monkeypatch.setitem(UNLOWERED_PRIMITIVES, name, name)
    checked, lowered = lower(function, arguments, h200)
    assert list_stages(lowered) == stages
    reasons = [violation.what for violation in checked.uncapturable.values()]
    assert all("becomes work that no graph on a GPU holds yet: " in each for each in reasons)
    assert any(reason.endswith(f": {kind}") for reason in reasons)
    assert all("test_partial.py:" in each.where for each in checked.uncapturable.values())


def test_numbers_of_a_seed_of_xla_are_cut_out_by_name(h200: Any) -> None:
    # XLA does not say which op a seed is for.
    checked, lowered = lower(lambda x: draw(x * 2) + 1, (SQUARE,), h200)
    assert list_stages(lowered) == CUT
    (violation,) = checked.uncapturable.values()
    assert violation.what.endswith("becomes work that no graph on a GPU holds yet: rng_seed")
    with pytest.raises(UnsupportedError, match="rng_seed"):
        lower(lambda x: draw(x * 2) + 1, (SQUARE,), h200, mode="whole")


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(("function", "arguments", "stages", "kind"), BY_NAME)
def test_names_and_refusals_cut_alike(
    function: Any, arguments: Any, stages: Any, kind: str, h200: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(capture_lowering, "find_unlowered", lambda graph: {})
    checked, lowered = lower(function, arguments, h200)
    assert list_stages(lowered) == stages
    assert any(each.what.endswith(f": {kind}") for each in checked.uncapturable.values())


def test_a_call_that_the_device_refuses_is_cut_out(h200: Any, monkeypatch: Any) -> None:
    def refuse(call: FfiCall, _: str) -> str:
        return "which is planted" if call.target == "cusolver_potrf_ffi" else ""

    monkeypatch.setattr(compilers, "find_registration_problem", refuse)
    checked, lowered = lower(factorize, (SQUARE,), h200)
    assert list_stages(lowered) == CUT
    (violation,) = checked.uncapturable.values()
    assert violation.what.endswith("becomes work that no graph on a GPU holds yet: custom_call")
    with pytest.raises(UnsupportedError, match="calls cusolver_potrf_ffi, which is planted"):
        lower(factorize, (SQUARE,), h200, mode="whole")


@pytest.mark.parametrize("function", UNCUT)
def test_what_a_graph_holds_is_not_cut(function: Any, h200: Any) -> None:
    checked, lowered = lower(function, (SQUARE,), h200)
    assert not checked.uncapturable
    assert list_stages(lowered) in ([True], [])


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(("function", "arguments", "stages", "kind"), BY_NAME)
def test_whole_mode_refuses(
    function: Any, arguments: Any, stages: Any, kind: str, h200: Any
) -> None:
    with pytest.raises(UnsupportedError, match=f"`region0` has work .*{kind}"):
        lower(function, arguments, h200, mode="whole")
