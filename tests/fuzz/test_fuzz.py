"""A few random programs with fixed seeds; many more by hand: ``python -m tests.fuzz``."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest

from tests.fuzz import __main__ as fuzz_main
from tests.fuzz.compare import Outcome, compare_leaves, compare_trees, compare_with_jit
from tests.fuzz.programs import make_program
from tests.fuzz.steps import DATA_DEPENDENT, EAGER
from tracegraph.capturing import flat_function

SEEDS = range(14)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_gives_what_jit_gives(seed: int) -> None:
    program = make_program(seed)
    mode: Literal["whole", "partial"]
    is_free = bool(set(program.steps) & set(DATA_DEPENDENT))
    mode = "whole" if program.is_capturable and (seed % 2 or is_free) else "partial"
    outcome = compare_with_jit(program, mode)
    assert outcome is not Outcome.REFUSED


def test_the_seeds_hold_what_they_should() -> None:
    programs = [make_program(seed) for seed in SEEDS]
    assert {program.is_donated for program in programs} == {True, False}
    assert any(program.side is not None for program in programs)
    assert any(set(program.steps) & set(EAGER) for program in programs)
    for control_flow in ("allow", "refuse"):
        assert any(
            set(program.steps) & set(DATA_DEPENDENT)
            for program in programs
            if program.control_flow == control_flow
        )


X = jnp.arange(1.0, 4.0)


@pytest.mark.parametrize(
    "other",
    [X + 1e-6, X.astype(jnp.bfloat16), X[None], jnp.asarray(X, jnp.int32), [X], (X, X)],
    ids=["value", "dtype", "shape", "integers", "list", "length"],
)
def test_the_comparison_can_fail(other: Any) -> None:
    with pytest.raises(AssertionError):
        compare_trees((other,), (X,), is_cut=False)


def test_the_comparison_sees_weak_types_and_placement() -> None:
    weak, strong = jnp.asarray(1.5), jnp.float32(1.5)
    assert jax.typeof(weak).weak_type
    with pytest.raises(AssertionError):
        compare_leaves("x", weak, strong, False)
    with pytest.raises(AssertionError, match="committed"):
        compare_leaves("x", jax.device_put(X, jax.devices()[0]), X, False)


def test_several_regions_have_a_tolerance() -> None:
    assert compare_trees((X * (1 + 1e-6),), (X,), is_cut=True) == ["[0]"]
    with pytest.raises(AssertionError, match="several regions"):
        compare_trees((X * 1.1,), (X,), is_cut=True)
    with pytest.raises(AssertionError):
        compare_trees((jnp.arange(3),), (jnp.arange(1, 4),), is_cut=True)


def test_a_planted_fault_in_real_captures_is_reported_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums of regions are doubled; verification compares with the same regions and agrees."""
    bind_op = flat_function.bind_op

    def bind_wrongly(op: Any, operands: Any) -> list[Any]:
        results = bind_op(op, operands)
        is_wrong = op.name == "add" and jnp.issubdtype(results[0].dtype, jnp.floating)
        return [results[0] * 2] if is_wrong else results

    monkeypatch.setattr(flat_function, "bind_op", bind_wrongly)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--count", "1", "--seed", "2"])
    assert fuzz_main.main() == 1
    printed = capsys.readouterr().out
    assert "seed 2, partial: AssertionError" in printed
    assert "relative difference" in printed


def test_a_planted_last_bit_in_several_regions_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each float sum of a region is off by its last bits; the same program is equal above."""
    bind_op = flat_function.bind_op

    def bind_inexactly(op: Any, operands: Any) -> list[Any]:
        results = bind_op(op, operands)
        is_planted = op.name == "add" and results[0].dtype == jnp.float32
        return [results[0] * (1 + 2e-7)] if is_planted else results

    monkeypatch.setattr(flat_function, "bind_op", bind_inexactly)
    assert compare_with_jit(make_program(2), "partial") is Outcome.CLOSE


@pytest.mark.parametrize(("seed", "control_flow"), [(2, "allow"), (18, "refuse")])
def test_a_program_that_is_refused_for_no_reason_is_an_error(seed: int, control_flow: str) -> None:
    program = make_program(seed)
    assert program.control_flow == control_flow
    assert not program.is_capturable
    assert compare_with_jit(program, "whole") is Outcome.REFUSED
    harmless = dataclasses.replace(program, steps=())
    assert harmless.is_capturable
