"""Command line: ``python -m tests.deviceless [--write]``: the table of thunk kinds.

It lowers and builds the sample of JAX's harnesses and the corpus for an H200 that is only
described, and prints the counts; ``--write`` puts them into ``docs/conformance.md``.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import app, flags, logging

from tests.deviceless import coverage, pipeline, topology
from tests.deviceless.coverage import Figures
from tests.deviceless.programs import PROGRAMS
from tests.paths import ROOT

_WRITE = flags.DEFINE_bool("write", False, "write the figures into docs/conformance.md")
DOCUMENT = ROOT / "docs" / "conformance.md"
BEGIN, END = "<!-- begin: python -m tests.deviceless --write -->", "<!-- end -->"
PROGRESS_CASES = 100


def main(argv: Sequence[str]) -> None:
    """Measures everything, prints it, and exits with 1 when a case ends in an unknown way."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if (obstacle := topology.find_obstacle()) is not None:
        sys.exit(f"nothing can be compiled for a GPU: {obstacle}")
    logging.set_verbosity(logging.WARNING)
    corpus, harnesses = list(_measure_corpus()), list(_measure_harnesses())
    text = format_figures(corpus, harnesses)
    print(text)
    if _WRITE.value:
        DOCUMENT.write_text(replace_section(DOCUMENT.read_text(), text))
    if not all(coverage.is_expected(figures) for figures in corpus + harnesses):
        sys.exit(1)


def format_figures(corpus: Sequence[Figures], harnesses: Sequence[Figures]) -> str:
    """Returns the date, the versions and both tables, as Markdown."""
    packages = ["jaxlib", *topology.find_wheels()]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return (
        f"Run of {datetime.date.today()}: Python {platform.python_version()}, "
        f"jax {jax.__version__}, {versions}.\n\n"
        f"JAX's harnesses:\n\n```\n{coverage.format_table(harnesses)}\n```\n\n"
        f"The corpus of `tests/deviceless/programs.py`:\n\n"
        f"```\n{coverage.format_table(corpus)}\n```"
    )


def replace_section(document: str, text: str) -> str:
    """Returns the document with the text between its two marks.

    Example:
        >>> print(replace_section(f"a\\n{BEGIN}\\nold\\n{END}\\nb", "new"))
        a
        <!-- begin: python -m tests.deviceless --write -->
        new
        <!-- end -->
        b
    """
    before, _, rest = document.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the document has no section between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _measure_corpus() -> Iterator[Figures]:
    for program in PROGRAMS:
        with pipeline.setting_for(program):
            arguments = program.make_arguments(np.random.default_rng(0))
            device = topology.find_h200()
            yield coverage.measure(
                program.name, program.function, arguments, device, program.donate_argnums
            )[0]


def _measure_harnesses() -> Iterator[Figures]:
    cases = coverage.draw_cases()
    for index, case in enumerate(cases):
        arguments = case.make_arguments(0)
        yield coverage.measure(case.name, case.function, arguments, topology.find_h200())[0]
        if index % PROGRESS_CASES == PROGRESS_CASES - 1:
            print(f"{index + 1} of {len(cases)} harnesses", file=sys.stderr)
            jax.clear_caches()


if __name__ == "__main__":
    app.run(main)
