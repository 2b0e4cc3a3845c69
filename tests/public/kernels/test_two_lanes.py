"""Steps in two lanes are tried where that makes another graph, and used if they are faster."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from tests.fakes.trials import give_times, note_tunings, report_trial
from tracegraph.capturing import fastest_variant
from tracegraph.capturing.variant import Variant, find_tuning
from tracegraph.lowering import build_graph
from tracegraph.lowering.tuning import Tuning
from tracegraph.replacements.report import Replacement

NAME = "steps in two lanes"
X = jnp.linspace(0.5, 2.0, 16)


def double(x: Any) -> Any:
    return x * 2


def list_edges(variant: Variant) -> list[tuple[int, int]]:
    """Stands for those of a wide graph: here a region is one kernel."""
    return [(0, 1)] * (3 if variant.tuning.has_two_lanes else 5)


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return give_times(monkeypatch)


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of all graphs that are built: whether there are two lanes."""
    found: list[bool] = []
    arrange = build_graph.arrange_in_lanes

    def note(*args: Any, has_two: bool) -> Any:
        found.append(has_two)
        return arrange(*args, has_two=has_two)

    monkeypatch.setattr(build_graph, "arrange_in_lanes", note)
    return found


def call() -> str:
    return report_trial(double, X, NAME)


def test_two_lanes_that_are_faster_are_used(
    monkeypatch: pytest.MonkeyPatch, dealt: list[bool]
) -> None:
    compiled = note_tunings(monkeypatch)
    monkeypatch.setattr(fastest_variant, "_list_edges", list_edges)
    assert call() == f"{NAME}: used; 20 µs without, 10 µs with (5 edges become 3)"
    assert dealt[-1] is True
    # XLA's program is the same.
    assert len(compiled) == 1


def test_two_lanes_that_are_slower_are_not(
    monkeypatch: pytest.MonkeyPatch, times: list[float]
) -> None:
    monkeypatch.setattr(fastest_variant, "_list_edges", list_edges)
    times.reverse()
    assert "not used: it is not faster here; 10 µs without" in call()


def test_a_graph_that_stays_the_same_is_not_timed(dealt: list[bool]) -> None:
    assert call() == ""
    assert dealt[0] is False


def test_what_was_used_is_used_when_the_graph_is_made_again() -> None:
    used = Replacement(NAME, (), ("5 edges become 3",))
    assert find_tuning([used]) == Tuning(has_two_lanes=True)
