"""The Python blocks of the README run in order, in one namespace; its links lead somewhere."""

from __future__ import annotations

import pathlib
import re
import shlex
from typing import Any

import pytest

from tests.paths import ROOT
from tests.processes import run_copy

README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]


def find_blocks(text: str) -> list[tuple[int, str]]:
    """Returns each Python block with the number of the line before it."""
    return [
        (text[: match.start(1)].count("\n"), match.group(1))
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def run_blocks(path: pathlib.Path) -> dict[str, Any]:
    """Runs the blocks of a document; a traceback shows the document's own line numbers."""
    namespace: dict[str, Any] = {"__name__": "readme"}
    for line, block in find_blocks(path.read_text()):
        exec(compile("\n" * line + block, str(path), "exec"), namespace)
    return namespace


def find_broken_links(path: pathlib.Path) -> list[str]:
    """Returns the relative links of a document that lead to no file or folder."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    return [link for link in links if "://" not in link and not (path.parent / link).exists()]


def find_unnamed_folders(root: pathlib.Path, text: str) -> list[str]:
    """Returns the folders of the package that a text does not name as `folder/`."""
    files = [
        file for top in ("tracegraph", "lowering", "runtime") for file in (root / top).rglob("*.py")
    ]
    folders = {file.parent.relative_to(root).as_posix() for file in files}
    return sorted(folder for folder in folders if f"`{folder}/`" not in text)


def test_readme_blocks_run() -> None:
    namespace = run_blocks(README)
    assert "report" in namespace, "the last block defines it"


def test_readme_command_runs() -> None:
    (command,) = re.findall(r"^`python (-m tracegraph .*)`$", README.read_text(), re.MULTILINE)
    done = run_copy(shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert "known before the first run" in done.stdout


def test_readme_is_short_and_code_comes_first() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    assert find_blocks(text)[0][0] <= 12


def test_readme_begins_with_for_whom_what_is_gained_and_what_to_type() -> None:
    first = README.read_text().splitlines()[:10]
    assert any("for training and inference" in line for line in first)
    assert any(line.startswith("| GPT") and line.count("|") == 5 for line in first)
    assert any("pip install" in line and "@tg.capture" in line for line in first)


def test_a_failing_block_is_noticed(tmp_path: pathlib.Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("text\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_blocks(document)
    assert caught.traceback[-1].lineno == 6


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: pathlib.Path) -> None:
    assert find_broken_links(path) == []


def test_a_broken_link_is_noticed(tmp_path: pathlib.Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("[a](a.md) [b](missing.md#x) [c](https://example.org/d)")
    assert find_broken_links(document) == ["missing.md"]


def test_architecture_names_every_folder() -> None:
    assert find_unnamed_folders(ROOT, (ROOT / "docs" / "architecture.md").read_text()) == []


def test_an_unnamed_folder_is_noticed() -> None:
    text = "`tracegraph/`, `tracegraph/constraints/`, `tracegraph/passes/` and `lowering/`"
    assert "runtime/host" in find_unnamed_folders(ROOT, text)


def test_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()
