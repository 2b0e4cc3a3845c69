"""`TRACEGRAPH_NVTX=1`: captures and replays are ranges; NVIDIA's package is played by a fake."""

from __future__ import annotations

import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.raw_graphs import N, assert_value, fill, record, use_device


class FakeDomain:
    """Has what an NVTX domain of the package `nvtx` has; keeps what is open and what was opened."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.pushed: list[str] = []
        self.started: list[str] = []

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, attributes: str) -> None:
        self.pushed.append(attributes)
        self.seen.append(attributes)

    def pop_range(self) -> None:
        self.pushed.pop()

    def start_range(self, attributes: str) -> str:
        self.started.append(attributes)
        self.seen.append(attributes)
        return attributes

    def end_range(self, range_id: str) -> None:
        self.started.remove(range_id)


@pytest.fixture(params=["host", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CudaOnHost | None:
    return use_device(request.param, monkeypatch)


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> FakeDomain:
    domain = FakeDomain()
    module: Any = types.ModuleType("nvtx")
    module.get_domain = {"tracegraph": domain}.__getitem__
    monkeypatch.setitem(sys.modules, "nvtx", module)
    monkeypatch.setenv("TRACEGRAPH_NVTX", "1")
    return domain


def take(domain: FakeDomain) -> list[str]:
    """Returns what was opened since, if all of it is closed."""
    assert not domain.pushed
    assert not domain.started
    seen, domain.seen = domain.seen, []
    return seen


def test_captured_functions_have_ranges(domain):
    step = tg.capture(lambda x: jnp.sin(x) * 2, name="step")
    x = jnp.ones(N)
    step(x)
    seen = take(domain)
    assert seen[:2] == ["capturing `step`", "trace"]
    assert {"check", "lower", "instantiate", "verify"} < {*seen}
    step(x)
    step(x)
    assert take(domain) == ["replay step"] * 2
    state = tg.capture(lambda s, x: (s + x, s.sum()), donate_argnums=0, name="advance")
    s, _ = state(x * 0, x)
    domain.seen.clear()
    s, _ = state(s, x)
    assert take(domain) == ["replay advance"]
    assert_value(s, fill(2))


def test_blocks_have_ranges(domain):
    x = tg.static_input((N,))
    g, y = record(lambda: x + 1)
    seen = take(domain)
    for each in ("capturing `graph`", "instantiating `graph`", "trace", "verify"):
        assert each in seen
    g.replay()
    assert take(domain) == ["replay graph"]
    assert_value(y, fill(1))


def test_a_failed_capture_or_replay_leaves_no_range_open(domain):
    with pytest.raises(tg.CaptureError):
        tg.capture(lambda x: float(x))(1.0)
    take(domain)
    w = jnp.ones(N)
    step = tg.capture(lambda x: x * 2, name="step")
    step(w)
    w.delete()
    with pytest.raises((tg.TracegraphError, RuntimeError, ValueError)):
        step(w)
    take(domain)
    assert_value(step(jnp.ones(N)), fill(2))


def test_without_the_variable_nothing_is_wrapped(domain, monkeypatch):
    monkeypatch.setenv("TRACEGRAPH_NVTX", "0")
    step = tg.capture(lambda x: x * 2, name="step")
    step(jnp.ones(N))
    monkeypatch.setenv("TRACEGRAPH_NVTX", "1")
    # What is there already stays as it is.
    step(jnp.ones(N))
    assert take(domain) == []
    step(jnp.ones(N + 1))
    assert "capturing `step`" in take(domain)


def test_a_missing_package_is_named_before_anything_is_captured(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setenv("TRACEGRAPH_NVTX", "1")
    step, g = tg.capture(lambda x: x * 2), tg.CUDAGraph()
    with pytest.raises(tg.ConfigError, match="`nvtx` is missing") as caught:
        step(jnp.ones(N))
    assert "pip install nvtx" in caught.value.fix
    with pytest.raises(tg.ConfigError, match="`nvtx` is missing"), tg.graph(g):
        y = jnp.ones(N) + 1
    monkeypatch.setenv("TRACEGRAPH_NVTX", "0")
    assert_value(step(jnp.ones(N)), fill(2))
    with tg.graph(g):
        y = jax.jit(jnp.negative)(jnp.ones(N))
    g.replay()
    assert_value(y, fill(-1))
