"""Changed files end in the same graph, in one within its buffers, or in an error, seeds fixed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.fuzz import saved_files
from tests.fuzz.saved_files import MUTATIONS, SavedGraph, make_saved_graphs, run_file

RUNS = 200


@pytest.fixture(scope="module")
def graphs() -> list[SavedGraph]:
    return make_saved_graphs()


def run_all(graphs: list[SavedGraph], mutation: Callable[..., bytes], runs: int) -> set[str]:
    ends: set[str] = set()
    for number, graph in enumerate(graphs):
        for seed in range(runs):
            ends.add(run_file(graph, mutation(graph, random.Random(f"{number}.{seed}"))))
    return ends


def test_files_as_they_were_written_are_equal(graphs: list[SavedGraph]):
    assert {run_file(graph, graph.data) for graph in graphs} == {"equal"}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.__name__)
def test_changed_files_are_refused_equal_or_sound(
    mutation: Callable[..., bytes], graphs: list[SavedGraph]
):
    ends = run_all(graphs, mutation, RUNS)
    if mutation in (saved_files.flip_byte, saved_files.cut):
        assert ends == {"SavedFileError"}
    else:
        assert {"ContentProblem", "sound"} <= ends


def test_a_reader_that_checks_nothing_is_caught(
    graphs: list[SavedGraph], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(saved_files, "find_definition_problem", lambda _: "")
    with pytest.raises((AssertionError, KeyError)):
        run_all(graphs, saved_files.change_leaf, RUNS)
