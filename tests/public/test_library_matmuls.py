"""Matmuls are left to cublasLt where XLA has kernels of its own, and that is faster."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.oracles.tree_equality import assert_same
from tracegraph.capturing import fastest_variant
from tracegraph.capturing.variant import find_tuning
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.tuning import KEEP_SUMS, LIBRARY_ALONE, Tuning
from tracegraph.replacements.library_matmuls import count_own_matmuls
from tracegraph.replacements.report import Replacement
from tracegraph.runtime.graph import GraphDefinition
from tracegraph.runtime.nodes import KernelNode

X = jnp.linspace(0.5, 2.0, 64).reshape(8, 8)
NAME = "matmuls of the library"


def square(x: Any) -> Any:
    return jnp.dot(x, x) + 1


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = [20e-6, 10e-6]
    monkeypatch.setattr(fastest_variant, "time_in_turns", lambda *_: list(found))
    monkeypatch.setattr(fastest_variant, "count_own_matmuls", lambda _: 3)
    capture_for_gpu(monkeypatch)
    return found


@pytest.fixture
def tunings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of all that is compiled: whether matmuls are left to the library."""
    found: list[bool] = []
    compile_region = Compiler.compile

    def note(self: Compiler, region: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(self.tuning.uses_library)
        return compile_region(self, region, *args, **kwargs)

    monkeypatch.setattr(Compiler, "compile", note)
    return found


def call() -> str:
    """Returns what the report of a captured function says of the library."""
    captured: Any = tg.capture(square, numerics="equivalent")
    for _ in range(2):
        assert_same(captured(X), square(X))
    lines = [line for line in captured.explain(X).splitlines() if NAME in line]
    return lines[0].strip() if lines else ""


def test_a_library_that_is_faster_is_used(tunings: list[bool]) -> None:
    assert call() == f"{NAME}: used; 20 µs without, 10 µs with (3 kernels of XLA's)"
    assert tunings == [False, True]


def test_a_library_that_is_slower_is_not(times: list[float]) -> None:
    times.reverse()
    assert "not used: it is not faster here; 10 µs without" in call()


def test_without_kernels_of_xlas_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, tunings: list[bool]
) -> None:
    monkeypatch.setattr(fastest_variant, "count_own_matmuls", count_own_matmuls)
    assert call() == ""
    assert tunings == [False]


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
