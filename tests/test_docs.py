"""Pages of the documentation that say what the code says: blocks run, tables are complete."""

from __future__ import annotations

import gc
import inspect
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

import tracegraph as tg
from tests.paths import ROOT
from tests.test_readme import run_blocks
from tracegraph.reports.report import PARTS
from tracegraph.runtime.memory import config as config_module
from tracegraph.runtime.memory.config import parse_alloc_conf

DOCS = ROOT / "docs"
MEMORY = (DOCS / "memory.md").read_text()
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("design/*.md"))]
ARCHITECTURE = (DOCS / "architecture.md").read_text()
SOURCES = [
    path.relative_to(ROOT).as_posix()
    for top in ("tracegraph", "lowering", "runtime", "tests", "benchmarks")
    for path in sorted((ROOT / top).rglob("*.py"))
]
CODE = "\n".join((ROOT / path).read_text() for path in SOURCES)
SETTING = re.compile(r"(?:TRACEGRAPH_ALLOC_CONF=)([a-z_]\S+:\S+)")
INLINE_OPTION = re.compile(r"`([a-z_]+:[^`\s]+)`")
OPTIONS = config_module.OPTIONS


def compile_example(page: str, folder: pathlib.Path) -> None:
    """Compiles the C of a page with the command of the page; skips without a compiler."""
    (source,) = re.findall(r"^```c\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^cc .*$", page, re.MULTILINE)
    if shutil.which("cc") is None:
        pytest.skip("needs a compiler of C: there is no cc on the path")
    words = command.split()
    (folder / words[3]).write_text(source)
    subprocess.run([*words, "-Wall", "-Werror", "-Wno-unused-parameter"], cwd=folder, check=True)


def list_rows(text: str, head: str) -> list[list[str]]:
    """Returns the cells of a table that begins with a head line."""
    lines = text.split(head, 1)[1].splitlines()[2:]
    rows = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), None)]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def find_wrong_settings(text: str) -> list[str]:
    """Returns the settings of the allocator in a text that the allocator would refuse."""
    found = SETTING.findall(text)
    found += [each for each in INLINE_OPTION.findall(text) if each.partition(":")[0] in OPTIONS]
    return [each for each in found if not _is_allowed(each)]


def _is_allowed(setting: str) -> bool:
    try:
        parse_alloc_conf(setting)
    except tg.ConfigError:
        return False
    return True


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder of its own; what earlier tests dropped is gone, since the blocks count bytes."""
    gc.collect()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_blocks_of_memory_run(folder: pathlib.Path) -> None:
    compile_example(MEMORY, folder)
    assert "result" in run_blocks(DOCS / "memory.md"), "the last block defines it"


def test_blocks_of_devices_run(folder: pathlib.Path) -> None:
    assert run_blocks(DOCS / "devices.md")["double"].cache_info().captures >= 1


def test_blocks_of_comm_run(folder: pathlib.Path) -> None:
    captured = run_blocks(DOCS / "comm.md")["step"]
    assert captured.cache_info().captures == len(tg.comm.broadcast(np.ones(1)))


def test_the_table_of_comm_is_complete() -> None:
    rows = list_rows((DOCS / "comm.md").read_text(), "| Function | What it returns |")
    written = {row[0].strip("`").split("(")[0]: row[0] for row in rows}
    assert sorted(written) == tg.comm.__all__
    for name, row in written.items():
        parameters = inspect.signature(getattr(tg.comm, name)).parameters
        assert re.findall(r"(\w+)(?:=[^,)]+)?[,)]", row) == list(parameters)


def test_every_name_for_devices_is_explained() -> None:
    words = set(re.findall(r"[A-Za-z_]+", (DOCS / "devices.md").read_text()))
    modules = {n: getattr(getattr(tg, n), "__module__", "") for n in tg.__all__}
    names = [n for n, module in modules.items() if module.startswith("tracegraph.devices.")]
    assert len(names) == 17
    assert [name for name in names if name not in words] == []


def test_blocks_of_memory_snapshots_run(folder: pathlib.Path) -> None:
    run_blocks(DOCS / "memory_snapshots.md")
    assert (folder / "memory.pickle").stat().st_size > 100


def test_blocks_of_explain_run(folder: pathlib.Path) -> None:
    names = run_blocks(DOCS / "explain.md")
    assert names["report"].startswith("`step` is captured (")


def test_blocks_of_profile_run(folder: pathlib.Path) -> None:
    assert "longest" in run_blocks(DOCS / "profile.md"), "the last block defines it"


def test_blocks_of_streams_run(folder: pathlib.Path) -> None:
    names = run_blocks(DOCS / "streams.md")
    assert names["start"].elapsed_time(names["end"]) > 0


def test_the_table_of_streams_names_what_there_is() -> None:
    text = (DOCS / "streams.md").read_text()
    rows = list_rows(text, "| `torch.cuda` | tracegraph |")
    for row, kind in ((rows[0], tg.Stream), (rows[1], tg.Event)):
        for name in re.findall(r"`\.(\w+)`", row[0]):
            assert hasattr(kind, name), f"{kind.__name__}.{name}"
    (functions,) = [row for row in rows if row[0].startswith("`stream`")]
    for name in re.findall(r"`(\w+)`", functions[0]):
        assert hasattr(tg, name), name


def test_blocks_of_raw_graph_run(folder: pathlib.Path) -> None:
    assert "end" in run_blocks(DOCS / "raw_graph.md"), "the last block defines it"


def test_blocks_of_graphed_callables_run(folder: pathlib.Path) -> None:
    assert "updated" in run_blocks(DOCS / "graphed_callables.md"), "the last block defines it"


def test_amp_blocks_run() -> None:
    assert "train_clipped" in run_blocks(DOCS / "amp.md"), "the last function"


def test_the_probes_page_runs():
    assert "first" in run_blocks(DOCS / "probes.md"), "the last block defines it"


def test_blocks_of_buckets_run(folder: pathlib.Path) -> None:
    assert "mean" in run_blocks(DOCS / "buckets.md"), "a block defines it"


def test_blocks_of_saved_graphs_run(folder: pathlib.Path) -> None:
    names = run_blocks(DOCS / "saved_graphs.md")
    assert sorted(path.name for path in folder.iterdir()) == ["score.tg", "step.tg"]
    assert "signature 0" in names["again"].explain()


def test_the_tables_of_explain_are_complete(folder: pathlib.Path) -> None:
    text = (DOCS / "explain.md").read_text()
    parts = [row[0].strip("`") for row in list_rows(text, "| Part | What it is |")]
    assert parts == list(PARTS)
    lines = [row[0].strip("`") for row in list_rows(text, "| Line | What it says |")]
    report = tg.capture(lambda x: x * 2).explain(1.0)
    titles = [line.split(":")[0] for line in report.splitlines() if line[0].isalpha()]
    # What only some reports have: a GPU, eager parts, an earlier capture, gradients, notes, loops.
    rare = {"device", "replaced", "calls run", "captured anew", "gradients", "notes", "loops"}
    assert set(titles) - {"more"} == set(lines[1:]) - rare


def test_the_table_of_options_is_that_of_the_code() -> None:
    table = (config_module.__doc__ or "").replace("``", "`")
    written = list_rows(MEMORY, "| Option | Values (default first) | Meaning |")
    assert written == list_rows(table, "| Option | Values (default first) | Meaning |")
    assert [row[0].strip("`") for row in written] == list(OPTIONS)


def test_every_public_name_of_memory_is_explained() -> None:
    words = set(re.findall(r"[A-Za-z_]+", MEMORY))
    assert [name for name in tg.memory.__all__ if name not in words] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_in_examples_are_allowed(page: pathlib.Path) -> None:
    wrong = ["max_split_size_mb:2"] if page.name == "errors.md" else []
    assert find_wrong_settings(page.read_text()) == wrong


def test_a_wrong_setting_is_noticed() -> None:
    text = "`provider:tpu`, `backend:native`, `a.py:3`,\nTRACEGRAPH_ALLOC_CONF=max_split:3 x\n"
    assert find_wrong_settings(text) == ["max_split:3", "provider:tpu"]


def find_missing_tests(text: str) -> list[str]:
    """Returns the tests that a text names as ``file.py::test`` and that are not in ``tests/``."""
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", text)
    return [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"^def {name}\(", read_if_there(ROOT / "tests" / path), re.MULTILINE)
    ]


def read_if_there(path: pathlib.Path) -> str:
    return path.read_text() if path.exists() else ""


def test_every_test_that_the_conformance_page_names_exists() -> None:
    text = (DOCS / "conformance.md").read_text()
    assert text.count(".py::test_") > 60
    assert find_missing_tests(text) == []


def test_every_row_of_the_memory_tests_says_how_it_is_held() -> None:
    text = (DOCS / "conformance.md").read_text()
    rows = list_rows(text, "| PyTorch, `test/test_cuda.py` | Here |")
    held = re.compile(r"`[\w/]+\.py::test_\w+`|does not apply: |not built: ")
    assert [row for row in rows if not row[0].startswith("**") and not held.search(row[1])] == []


def test_a_missing_test_is_noticed() -> None:
    text = "`test_docs.py::test_a_missing_test_is_noticed`, `test_docs.py::test_b`, `no.py::test_c`"
    assert find_missing_tests(text) == ["test_docs.py::test_b", "no.py::test_c"]


def find_missing_files(text: str) -> list[str]:
    """Returns the Python files that a text names, by path or by name, and that are not there."""
    named = re.findall(r"`([\w/]+\.py)`", text)
    return [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in SOURCES)]


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(path: pathlib.Path) -> None:
    # Programs of users, and PyTorch's own files.
    if path.name not in ("errors.md", "conformance.md"):
        assert find_missing_files(path.read_text()) == []


def test_a_missing_file_is_noticed() -> None:
    text = "`runtime/definition/graph.py`, `graph.py`, `runtime/graphs.py` and `raph.py`"
    assert find_missing_files(text) == ["runtime/graphs.py", "raph.py"]


TITLES = set(re.findall(r"\bNote (\[[^\]]+\])(?:\.|$)", CODE, re.MULTILINE))


def find_missing_notes(text: str) -> list[str]:
    """Returns the titled notes that a text cites and that no source has at the start of a line."""
    cited = re.findall(r"Note (\[[^\]]+\])", " ".join(text.split()))
    return [title for title in cited if title not in TITLES]


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.name)
def test_notes_that_a_page_cites_exist(path: pathlib.Path) -> None:
    assert find_missing_notes(path.read_text()) == []


def test_a_missing_note_is_noticed() -> None:
    assert find_missing_notes("Note [Early\nstarts] and Note [Late starts]") == ["[Late starts]"]


def test_architecture_walks_to_the_replay_in_twelve_stops() -> None:
    text = ARCHITECTURE.split("## From a function", 1)[1].split("\n## ", 1)[0]
    stops = [
        " ".join(stop.split()) + " " for stop in re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    ]
    assert len(stops) == 12
    assert [stop for stop in stops if not find_files(stop)] == []
    assert [stop for stop in stops if not ("In: " in stop and "Out: " in stop)] == []


def find_files(text: str) -> list[str]:
    """Returns the Python files of the package that a text names by their paths."""
    return re.findall(r"`((?:tracegraph|lowering|runtime)/[\w/]+\.py)`", text)


def test_the_records_of_architecture_exist() -> None:
    rows = list_rows(ARCHITECTURE, "| Layer | Records | Owner of the waist |")
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row[1])]
    assert len(named) > 30
    assert [name for name in named if not re.search(rf"^class {name}\b", CODE, re.MULTILINE)] == []


def test_the_glossary_is_sorted_and_has_each_word_once() -> None:
    rows = list_rows((DOCS / "glossary.md").read_text(), "| Word | Meaning | In the code |")
    words = [row[0].lower() for row in rows]
    assert words == sorted(set(words))
    assert all(len(row) == 3 and row[1] and row[2].strip("| ") for row in rows)


def test_the_figures_of_the_readme_are_those_of_the_pages() -> None:
    head = "| One H200, microseconds per call (host time) |"
    pages = {
        "figures.md": "| Case | tg.capture: total |",
        "numerics.md": "| Step | PyTorch's best |",
    }
    measured = {
        round(float(figure.replace(",", "")))
        for page, first in pages.items()
        for row in list_rows((DOCS / page).read_text(), first)
        for cell in row[1:]
        for figure in re.findall(r"\d[\d.,]*", cell)
    }
    rows = list_rows((ROOT / "README.md").read_text(), head)
    shown = {int(figure) for row in rows for cell in row[1:] for figure in re.findall(r"\d+", cell)}
    assert len(shown) > 10
    assert shown <= measured


def find_broken_sections(path: pathlib.Path) -> list[str]:
    """Returns the links of a page that lead to no page, or to no section of one."""
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text())
    return [
        f"{page}#{section}"
        for page, section in links
        if "://" not in page and not has_section(path.parent / page if page else path, section)
    ]


def has_section(path: pathlib.Path, section: str) -> bool:
    """True when there is such a file, and in it such a section, if one is named."""
    if not path.exists() or not section:
        return path.exists()
    heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return section in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.name)
def test_links_lead_to_sections(path: pathlib.Path) -> None:
    assert find_broken_sections(path) == []


def test_a_link_to_a_missing_section_is_noticed(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# What is A, and `why`?\n[1](#what-is-a-and-why) [2](#b) [3](a.md#c) [4](d.md)"
    )
    assert find_broken_sections(page) == ["#b", "a.md#c", "d.md#"]
