"""The figures of `gpu_replay.py`: ratios, the limits they are compared with, and the tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

JIT, TRACEGRAPH, TORCH = "jax.jit", "tg.capture", "torch"


@dataclasses.dataclass(frozen=True)
class SideFigures:
    """Medians of one side, in microseconds.

    Attributes:
        total_us: per call of a long loop, the device's work included.
        host_us: that the host spends in one call.
        launch_us: that the host spends in the launch of the graph alone; None without a graph.
    """

    total_us: float
    host_us: float
    launch_us: float | None = None


@dataclasses.dataclass
class CaseResult:
    """What is known of one case.

    Attributes:
        name: of the case.
        refusal: why it was not timed; None for a case that was.
        sides: figures by side.
        capture: sizes and seconds of the capture and of XLA, by name.
        notes: why a peer or a figure is missing, by its name.
    """

    name: str
    refusal: str | None = None
    sides: dict[str, SideFigures] = dataclasses.field(default_factory=dict)
    capture: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Limit:
    """The highest value allowed of one figure of one case; ``decimals`` are for printing."""

    case: str
    figure: str
    highest: float
    decimals: int = 2


MODELS = ("gpt_2x128", "gpt_12x128", "gpt2_small", "mlp")
LIMITS = (
    Limit("tiny", "launch_us", 2.5, 1),
    Limit("gpt_12x128", "launch_us", 15, 1),
    Limit("one_in_one_out", "host_us", 12, 1),
    Limit("gpt_12x128", "host_us", 40, 1),
    Limit("gpt_12x128", "host / jax.jit", 1 / 25, 3),
    Limit("gpt_12x128", "total / jax.jit", 0.80),
    Limit("gpt_12x128", "total / best torch", 0.52),
    Limit("gpt_2x128", "total / jax.jit", 0.88),
    Limit("gpt2_small", "total / jax.jit", 1.0),
    Limit("gpt_12x128", "capture seconds", 2.0),
    # A segment has at least 2 MiB, so that smaller graphs say nothing about the plan.
    *(Limit(name, "pool / needed bytes", 1.05, 3) for name in MODELS),
)


def find_best_torch(result: CaseResult) -> SideFigures | None:
    """Returns the PyTorch variant with the shortest total time."""
    peers = [figures for name, figures in result.sides.items() if name.startswith(TORCH)]
    return min(peers, key=lambda figures: figures.total_us, default=None)


def count_needed_bytes(capture: Mapping[str, Any]) -> float | None:
    """Returns inputs, outputs, constants and XLA's temporaries; what is aliased counts once."""
    names = ("argument_bytes", "output_bytes", "temp_bytes", "constant_bytes")
    if not {*names, "alias_bytes"} <= capture.keys():
        return None
    return sum(capture[name] for name in names) - capture["alias_bytes"]


def compute_figures(result: CaseResult) -> dict[str, float]:
    """Returns every figure that has a limit; those not measured are left out."""
    figures: dict[str, float] = {}
    mine, jit, torch = (
        result.sides.get(TRACEGRAPH),
        result.sides.get(JIT),
        find_best_torch(result),
    )
    if mine is not None:
        figures |= {"host_us": mine.host_us, "total_us": mine.total_us}
        if mine.launch_us is not None:
            figures["launch_us"] = mine.launch_us
        for name, other in ((JIT, jit), ("best torch", torch)):
            if other is not None:
                figures[f"host / {name}"] = mine.host_us / other.host_us
                figures[f"total / {name}"] = mine.total_us / other.total_us
    seconds: Mapping[str, float] = result.capture.get("seconds", {})
    if seconds:
        figures["capture seconds"] = sum(seconds.values()) - seconds["compile"]
        # What `jax.jit` does too is none of a capture's time.
        beyond = figures["capture seconds"] - seconds.get("trace", 0.0)
        figures["beyond / compile"] = beyond / seconds["compile"]
    needed = count_needed_bytes(result.capture)
    if needed:
        figures["pool / needed bytes"] = result.capture["pool_bytes"] / needed
    return figures


def check_limits(
    results: Sequence[CaseResult], limits: Sequence[Limit] = LIMITS
) -> list[dict[str, Any]]:
    """Returns one row per limit of a case that was chosen: measured value and verdict."""
    by_name = {result.name: result for result in results}
    rows = []
    for limit in limits:
        if limit.case not in by_name:
            continue
        value = compute_figures(by_name[limit.case]).get(limit.figure)
        verdict = "not measured"
        if value is not None:
            verdict = "met" if value <= limit.highest else "missed"
        rows.append({**dataclasses.asdict(limit), "measured": value, "verdict": verdict})
    return rows


def to_document(
    run: Mapping[str, Any], results: Sequence[CaseResult], limits: Sequence[Limit] = LIMITS
) -> dict[str, Any]:
    """Returns everything as plain values for a JSON file."""
    cases = [{**dataclasses.asdict(r), "figures": compute_figures(r)} for r in results]
    return {"run": dict(run), "cases": cases, "checks": check_limits(results, limits)}


def format_report(
    run: Mapping[str, Any],
    results: Sequence[CaseResult],
    limits: Sequence[Limit] = LIMITS,
    title: str = "CUDA graphs against their peers",
) -> str:
    """Returns the same as a Markdown page."""
    parts = [
        f"# {title}",
        "\n".join(f"* {key}: {value}" for key, value in run.items()),
        "## Time per call, microseconds",
        _format_times(results),
        "## Capture",
        _format_captures(results),
    ]
    if limits:
        parts += ["## Limits", _format_checks(check_limits(results, limits))]
    notes = [f"* {r.name}, refused: {r.refusal}" for r in results if r.refusal]
    notes += [f"* {r.name}, {name}: {text}" for r in results for name, text in r.notes.items()]
    if notes:
        parts += ["## Not measured", "\n".join(notes)]
    return "\n\n".join(parts) + "\n"


def _format_times(results: Sequence[CaseResult]) -> str:
    rows = []
    for result in results:
        jit = result.sides.get(JIT)
        for name, side in result.sides.items():
            ratio = side.total_us / jit.total_us if jit is not None else None
            cells = (side.total_us, side.host_us, side.launch_us)
            rows.append([result.name, name, *(_format(x, 1) for x in cells), _format(ratio, 2)])
    header = ("case", "side", "total", "host", "launch alone", "total / jax.jit")
    return format_table(header, rows)


def _format_captures(results: Sequence[CaseResult]) -> str:
    rows = []
    for result in results:
        capture, figures = result.capture, compute_figures(result)
        seconds = capture.get("seconds", {})
        needed = count_needed_bytes(capture)
        counts = (
            capture.get("nodes"),
            capture.get("pool_bytes"),
            needed,
            capture.get("temp_bytes"),
        )
        rows.append(
            [
                result.name,
                *(_format(count, 0) for count in counts),
                _format(figures.get("pool / needed bytes"), 3),
                _format(seconds.get("compile"), 2),
                _format(figures.get("capture seconds"), 2),
                _format(capture.get("first_call_seconds"), 2),
            ]
        )
    header = (
        *("case", "nodes", "pool bytes", "needed bytes", "XLA temp bytes", "pool / needed"),
        *("XLA compile s", "beyond it s", "first call s"),
    )
    return format_table(header, rows)


def _format_checks(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            row["case"],
            row["figure"],
            _format(row["measured"], row["decimals"]),
            _format(row["highest"], row["decimals"]),
            row["verdict"],
        ]
        for row in checks
    ]
    return format_table(("case", "figure", "measured", "limit", "verdict"), rows)


def _format(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:,.{decimals}f}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of Markdown."""
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
