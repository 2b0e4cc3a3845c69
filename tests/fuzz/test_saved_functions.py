"""Files in which what is said of calls was changed: refused, or called without an accident."""

from __future__ import annotations

import copy
import pathlib
import random

import pytest

from tests.fuzz.saved_files import seal
from tests.fuzz.saved_functions import SavedCall, change, make_saved_calls, run_file
from tracegraph.buckets import saved_buckets

RUNS = 250


@pytest.fixture(scope="module")
def calls() -> list[SavedCall]:
    return make_saved_calls()


def test_files_as_they_were_written_are_equal(calls: list[SavedCall], tmp_path: pathlib.Path):
    path = tmp_path / "step.tg"
    ends = [run_file(call, seal(call.content, call.blobs), path) for call in calls]
    assert ends == ["equal", "equal"]


@pytest.mark.parametrize("number", [0, 1])
def test_changed_files_are_refused_or_serve_calls(
    calls: list[SavedCall], tmp_path: pathlib.Path, number: int
):
    call = calls[number]
    ends = {
        run_file(call, change(call, random.Random(f"{number}.{seed}")), tmp_path / "step.tg")
        for seed in range(RUNS)
    }
    assert {"refused", "equal"} <= ends


def test_a_reader_that_checks_no_buckets_is_caught(
    calls: list[SavedCall], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    call = calls[1]
    content = copy.deepcopy(call.content)
    tree = content["extra"]["buckets"]
    number = next(i for i, names in enumerate(tree["types"]) if names[0] == "BucketedAxis")
    row = next(row for row in tree["rows"] if row[0] == number)
    row[tree["types"][number].index("axis")] = 1
    data = seal(content, call.blobs)
    assert run_file(call, data, tmp_path / "step.tg") == "refused"
    monkeypatch.setattr(saved_buckets, "_check_bucket", lambda *_: None)
    assert run_file(call, data, tmp_path / "step.tg") == "other calls"
    monkeypatch.setattr(saved_buckets, "_check_sizes", lambda *_: None)
    row[tree["types"][number].index("axis")] = -2
    with pytest.raises(IndexError):
        run_file(call, seal(content, call.blobs), tmp_path / "step.tg")
