"""Sums of matmuls in one piece are tried where XLA has split them, and used if they are faster."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.trials import give_times, note_tunings, report_trial
from tests.optimized import compile_as_for_users
from tests.oracles.tree_equality import assert_same
from tracegraph.capturing import fastest_variant
from tracegraph.ir.graph import Graph
from tracegraph.lowering.tuning import KEEP_SUMS, UNTUNED, Tuning
from tracegraph.replacements import place_errors, split_sums

X = jnp.linspace(0.5, 2.0, 64).reshape(8, 8)
NAME = "sums of matmuls in one piece"
KEPT = Tuning(keeps_sums=True)


def square(x: Any) -> Any:
    return jnp.dot(x, x) + 1


def find_all(graph: Graph, _definition: Any) -> Any:
    """Stands for what XLA has split: nothing does that on the host."""
    return [split_sums._match(op) for op in graph.ops if split_sums._is_plain(op)]


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr(fastest_variant, "find_split_sums", find_all)
    return give_times(monkeypatch)


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[Tuning]:
    return note_tunings(monkeypatch)


def call() -> str:
    return report_trial(square, X, NAME)


def test_sums_in_one_piece_that_are_faster_are_used(tunings: list[Tuning]) -> None:
    assert call().startswith(f"{NAME}: used; 20 µs without, 10 µs with (")
    assert tunings == [UNTUNED, KEPT]


def test_sums_in_one_piece_that_are_slower_are_not(times: list[float]) -> None:
    times.reverse()
    assert "not used: it is not faster here; 10 µs without" in call()


def test_without_a_split_sum_nothing_is_tried(monkeypatch: Any, tunings: list[Tuning]) -> None:
    monkeypatch.setattr(fastest_variant, "find_split_sums", split_sums.find_split_sums)
    assert call() == ""
    assert tunings == [UNTUNED]


def test_sums_that_are_less_exact_are_never_used(monkeypatch: Any, tunings: list[Tuning]) -> None:
    measure = place_errors.measure_places

    def measure_badly(graph: Any, matches: Any, arguments: Any, options: Any = ()) -> Any:
        errors = measure(graph, matches, arguments, options)
        if KEEP_SUMS not in options:
            return errors
        return [dataclasses.replace(error, theirs=0.5) for error in errors]

    monkeypatch.setattr(place_errors, "measure_places", measure_badly)
    assert "not used: its error is 0.5, where XLA's is " in call()
    # It was lowered while the errors were measured.
    assert tunings == [UNTUNED, KEPT]


def test_another_process_keeps_sums_without_a_trial(
    monkeypatch: Any, tmp_path: Any, tunings: list[Tuning]
) -> None:
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(tmp_path / "kernels"))
    first = call()
    before = tg.kernel_cache.info()
    monkeypatch.setattr(fastest_variant, "choose_variant", None)
    assert call() == first
    after = tg.kernel_cache.info()
    assert (after.hits - before.hits, after.misses - before.misses) == (1, 0)
    assert tunings == [UNTUNED, KEPT]


def test_parts_between_reads_are_tried_and_listed() -> None:
    def branch(x: Any) -> Any:
        hidden = jnp.dot(x, x)
        return hidden @ x if hidden.sum() > 0 else hidden

    captured: Any = tg.capture(branch, mode="partial", numerics="equivalent")
    for _ in range(2):
        assert_same(captured(X), branch(X))
    lines = [line.strip() for line in captured.explain(X).splitlines() if NAME in line]
    assert len(lines) == 2
    assert all(line.startswith(f"{NAME}: used; 20 µs without") for line in lines)


def test_a_saved_function_keeps_its_sums(tmp_path: Any, tunings: list[Tuning]) -> None:
    weights = np.asarray(X) + 1
    captured: Any = tg.capture(lambda x: jnp.dot(x, x) + weights, numerics="equivalent")
    expected = captured(X)
    # XLA:CPU, which is in the place of a GPU, writes only the code that it has compiled itself.
    with compile_as_for_users():
        captured.save(tmp_path / "square.tg", constants=False)
    # What is written has no array of the user's, and is compiled for that.
    assert tunings == [UNTUNED, KEPT, KEPT]
    assert_same(tg.load(tmp_path / "square.tg", constants=[weights])(X), expected)
