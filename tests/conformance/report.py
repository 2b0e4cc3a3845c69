"""Figures of a conformance run: the table, the reasons, and the JSON document."""

from __future__ import annotations

import collections
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from tests.conformance.results import Outcome, Result

COLUMNS = (
    Outcome.PASSED,
    Outcome.TOLERANCE,
    Outcome.REFUSED,
    Outcome.DIFFERING,
    Outcome.ERROR,
)


def select(results: Iterable[Result], outcome: Outcome) -> list[Result]:
    """Returns the results of one class."""
    return [result for result in results if result.outcome is outcome]


def select_counted(results: Iterable[Result]) -> list[Result]:
    """Returns the results that count: those of the cases that `jax.jit` itself runs."""
    return [result for result in results if result.outcome is not Outcome.JIT_FAILS]


def passed_share(results: Iterable[Result]) -> float:
    """Returns the share of counted cases that are equal bit for bit; 0.0 when there are none."""
    counted = select_counted(results)
    return len(select(counted, Outcome.PASSED)) / len(counted) if counted else 0.0


def is_acceptable(results: Iterable[Result]) -> bool:
    """Returns True when no case differs and none ends in an error that is not a refusal."""
    return not any(r.outcome in (Outcome.DIFFERING, Outcome.ERROR) for r in results)


def format_report(results: Sequence[Result]) -> str:
    """Returns the table by group, and under it every reason and every differing case."""
    lines = [*_format_table(results), "", *_format_reasons(results)]
    for outcome in (Outcome.TOLERANCE, Outcome.DIFFERING, Outcome.ERROR):
        for result in select(results, outcome):
            lines.append(f"{outcome.value}: {result.name}: {result.reason}")
    failing = select(results, Outcome.JIT_FAILS)
    if failing:
        lines.append(f"not counted, jax.jit itself fails: {len(failing)}")
    same = [result for result in select_counted(results) if not result.has_two_inputs]
    lines.append(f"run with one input only (no second one with other values): {len(same)}")
    lines.append(f"equal bit for bit: {100 * passed_share(results):.2f} %")
    return "\n".join(lines)


def _format_table(results: Sequence[Result]) -> list[str]:
    groups: dict[str, list[Result]] = collections.defaultdict(list)
    for result in select_counted(results):
        groups[result.group].append(result)
    rows = [(group, groups[group]) for group in sorted(groups)]
    rows.append(("total", select_counted(results)))
    width = max(len(name) for name, _ in rows)
    heads = ["cases", *(outcome.value for outcome in COLUMNS)]
    lines = [f"{'group':<{width}}" + "".join(f"{head:>10}" for head in heads)]
    for name, members in rows:
        counts = [len(members), *(len(select(members, outcome)) for outcome in COLUMNS)]
        lines.append(f"{name:<{width}}" + "".join(f"{count:>10}" for count in counts))
    return lines


def _format_reasons(results: Iterable[Result]) -> list[str]:
    refused = select(results, Outcome.REFUSED)
    counts = collections.Counter(result.rule for result in refused)
    example = {result.rule: result for result in reversed(refused)}
    return [
        f"refused {count} times: {rule}: {example[rule].reason} ({example[rule].name})"
        for rule, count in counts.most_common()
    ]


def describe_versions() -> dict[str, str]:
    """Returns the versions that a figure belongs to."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "device": jax.devices()[0].platform,
        "x64": str(bool(jax.config.read("jax_enable_x64"))).lower(),
    }


def write_json(path: str | pathlib.Path, results: Sequence[Result]) -> None:
    """Writes versions, counts and every result that did not simply pass."""
    counted = select_counted(results)
    document: dict[str, Any] = {
        "versions": describe_versions(),
        "cases": len(counted),
        "counts": {outcome.value: len(select(results, outcome)) for outcome in Outcome},
        "one_input": sum(not result.has_two_inputs for result in counted),
        "groups": collections.Counter(result.group for result in counted),
        "not_passed": [_as_entry(r) for r in results if r.outcome is not Outcome.PASSED],
    }
    pathlib.Path(path).write_text(json.dumps(document, indent=1) + "\n")


def _as_entry(result: Result) -> dict[str, str]:
    return {
        "name": result.name,
        "outcome": result.outcome.value,
        "rule": result.rule,
        "reason": result.reason,
    }
