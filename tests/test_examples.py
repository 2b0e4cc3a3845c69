"""Every example runs to its end, where its assertion stands, and stays short."""

from __future__ import annotations

import pathlib
import subprocess

import numpy as np
import pytest

from tests.paths import ROOT
from tests.processes import run_copy

EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
EXPECTED = {
    "01_capture_and_replay": ["hits=9, misses=2"],
    "02_every_phase": ["dot_general", "arena", "hits=19, misses=1"],
    "03_train_digits": [
        "epoch 15/15",
        "loss curve equals jax.jit's bit for bit: True",
        "calls: 450, captures: 1, pool: ",
        "loss plot: ",
    ],
    "04_inference": ["23 requests", "hits=23, misses=3"],
    "05_partial": ['mode="partial"', "length  32.0"],
    "06_reading_an_error": ["  where: ", "  why:   ", "  fix:   ", "repaired: "],
    "07_raw_graph": ["<CUDAGraph captured>", "batch 2: loss "],
    "08_two_streams": ["2 branches", "stream-wait"],
    "09_shared_pool": ["three functions, one pool: ", "a raw graph in that pool: "],
    "10_graphed_callables": ["ways: [", "equal to jax.jit of each module"],
    "11_mixed_precision": ["bfloat16: loss ", "float16:  loss ", " 4 steps skipped", "one graph"],
    "12_data_parallel": ["4 devices, loss ", "all-reduce"],
    "13_buckets": ["40 batches, ", "released: 0 bytes", "lets padding into its results"],
    "14_saved_graph": ["3 graphs in ", "loaded in ", "`answer` [1, 1, 1]"],
}


def run_example(path: pathlib.Path, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs one example as a user does, from another folder, with warnings as errors."""
    return run_copy([path], folder=folder, variables={"MPLBACKEND": "agg"})


def test_every_example_is_expected() -> None:
    assert [path.stem for path in EXAMPLES] == list(EXPECTED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = run_example(path, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in EXPECTED[path.stem]:
        assert text in done.stdout
    if path.stem == "03_train_digits":
        plot = (tmp_path / "digits_loss.png").read_bytes()
        assert plot.startswith(b"\x89PNG")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_asserts(path: pathlib.Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 80
    assert any(line.strip().startswith("assert ") for line in lines)


def test_a_failing_example_is_noticed(tmp_path: pathlib.Path) -> None:
    broken = tmp_path / "00_broken.py"
    broken.write_text("import tracegraph\nassert not tracegraph.__name__\n")
    done = run_example(broken, tmp_path)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


def test_data_is_whole_and_its_licence_is_named() -> None:
    rows = np.loadtxt(ROOT / "examples" / "data" / "digits.csv.gz", delimiter=",", dtype=np.uint8)
    assert rows.shape == (1797, 65)
    assert rows[:, :64].max() == 16
    assert np.array_equal(np.unique(rows[:, 64]), np.arange(10))
    text = (ROOT / "examples" / "data" / "README.md").read_text()
    assert "CC BY 4.0" in text
    assert "Alpaydin" in text
