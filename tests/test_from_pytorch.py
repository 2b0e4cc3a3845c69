"""The pages for those who come from PyTorch: blocks run, every name of `torch.cuda` has a row."""

from __future__ import annotations

import collections
import pathlib
import re
from typing import Any

import pytest

import tracegraph as tg
from tests.paths import ROOT
from tests.test_docs import MEMORY, compile_example
from tests.test_readme import find_blocks, run_blocks

GUIDE = ROOT / "docs" / "from_pytorch.md"
NAMES = (ROOT / "docs" / "torch_names.md").read_text()
# The `__all__`s of the modules that the page lists, in the release that it names.
TORCH_NAMES = (ROOT / "tests" / "data" / "torch_cuda_names.txt").read_text().split()
SECTIONS = """Devices; TensorFloat-32; Sums of 16-bit matmuls; Asynchronous execution; Streams;
Streams of backward passes; Memory management; Plans of cuFFT; Compilation; Code for any device;
Pinned memory; Several GPUs; CUDA graphs; Constraints; A whole network; A part of a network;
Mixed precision; Several streams in a capture; DistributedDataParallel;
Memory of graphs, and sharing it"""
# Sections with nothing to run: a cache of XLA's, a table, what is not built.
WITHOUT_CODE = {"Compilation", "Constraints", "DistributedDataParallel"}

Row = tuple[list[str], list[str], str]


def find_rows(text: str) -> list[Row]:
    """Returns the rows of all tables: names of PyTorch, names of ours, the remark."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(find_names(row[0]), find_names(row[1]), row[2]) for row in cells]


def find_names(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


def is_there(name: str) -> bool:
    """True for `tg.x.y` that there is."""
    value: Any = tg
    for part in name.split(".")[1:]:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return name.startswith("tg.")


def find_missing(rows: list[Row]) -> list[str]:
    """Returns the names in the column of ours that do not exist."""
    return [name for _, ours, _ in rows for name in ours if not is_there(name)]


def find_unnamed(rows: list[Row]) -> list[str]:
    """Returns names that we have exactly as PyTorch, and whose row does not say so."""
    unnamed: list[str] = []
    for names, ours, _ in rows:
        for name in names:
            last = name.removeprefix("graphs.")
            same = [spelt for spelt in (f"tg.{last}", f"tg.memory.{last}") if is_there(spelt)]
            if same and not set(same) & set(ours):
                unnamed.append(name)
    return unnamed


def test_blocks_of_the_guide_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compile_example(MEMORY, tmp_path)
    assert run_blocks(GUIDE)["out_2"].shape == (4,), "the last block defines it"


def test_the_guide_follows_the_sections_of_the_cuda_semantics() -> None:
    text = GUIDE.read_text()
    heads = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    assert heads == re.split(r";\s+", SECTIONS)
    parts = re.split(r"^##+ .+$", text, flags=re.MULTILINE)[1:]
    assert {
        head for head, part in zip(heads, parts, strict=True) if not find_blocks(part)
    } == WITHOUT_CODE


def test_every_name_of_torch_cuda_has_one_row() -> None:
    counts = collections.Counter(name for names, _, _ in find_rows(NAMES) for name in names)
    assert [name for name, count in counts.items() if count > 1] == []
    assert sorted(counts) == sorted(TORCH_NAMES)


def test_every_name_of_ours_in_the_table_exists() -> None:
    assert find_missing(find_rows(NAMES)) == []


def test_a_row_without_a_name_of_ours_says_why() -> None:
    assert [names for names, ours, why in find_rows(NAMES) if not ours and len(why) < 8] == []


def test_a_name_that_we_have_is_in_its_row() -> None:
    assert find_unnamed(find_rows(NAMES)) == []


def test_wrong_rows_are_noticed() -> None:
    rows = find_rows("| `Stream`, `device` | `tg.Stream`, `tg.Strem` | the same |\n")
    assert rows == [(["Stream", "device"], ["tg.Stream", "tg.Strem"], "the same")]
    assert find_missing(rows) == ["tg.Strem"]
    assert find_unnamed(rows) == ["device"]
    assert find_unnamed(find_rows("| `empty_cache` | | not yet |\n")) == ["empty_cache"]
