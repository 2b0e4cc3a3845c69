"""Trials without a GPU: functions are captured as on one, and what a trial measures is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.oracles.tree_equality import assert_same
from tracegraph.capturing import fastest_variant
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.tuning import Tuning


def give_times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns what each trial measures, seconds without and with; a test may change them."""
    found = [20e-6, 10e-6]
    monkeypatch.setattr(fastest_variant, "time_in_turns", lambda *_: list(found))
    capture_for_gpu(monkeypatch)
    return found


def note_tunings(monkeypatch: pytest.MonkeyPatch) -> list[Tuning]:
    """Returns a list that gets the tuning of each program that is compiled from now on."""
    found: list[Tuning] = []
    compile_region = Compiler.compile

    def note(self: Compiler, *args: Any, **kwargs: Any) -> Any:
        found.append(self.tuning)
        return compile_region(self, *args, **kwargs)

    monkeypatch.setattr(Compiler, "compile", note)
    return found


def report_trial(function: Callable[..., Any], x: Any, name: str) -> str:
    """Captures a function and checks two calls; returns what its report says of a replacement."""
    captured: Any = tg.capture(function, numerics="equivalent")
    for _ in range(2):
        assert_same(captured(x), function(x))
    lines = [line for line in captured.explain(x).splitlines() if name in line]
    return lines[0].strip() if lines else ""
