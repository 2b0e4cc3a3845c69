"""What becomes of each program here: ``python -m tests.ecosystem [NAME...] [--json FILE]``."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import jax

from tests.ecosystem.expectations import (
    find_column,
    find_problem,
    read_table,
    write_cell,
    write_table,
)
from tests.ecosystem.runner import FILES, Outcome, find_missing, load_programs, run_program


def main() -> None:
    """Runs all programs, or those that are named; ends with 1 where one is not as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.ecosystem", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="FILE.PROGRAM; by default all")
    parser.add_argument("--json", metavar="FILE", help="write the outcomes to this file too")
    parser.add_argument("--update", action="store_true", help="make them what is expected here")
    options = parser.parse_args()
    table, column = read_table(), find_column()
    found, problems = {}, 0
    print("| Program | Outcome | Expected | Seconds | Reason |\n|---|---|---|---|---|")
    for name, outcomes in _run(options.names):
        found[name] = outcomes
        expected = table.get(name, {}).get(column, "")
        problems += bool(find_problem(expected, outcomes))
        print(_format_row(name, outcomes, expected), flush=True)
    for name, outcomes in found.items():
        table.setdefault(name, {})[column] = write_cell(outcomes)
    if options.update:
        write_table(table)
    if options.json:
        pathlib.Path(options.json).write_text(_format_report(found) + "\n")
    print(f"{len(found)} programs, {problems} not as expected", file=sys.stderr)
    sys.exit(1 if problems and not options.update else 0)


def _run(names):
    named = {name.partition(".")[0] for name in names} or FILES
    for file in FILES:
        if file not in named:
            continue
        missing = find_missing(file)
        if missing:
            print(f"{file}: not run, {', '.join(missing)} is missing", file=sys.stderr)
            continue
        for name, program in load_programs(file).items():
            if not names or name in names:
                yield name, run_program(program)


def _format_row(name: str, outcomes: tuple[Outcome, ...], expected: str) -> str:
    seconds = sum(each.seconds for each in outcomes)
    reason = "; ".join(each.reason for each in outcomes if each.reason).replace("|", "/")
    cell = write_cell(outcomes)
    wanted = "" if expected == cell else expected or "equal or refused"
    return f"| {name} | {cell} | {wanted} | {seconds:.2f} | {reason[:160]} |"


def _format_report(found: dict[str, tuple[Outcome, ...]]) -> str:
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "programs": {
            name: [{"word": each.word, "reason": each.reason} for each in outcomes]
            for name, outcomes in found.items()
        },
    }
    return json.dumps(report, indent=1)


if __name__ == "__main__":
    main()
