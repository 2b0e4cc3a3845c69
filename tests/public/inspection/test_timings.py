"""`timings()`: the phases of a capture, and what the progress line shows."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.capturing.progress import Progress

PHASES = {"trace", "check", "compile", "lower", "instantiate", "verify"}


def double(x: jax.Array) -> jax.Array:
    return x * 2


@pytest.fixture(params=["host", "gpu"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "gpu":
        capture_for_gpu(monkeypatch)
    return request.param


def test_each_phase_has_its_seconds(target: str):
    captured = tg.capture(double)
    assert captured.timings() == {}
    start = time.perf_counter()
    captured(jnp.ones(3))
    passed = time.perf_counter() - start
    seconds = captured.timings()
    assert seconds.keys() == PHASES
    assert all(value > 0 for value in seconds.values())
    assert sum(seconds.values()) <= passed


def test_what_is_not_verified_has_no_such_phase(target: str):
    captured = tg.capture(double, verify=False)
    captured(jnp.ones(3))
    assert captured.timings().keys() == PHASES - {"verify"}


def test_the_seconds_are_those_of_the_latest_graph(target: str):
    captured = tg.capture(double)
    captured(jnp.ones(3))
    first = captured.timings()
    captured(jnp.ones(4))
    assert captured.timings() != first
    captured(jnp.ones(3))
    assert captured.timings() == first


def test_the_line_names_the_regions(target: str, monkeypatch: pytest.MonkeyPatch):
    entered: list[tuple[str, str]] = []
    enter = Progress.enter

    def record(self: Progress, phase: str, detail: str = "") -> None:
        entered.append((phase, detail))
        enter(self, phase, detail)

    monkeypatch.setattr(Progress, "enter", record)
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "0")
    tg.capture(double)(jnp.ones(3))
    late = entered.index(("compile", "region0 of 1")) + 1
    if entered[late] in {("check", ""), ("lower", "")}:
        # The second trace, or a preparation, took longer than XLA.
        entered.pop(late)
    assert entered == [
        ("trace", ""),
        ("check", ""),
        ("lower", ""),
        ("compile", "region0 of 1"),
        ("lower", "region0 of 1"),
        ("instantiate", ""),
        ("verify", ""),
        ("", ""),
    ]
