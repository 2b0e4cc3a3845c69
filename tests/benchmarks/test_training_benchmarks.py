"""The benchmarks of mixed precision, graphed callables, buckets and matmuls, as dry runs."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from tests.paths import ROOT
from tests.processes import run_copy


def run_dry(name: str, folder: pathlib.Path, *options: str) -> tuple[Any, str]:
    """Returns the document that a benchmark writes, and what it prints."""
    script = str(ROOT / "benchmarks" / f"{name}.py")
    command = [script, "--dry-run", f"--output={folder}", *options]
    ran = run_copy(command, variables={"PYTHONPATH": str(ROOT)})
    assert ran.returncode == 0, ran.stderr
    return json.loads((folder / f"{name}_dry_run.json").read_text()), ran.stdout


def test_mixed_precision(tmp_path: pathlib.Path) -> None:
    document, printed = run_dry("amp", tmp_path)
    times = document["microseconds_per_step"]
    assert list(times) == ["bfloat16", "float16"]
    for dtype in times:
        assert set(times[dtype]) == {"tg.capture", "tg.capture, equivalent", "jax.jit"}
        assert all(f"{dtype:<9} {side} " in printed for side in times[dtype])
        for side, numerics in (("tg.capture", "xla"), ("tg.capture, equivalent", "equivalent")):
            assert document["graphs"][dtype][side]["nodes"] >= 1
            profile = (tmp_path / f"amp_profile_{dtype}_{numerics}.txt").read_text()
            assert "critical path" in profile


def test_gpt2(tmp_path: pathlib.Path) -> None:
    document, printed = run_dry("gpt2", tmp_path)
    times, trained = document["microseconds"], document["trained"]
    assert list(times) == list(trained) == ["jax.jit", "xla", "equivalent"]
    assert trained["xla"] == pytest.approx(trained["jax.jit"], rel=1e-6)
    assert trained["jax.jit"]["weights have moved"] > 0
    assert document["equivalent / jax.jit"] == times["equivalent"] / times["jax.jit"]
    assert "ratio to PyTorch's best" not in document
    assert all(f"{side} " in printed for side in times)


def test_graphed_callables(tmp_path: pathlib.Path) -> None:
    document, _ = run_dry("graphed_callables", tmp_path)
    sides = set(document["microseconds_per_step"])
    assert sides == set(document["losses"])
    assert sides == {
        "the step captured with its branch",
        "captured, equivalent numerics",
        "graphed callables",
        "jax.jit of each module",
    }
    for losses in document["losses"].values():
        assert losses == pytest.approx(document["losses"]["jax.jit of each module"], rel=1e-3)


def test_buckets(tmp_path: pathlib.Path) -> None:
    document, printed = run_dry("buckets", tmp_path)
    assert document["buckets"] == 4
    assert document["memory"] == document["pool_bytes"] / document["largest_alone_bytes"]
    assert document["capture"] == document["capture_seconds"] / document["compile_seconds"]
    assert [row["size"] for row in document["calls"]] == [1, 2, 5, 6, 7, 8]
    assert document["hits"] == 6 * 4, "one to compare and three timed ones each"
    assert f"memory: {document['memory']:.3f}" in printed


def test_float_matmuls(tmp_path: pathlib.Path) -> None:
    document, printed = run_dry("float_matmuls", tmp_path, "--repeats=1")
    ((shape, row),) = document["shapes, rows by depth by columns"].items()
    assert set(row["microseconds of one"]) == {'tg.capture, numerics="equivalent"', "tg.capture"}
    for largest, mean in row["errors, largest and root mean square"].values():
        assert 0 < mean < largest < 1e-5
    assert printed.startswith(f"{shape}: tg.capture, numerics")
