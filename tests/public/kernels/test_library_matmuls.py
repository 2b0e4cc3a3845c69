"""Matmuls are left to cublasLt where XLA has kernels of its own, and that is faster."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.fakes.trials import give_times, note_tunings, report_trial
from tracegraph.capturing import fastest_variant
from tracegraph.capturing.variant import find_tuning
from tracegraph.lowering.tuning import KEEP_SUMS, LIBRARY_ALONE, UNTUNED, Tuning
from tracegraph.replacements.library_matmuls import count_own_matmuls
from tracegraph.replacements.report import Replacement
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.nodes import KernelNode

X = jnp.linspace(0.5, 2.0, 64).reshape(8, 8)
NAME = "matmuls of the library"


def square(x: Any) -> Any:
    return jnp.dot(x, x) + 1


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr(fastest_variant, "count_own_matmuls", lambda _: 3)
    return give_times(monkeypatch)


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[Tuning]:
    return note_tunings(monkeypatch)


def call() -> str:
    return report_trial(square, X, NAME)


def test_a_library_that_is_faster_is_used(tunings: list[Tuning]) -> None:
    assert call() == f"{NAME}: used; 20 µs without, 10 µs with (3 kernels of XLA's)"
    assert tunings == [UNTUNED, Tuning(uses_library=True)]


def test_a_library_that_is_slower_is_not(times: list[float]) -> None:
    times.reverse()
    assert "not used: it is not faster here; 10 µs without" in call()


def test_without_kernels_of_xlas_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, tunings: list[Tuning]
) -> None:
    monkeypatch.setattr(fastest_variant, "count_own_matmuls", count_own_matmuls)
    assert call() == ""
    assert tunings == [UNTUNED]


def test_what_was_used_is_used_when_the_graph_is_made_again() -> None:
    used = Replacement(NAME, (), ("3 kernels of XLA's",))
    assert find_tuning([used]) == Tuning(uses_library=True)
    assert find_tuning([dataclasses.replace(used, dropped="it is not faster here")]) == Tuning()


def test_each_tuning_has_its_options() -> None:
    assert Tuning().list_options() == ()
    assert Tuning(merges=True, uses_library=True).list_options() == (LIBRARY_ALONE,)
    assert Tuning(keeps_sums=True, uses_library=True).list_options() == (KEEP_SUMS, LIBRARY_ALONE)


def test_kernels_of_xlas_are_known_by_their_names() -> None:
    captured: Any = tg.capture(square)
    captured(X)
    definition: GraphDefinition = captured._latest.lowered.definition
    (stage,) = definition.stages
    kernels = [each for each in stage.nodes if isinstance(each, KernelNode)]
    assert kernels
    assert count_own_matmuls(definition) == 0
    named = [
        dataclasses.replace(each, name=f"gemm_fusion_dot.{n}") for n, each in enumerate(kernels)
    ]
    changed = dataclasses.replace(stage, nodes=tuple(named))
    assert count_own_matmuls(dataclasses.replace(definition, stages=(changed,))) == len(kernels)
