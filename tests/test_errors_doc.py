"""docs/errors.md: every anchor has a section, and its examples do what they say."""

import contextlib
import re

import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.paths import ROOT
from tracegraph.__main__ import run_command
from tracegraph.error_sections import read_sections as read_sections_of_package
from tracegraph.runtime.errors import ConfigError, RecaptureWarning, TracegraphError
from tracegraph.runtime.memory.config import parse_alloc_conf

SOURCES = ("tracegraph", "lowering", "runtime")
ERRORS = (ROOT / "docs" / "errors.md").read_text()
CONSTRAINTS = (ROOT / "docs" / "constraints.md").read_text()
BLOCK = re.compile(
    r"^(?P<kind>Fails|Works|Reported):\n\n```(?P<language>.*)\n(?P<code>(?s:.*?))^```", re.MULTILINE
)
SETUP = re.search(r"```python setup\n(.*?)```", ERRORS, re.DOTALL)
HEAD = re.compile(r"^## (.+)$", re.MULTILINE)


def split_sections():
    parts = HEAD.split(ERRORS)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


SECTIONS = split_sections()


ANCHORS = (
    re.compile(r"(?<![\w-])anchor=\"([a-z-]+)\""),
    re.compile(r"^\s*_?(?:[A-Z_]+_)?ANCHOR\b[^=]*= \"([a-z-]+)\"", re.MULTILINE),
    re.compile(r"Violation\(\s*\"([a-z-]+)\""),
    re.compile(r"python -m tracegraph error ([a-z-]+)"),
)
# What may replace an anchor where none is spelled out: that of another record, or a constant.
PASSED_ON = re.compile(
    r"(?<![\w-])anchor=(?!\"|anchor\b|[a-z_]+(\[0\])?\.(anchor|rule)\b|_?[A-Z_]*ANCHOR\b)"
)
# A note in a report, and a warning.
REPORTED = ("large-constant", "recaptures")
SHELL_SETTING = re.compile(r"TRACEGRAPH_ALLOC_CONF=(\S+)")


def read_sources():
    return [p.read_text() for folder in SOURCES for p in sorted((ROOT / folder).rglob("*.py"))]


def find_anchors_in(text):
    return {anchor for pattern in ANCHORS for anchor in pattern.findall(text)}


def find_anchors():
    """Every anchor that an error or a violation in the code can carry."""
    return sorted(set().union(*map(find_anchors_in, read_sources())))


def test_sections_of_the_command_line_are_those_of_the_page():
    sections = read_sections_of_package()
    assert {name: text.strip() for name, text in SECTIONS.items()} == sections


def test_every_error_ends_in_the_command_that_explains_it():
    with pytest.raises(TracegraphError) as caught:
        tg.capture(lambda x: float(x))(jnp.ones(()))
    line = str(caught.value).splitlines()[-1]
    (words,) = re.findall(r" {10}python -m tracegraph (error [a-z-]+)$", line)
    assert run_command(words.split()).startswith(f"host-read\n\n{SECTIONS['host-read'].strip()}")


def list_examples(kind):
    return [
        pytest.param(anchor, block["code"], id=anchor)
        for anchor, text in SECTIONS.items()
        for block in BLOCK.finditer(text)
        if block["kind"] == kind and block["language"] == "python"
    ]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Examples write files where they are run."""
    monkeypatch.chdir(tmp_path)


def run(code):
    assert SETUP is not None
    space: dict[str, object] = {"__name__": "example"}
    exec(compile(SETUP.group(1), "setup.py", "exec"), space)
    exec(compile(code, "example.py", "exec"), space)


def test_anchors_are_found_in_the_code():
    assert {"callback", "stream-join", "stale-output", "large-constant"} <= set(find_anchors())


@pytest.mark.parametrize(
    "text",
    [
        'raise Bad("w", anchor="late")',
        'ANCHOR = "late"',
        '_DRIVER_ANCHOR: Final = "late"',
        '    LIMIT_ANCHOR = "late"',
        'Violation(\n    "late"',
        "see python -m tracegraph error late",
    ],
)
def test_every_spelling_of_an_anchor_is_found(text):
    assert find_anchors_in(f"x = 1\n{text}\n") == {"late"}


def test_no_anchor_is_spelled_in_another_way():
    assert [text for text in read_sources() if PASSED_ON.search(text)] == []
    assert PASSED_ON.search("Bad(anchor=find_section())")
    assert PASSED_ON.search("Bad(anchor='late')")


def test_anchors_of_pictures_are_no_anchors_of_errors():
    drawn = '<text text-anchor="middle"> bbox_to_anchor=(1, 1)'
    assert find_anchors_in(drawn) == set()
    assert not PASSED_ON.search(drawn)


def test_every_section_is_that_of_an_error():
    assert set(SECTIONS) == set(find_anchors())


@pytest.mark.parametrize("anchor", find_anchors())
def test_every_anchor_has_a_section(anchor):
    assert anchor in SECTIONS, f"docs/errors.md has no section `{anchor}`"


@pytest.mark.parametrize("anchor", SECTIONS)
def test_every_section_shows_a_failing_and_a_repaired_example(anchor):
    kinds = [block["kind"] for block in BLOCK.finditer(SECTIONS[anchor])]
    assert kinds == ["Reported" if anchor in REPORTED else "Fails", "Works"]


@pytest.mark.parametrize(("anchor", "code"), list_examples("Fails"))
def test_failing_example_raises_the_error_of_its_section(anchor, code):
    with pytest.raises(TracegraphError) as caught:
        run(code)
    assert caught.value.anchor == anchor


@pytest.mark.parametrize(("anchor", "code"), list_examples("Works"))
def test_repaired_example_runs(anchor, code):
    run(code)


@pytest.mark.parametrize(("anchor", "code"), list_examples("Reported"))
def test_reported_example_runs(anchor, code):
    if anchor != "recaptures":
        run(code)
        return
    with pytest.warns(RecaptureWarning, match=f"tracegraph error {anchor}") as caught:
        run(code)
    assert len(caught) == 1


@pytest.mark.parametrize(("kind", "is_refused"), [("Fails", True), ("Works", False)])
def test_settings_of_a_shell_example_are_refused_or_read(kind, is_refused):
    (code,) = (b["code"] for b in BLOCK.finditer(SECTIONS["config"]) if b["kind"] == kind)
    (text,) = SHELL_SETTING.findall(code)
    with pytest.raises(ConfigError) if is_refused else contextlib.nullcontext() as caught:
        parse_alloc_conf(text)
    assert caught is None or caught.value.anchor == "config"


def test_a_snapshot_that_is_not_there_is_refused_on_the_command_line():
    (line,) = re.findall(r"`python -m tracegraph (memory [^`]*)`", SECTIONS["snapshot"])
    with pytest.raises(TracegraphError) as caught:
        run_command(line.split())
    assert caught.value.anchor == "snapshot"


def test_every_rule_of_the_table_has_a_section_and_the_other_way_round():
    rows = re.findall(r"^\| \[([a-z-]+)\]\(errors\.md#([a-z-]+)\) \|", CONSTRAINTS, re.MULTILINE)
    assert all(name == target for name, target in rows)
    rules = {name for name, _ in rows}
    used = set()
    for path in (ROOT / "tracegraph" / "constraints").glob("*.py"):
        used.update(re.findall(r"Violation\(\s*\"([a-z-]+)\"", path.read_text()))
    assert rules == used | {"default-stream"}
    assert rules <= set(SECTIONS)
