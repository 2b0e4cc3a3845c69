"""Rules that lost are tried again where those behind them are used, in the same order later."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.capturing import fastest_variant
from tracegraph.ir.graph import Graph
from tracegraph.replacements.match import Machine, Match
from tracegraph.replacements.place_errors import PlaceError

LOST, WON = [10e-6, 20e-6], [20e-6, 10e-6]


@dataclasses.dataclass(frozen=True)
class Doubled:
    """Replaces each op of a name by twice the half of what it computes.

    Attributes:
        op: the name.
        compute: what it computes.
    """

    op: str
    compute: Callable[[Any], Any]

    @property
    def name(self) -> str:
        """Of the rule."""
        return f"doubled {self.op}"

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:
        """Returns all ops of the name that are not halved."""
        del machine
        halved = {op.operands[0] for op in graph.ops if op.name == "mul"}
        ops = [op for op in graph.ops if op.name == self.op and op.results[0] not in halved]
        half = functools.partial(_double_half, self.compute)
        plain = functools.partial(_call, self.compute)
        return [Match(op, op.results, op.operands, half, plain) for op in ops]


def _double_half(compute: Callable[[Any], Any], x: Any) -> tuple[Any]:
    return (compute(x) * np.float32(0.5) * np.float32(2),)


def _call(compute: Callable[[Any], Any], x: Any) -> tuple[Any]:
    return (compute(x),)


RULES = (
    Doubled("sin", jnp.sin),
    Doubled("tanh", jnp.tanh),
    Doubled("exp", jnp.exp),
    Doubled("abs", jnp.abs),
)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """The times of the trials that come."""
    found: list[list[float]] = []
    monkeypatch.setattr(fastest_variant, "time_in_turns", lambda *_: found.pop(0))
    monkeypatch.setattr(fastest_variant, "RULES", RULES)
    monkeypatch.setattr(fastest_variant, "CHAINED_RULES", frozenset(["doubled sin", "doubled exp"]))
    monkeypatch.setattr(PlaceError, "is_allowed", True)
    return found


def compute(x: Any) -> Any:
    return jnp.abs(jnp.exp(jnp.tanh(jnp.sin(x)))) + x


def capture_once() -> list[str]:
    """Returns what a new function says of its replacements."""
    step: Any = tg.capture(compute, numerics="equivalent")
    x = jnp.linspace(-1, 1, 8)
    np.testing.assert_allclose(step(x), jax.jit(compute)(x), rtol=1e-6)
    lines = step.explain(x).splitlines()
    return [line.strip().partition(" µs")[0] for line in lines if "doubled" in line]


def test_what_lost_is_tried_again_behind_what_won(times: list[list[float]]) -> None:
    # The rule behind the one that won comes after what is tried again.
    times += [LOST, LOST, WON, [30e-6, 5e-6], [40e-6, 5e-6]]
    assert capture_once() == [
        "doubled tanh: not used: it is not faster here; 10",
        "doubled exp: used; 20",
        "doubled sin: used; 30",
        "doubled abs: used; 40",
    ]
    assert times == []


def test_what_loses_twice_is_said_once(times: list[list[float]]) -> None:
    times += [LOST, WON, WON, [30e-6, 40e-6], LOST]
    assert capture_once()[1:3] == [
        "doubled exp: used; 20",
        "doubled sin: not used: it is not faster here; 30",
    ]
    assert times == []


@pytest.mark.parametrize(
    "trials", [[LOST, WON, LOST, WON], [WON, LOST, LOST, LOST], [WON, WON, WON, WON]]
)
def test_what_nothing_has_changed_for_is_not_tried_again(
    trials: list[list[float]], times: list[list[float]]
) -> None:
    times += trials
    assert len(capture_once()) == 4
    assert times == []


def test_a_later_capture_replaces_in_the_same_order(
    times: list[list[float]], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(tmp_path / "kernels"))
    times += [LOST, LOST, WON, WON, WON]
    first = capture_once()
    replaced: list[str] = []
    find_matches = fastest_variant.find_matches

    def note(rule: Any, *args: Any) -> Any:
        replaced.append(rule.name)
        return find_matches(rule, *args)

    monkeypatch.setattr(fastest_variant, "find_matches", note)
    assert capture_once() == first
    assert replaced == ["doubled exp", "doubled sin", "doubled abs"]
