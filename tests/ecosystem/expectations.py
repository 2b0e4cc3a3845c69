"""What is expected of each program: `expected.json`, a column for each kind of device.

A cell has a word for each mode of the program, as ``callback, equal``: `equal`, or the section
of docs/errors.md that refuses it. Where a cell is empty or missing, because no such device
has run the program since its outcome changed, it must be equal or refused by an error of
tracegraph. ``python -m tests.ecosystem --update`` writes the column of the device that it runs on;
read the change before you commit it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import jax

from tests.ecosystem.runner import Outcome
from tests.paths import ROOT

PATH = ROOT / "tests" / "ecosystem" / "expected.json"
# What neither equals the reference nor is refused for a reason, with the cause, by column.
DEFECTS: dict[str, dict[str, str]] = {"host": {}, "gpu": {}}

Table = dict[str, dict[str, str]]


def read_table() -> Table:
    """Returns the expected cells by the program's full name, then by the kind of device."""
    return json.loads(PATH.read_text())


def write_table(table: Table) -> None:
    """Writes the table, one line per program."""
    lines = [f"{json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table)]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def find_column() -> str:
    """Returns the column of the device that captures use: ``host`` or ``gpu``."""
    return "gpu" if jax.devices()[0].platform == "gpu" else "host"


def write_cell(outcomes: Sequence[Outcome]) -> str:
    """Returns what a cell says about the outcomes of a program in its modes."""
    return ", ".join(each.word for each in outcomes)


def find_problem(expected: str, outcomes: Sequence[Outcome]) -> str:
    """Returns how the outcomes of a program differ from its cell, or an empty text.

    Args:
        expected: the cell; empty for any program that is equal or refused.
        outcomes: in the order of the program's modes.
    """
    found = write_cell(outcomes)
    if expected == found:
        return ""
    reasons = "; ".join(each.reason for each in outcomes if each.reason)
    if expected:
        return f"expected `{expected}`, got `{found}`: {reasons}"
    if all(each.is_equal_or_refused for each in outcomes):
        return ""
    return f"neither equal nor refused, but `{found}`: {reasons}"
