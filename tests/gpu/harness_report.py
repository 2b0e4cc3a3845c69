"""The figures of the harnesses on a GPU as a Markdown document."""

from __future__ import annotations

import collections
import datetime
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping, Sequence

import jax

from tests.conformance.report import select, select_counted
from tests.conformance.results import Outcome, Result

ROWS = {
    Outcome.PASSED: "equal bit for bit",
    Outcome.TOLERANCE: "within tolerance, with a reason",
    Outcome.REFUSED: "refused",
    Outcome.DIFFERING: "differing",
    Outcome.ERROR: "error",
}


def format_markdown(results: Sequence[Result], command: str, device: str) -> str:
    """Returns the document: versions, counts by outcome, refusals by kind, every other case.

    Args:
        results: one per case.
        command: what was typed.
        device: name of the GPU.
    """
    counted = select_counted(results)
    lines = [
        "# JAX's harnesses on a GPU",
        "",
        f"{datetime.date.today().isoformat()}, {device}, jax {jax.__version__}, "
        f"jaxlib {importlib.metadata.version('jaxlib')}, Python {platform.python_version()}. "
        f"Command: `{command}`.",
        "",
        "Each case is captured and replayed on two inputs; each result is compared with that of",
        "the XLA executables that the graph was made from.",
        "",
        *_format_table("outcome", {text: len(select(counted, o)) for o, text in ROWS.items()}),
        f"| all | {len(counted)} |",
        "",
        *_format_refusals(counted),
    ]
    for outcome in (Outcome.TOLERANCE, Outcome.DIFFERING, Outcome.ERROR, Outcome.JIT_FAILS):
        lines += _format_cases(outcome, select(results, outcome))
    same = sum(not result.has_two_inputs for result in counted)
    lines.append(f"Without a second input of other values: {same}.")
    return "\n".join(lines) + "\n"


def find_refused_counts(results: Iterable[Result]) -> Mapping[str, int]:
    """Returns how often each kind of refusal came, most frequent first."""
    refused = select(results, Outcome.REFUSED)
    return dict(collections.Counter(result.rule for result in refused).most_common())


def _format_refusals(results: Sequence[Result]) -> list[str]:
    counts = find_refused_counts(results)
    if not counts:
        return ["Nothing was refused.", ""]
    example = {result.rule: result for result in reversed(select(results, Outcome.REFUSED))}
    lines = ["| refused because | cases | for example |", "|---|---|---|"]
    lines += [
        f"| {_escape(rule)} | {count} | {example[rule].name} |" for rule, count in counts.items()
    ]
    return [*lines, ""]


def _format_cases(outcome: Outcome, results: Sequence[Result]) -> list[str]:
    if not results:
        return []
    head = ROWS.get(outcome, "not counted, for `jax.jit` itself fails")
    lines = [f"- `{result.name}`: {_escape(result.reason)}" for result in results]
    return [f"{head[0].upper()}{head[1:]} ({len(results)}):", "", *lines, ""]


def _format_table(head: str, counts: Mapping[str, int]) -> list[str]:
    return [f"| {head} | cases |", "|---|---|", *(f"| {key} | {n} |" for key, n in counts.items())]


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
