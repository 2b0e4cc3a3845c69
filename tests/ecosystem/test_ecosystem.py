"""Each program of the corpus becomes what the table says: equal to its reference, or refused."""

from __future__ import annotations

import json
import pathlib
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.ecosystem import expectations, runner
from tests.ecosystem.program import BOTH, Program, Setup
from tests.ecosystem.runner import (
    DIFFERS,
    EQUAL,
    FILES,
    REFUSALS,
    Outcome,
    find_missing,
    load_programs,
    run_program,
)
from tests.ecosystem.shares import run_in_processes
from tests.processes import run_copy
from tracegraph.verification.report import VerificationReport

TABLE = expectations.read_table()


@pytest.mark.parametrize("name", TABLE)
def test_program(name):
    outcomes = run_program(load_programs(name.partition(".")[0])[name])
    problem = expectations.find_problem(TABLE[name]["host"], outcomes)
    assert not problem, f"{name}: {problem}"


def test_nothing_is_missing_here():
    assert {file: find_missing(file) for file in FILES if find_missing(file)} == {}


def test_the_table_has_each_program_once():
    names = [name for file in FILES for name in load_programs(file)]
    assert sorted(names) == sorted(TABLE)
    assert len(names) >= 60


@pytest.mark.parametrize("column", ["host", "gpu"])
def test_each_cell_is_equal_or_a_refusal_but_for_known_defects(column):
    cells = {name: row.get(column, "") for name, row in TABLE.items()}
    words = {name: set(cell.split(", ")) - {""} for name, cell in cells.items()}
    defects = {name for name, found in words.items() if found - {EQUAL, *REFUSALS}}
    assert defects == set(expectations.DEFECTS[column])


def make_program(function, reference):
    setup = Setup(function, lambda rng: (rng.standard_normal(3),), reference=reference)
    return Program("planted", lambda: setup, BOTH)


def refuse(x):
    raise tg.InternalError("a bug", where="here", why="planted")


def call_back(x):
    return jax.pure_callback(np.sin, jax.typeof(x), x)


@pytest.mark.parametrize(
    ("function", "reference", "words"),
    [
        (lambda x: x * 2, lambda f, **_: jax.jit(f), "equal, equal"),
        (lambda x: x * 2, lambda f, **_: jax.jit(lambda x: x * 2.0000002), "differs, differs"),
        (lambda x: (x, x), lambda f, **_: jax.jit(lambda x: [x, x]), "differs, differs"),
        (lambda x: x, lambda f, **_: jax.jit(lambda x: x.astype(jnp.bfloat16)), "differs, differs"),
        (call_back, lambda f, **_: jax.jit(f), "callback, equal"),
        (refuse, lambda f, **_: lambda x: x, "internal, internal"),
        (lambda x: x.nothing, lambda f, **_: lambda x: x, "AttributeError, AttributeError"),
    ],
)
def test_what_becomes_of_a_planted_program(function, reference, words):
    assert expectations.write_cell(run_program(make_program(function, reference))) == words


ATOMICS = VerificationReport(tolerance=1e-3, reason="float atomics in scatter-add.1")


@pytest.mark.parametrize(
    ("function", "reference", "word"),
    [
        (lambda x: x * 2, lambda x: x * 2.0000002, EQUAL),
        (lambda x: x * 2, lambda x: x * 2.1, DIFFERS),
        (lambda x: x * 2, lambda x: x * jnp.nan, DIFFERS),
        (lambda x: x * 2, lambda x: (x * 2).astype(jnp.bfloat16), DIFFERS),
        (lambda x: x.shape[0], lambda x: x.shape[0] + 1, DIFFERS),
        (lambda x: jnp.arange(3), lambda x: jnp.arange(3) + 1, DIFFERS),
        (lambda x: {"a": x}, lambda x: {"b": x}, DIFFERS),
    ],
)
def test_what_the_order_of_a_sum_may_change(monkeypatch, function, reference, word):
    monkeypatch.setattr(runner, "find_chance", lambda captured: ATOMICS)
    program = make_program(function, lambda f, **_: jax.jit(reference))
    (outcome, _) = run_program(program)
    assert outcome.word == word
    assert ("scatter-add.1" in outcome.reason) == (word == EQUAL)


def test_the_order_of_a_sum_matters_only_on_a_gpu_that_leaves_it_to_chance(monkeypatch):
    def called(report):
        capture = types.SimpleNamespace(verification=report)
        cache = types.SimpleNamespace(list_latest=lambda: [capture])
        return types.SimpleNamespace(_cache=cache)

    exact = VerificationReport(tolerance=1e-3, reason="the handler of_a_user")
    assert runner.find_chance([called(ATOMICS)]).tolerance == 0
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(platform="gpu")])
    assert runner.find_chance([called(exact), called(ATOMICS)]) is ATOMICS
    assert runner.find_chance([called(exact)]).tolerance == 0


def test_an_earlier_result_that_changes_is_noticed():
    class Overwritten:
        """Returns one array for each call, as a graph without fresh outputs would."""

        def __call__(self, x):
            return latest

    latest = jnp.zeros(3)
    outcomes = run_program(make_program(lambda x: x, lambda f, **_: Overwritten()))
    assert {each.word for each in outcomes} == {DIFFERS}


@pytest.mark.parametrize(
    ("expected", "words", "has_problem"),
    [
        ("equal", ["equal"], False),
        ("equal", ["callback"], True),
        ("callback", ["equal"], True),
        ("callback, equal", ["callback", "equal"], False),
        ("callback, equal", ["callback"], True),
        ("", ["equal", "callback"], False),
        ("", ["equal", "differs"], True),
        ("", ["internal"], True),
        ("", ["NameError"], True),
    ],
)
def test_a_wrong_expectation_fails_in_both_directions(expected, words, has_problem):
    outcomes = [Outcome(word, f"because of {word}") for word in words]
    assert bool(expectations.find_problem(expected, outcomes)) == has_problem


def run_planted(arguments):
    """Ends as a process of the corpus does that runs its programs, but not `absent`, or dies."""
    _, _, *names, _, report = arguments
    if "fault" in names:
        return subprocess.CompletedProcess(arguments, -11, "", "Segmentation fault")
    outcome = {"word": "equal", "reason": ""}
    programs = {name: [outcome] for name in names if name != "absent"}
    pathlib.Path(report).write_text(json.dumps({"programs": programs}))
    return subprocess.CompletedProcess(arguments, 0, "", "")


def test_what_a_process_does_not_report_is_no_success():
    found = run_in_processes(["a", "fault", "c", "absent", "e", "f"], 3, run_planted)
    words = {name: expectations.write_cell(outcomes) for name, outcomes in found.items()}
    assert words == {
        "a": "equal",
        "absent": "died",
        "fault": "died",
        "e": "died",
        "c": "equal",
        "f": "equal",
    }
    assert found["fault"][0].reason == "its process ended with status -11: Segmentation fault"
    assert expectations.find_problem("", found["absent"])


def test_programs_run_in_processes():
    names = ["arrays.causal_attention", "control.nothing_is_called_so"]
    found = run_in_processes(names, 1, run_copy)
    assert [each.word for each in found[names[0]]] == TABLE[names[0]]["host"].split(", ")
    assert found[names[1]][0].word == "died"
