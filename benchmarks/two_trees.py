"""Two checkouts compared on one GPU, in pairs of processes that take turns.

    python benchmarks/two_trees.py --before ../tracegraph-before --output benchmarks/results/x.json

One process cannot hold two versions of a package. What takes microseconds differs by a half from
processor to processor and from minute to minute, so that all processes live at once: in each round
both sides of a pair time a short block, one behind the other on one processor, and the figure is
the median of the rounds' ratios. XLA times kernels to choose among them; the processes share what
it has chosen, for programs of two choices differ by several percent.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags
from machine import describe_start, keep_to_fast_processors, read_driver

_BEFORE = flags.DEFINE_string("before", None, "the other checkout", required=True)
_CASES = flags.DEFINE_multi_string(
    "case", ["tiny", "one_in_one_out", "gpt_2x128", "gpt_12x128"], "these cases"
)
_PAIRS = flags.DEFINE_integer("pairs", 4, "processes of each side", 1)
_ROUNDS = flags.DEFINE_integer("rounds", 100, "blocks of each process", 2)
_OUTPUT = flags.DEFINE_string("output", None, "write all figures to this JSON file")
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "tiny sizes on the CPU")

HERE = pathlib.Path(__file__).resolve().parents[1]
SIDES = "before", "after"
FIGURES = "total_us", "host_us", "launch_us"
PACKAGES = "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "cuda-bindings", "numpy"
# Of the GPU's memory, for all processes.
MEMORY_PART = 0.8

Figures = Mapping[str, float]


class Tree:
    """A checkout in a process of its own; one from `peer_process` would have this one's path.

    Args:
        place: the checkout.
        variables: of the process, over those of this one.
    """

    def __init__(self, place: pathlib.Path, variables: Mapping[str, str]) -> None:
        own = os.environ.get("PYTHONPATH")
        paths = filter(None, [str(place), str(place / "benchmarks"), own])
        # -P: or this checkout's benchmarks would come before those of the other.
        command = [sys.executable, "-P", str(HERE / "benchmarks/tree_side.py")]
        command += ["--dry-run"] if _DRY_RUN.value else []
        self._process = subprocess.Popen(
            command,
            cwd=place,
            env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def ask(self, method: str, argument: str | int) -> Figures:
        """Returns the answer of a method of `tree_side.TreeSide`.

        Raises:
            RuntimeError: the process has ended; its standard error says why.
        """
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        print(json.dumps([method, argument]), file=requests)
        answer = answers.readline()
        if not answer:
            raise RuntimeError(f"`{method}` of {argument} failed in {self._process.args}")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


Pair = Mapping[str, Tree]


def main(argv: Sequence[str]) -> None:
    """Lets both checkouts take turns and prints the medians with the ratios of the rounds."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    processors = keep_to_fast_processors()
    run = {
        **describe_start(__file__, PACKAGES),
        "driver": read_driver(),
        "processors": f"{len(processors)} of {os.cpu_count()}",
    }
    cases: dict[str, list[dict[str, Any]]] = {}
    with start_pairs(_PAIRS.value) as pairs:
        for case in _CASES.value:
            cases[case] = compare_sides(pairs, case, processors)
            print(f"{case}: done", file=sys.stderr)
            # After each case, so that a benchmark that is cut short leaves what it has.
            if _OUTPUT.value:
                text = json.dumps({"run": run, "cases": cases}, indent=1)
                pathlib.Path(_OUTPUT.value).write_text(text + "\n")
    print(format_table(cases))


@contextlib.contextmanager
def start_pairs(count: int) -> Iterator[list[Pair]]:
    """Starts so many processes of each checkout; which is first alternates from pair to pair."""
    places = {"before": pathlib.Path(_BEFORE.value).resolve(), "after": HERE}
    pairs: list[dict[str, Tree]] = []
    with tempfile.TemporaryDirectory() as folder:
        choices = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_per_fusion_autotune_cache_dir={folder}"
        )
        memory = str(MEMORY_PART / (2 * count))
        variables = {"XLA_PYTHON_CLIENT_MEM_FRACTION": memory, "XLA_FLAGS": choices}
        try:
            for number in range(count):
                pairs.append({})
                for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                    pairs[-1][side] = Tree(places[side], variables)
            yield [*pairs]
        finally:
            for tree in itertools.chain.from_iterable(pair.values() for pair in pairs):
                tree.close()


def compare_sides(
    pairs: Sequence[Pair], case: str, processors: Sequence[int]
) -> list[dict[str, Any]]:
    """Captures one case in all processes, one after the other, and times it in turns.

    Args:
        pairs: of processes, in each the side that is first.
        case: its name.
        processors: each round takes the next one.

    Returns:
        What each pair has measured, see `summarize`, and the bytes of its pools.
    """
    pools = [
        {side: tree.ask("prepare", case)["pool_bytes"] for side, tree in each.items()}
        for each in pairs
    ]
    print(f"{case}: captured", file=sys.stderr)
    rounds: list[list[Mapping[str, Figures]]] = [[] for _ in pairs]
    for number in range(_ROUNDS.value):
        processor = processors[number % len(processors)]
        for pair, blocks in zip(pairs, rounds, strict=True):
            sides = [*pair] if number % 2 == 0 else [*pair][::-1]
            blocks.append({side: pair[side].ask("measure", processor) for side in sides})
    return [
        {**{figure: summarize(blocks, figure) for figure in FIGURES}, "pool_bytes": pool}
        for blocks, pool in zip(rounds, pools, strict=True)
    ]


def summarize(rounds: Sequence[Mapping[str, Figures]], figure: str) -> dict[str, float]:
    """Returns a pair's medians of one figure, that of its ratios, and the ratios' quartiles."""
    values = {side: [each[side][figure] for each in rounds] for side in SIDES}
    ratios = [after / before for before, after in zip(*values.values(), strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    medians = {side: statistics.median(each) for side, each in values.items()}
    quartiles = {"lower_quartile": lower, "upper_quartile": upper}
    return {**medians, "ratio": statistics.median(ratios), **quartiles}


def format_table(cases: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns one line per case and figure: medians of the pairs, and the ratio of each."""
    lines = [
        "| case | figure | before | after | ratio | of each pair |",
        "|---|---|---|---|---|---|",
    ]
    for case, pairs in cases.items():
        for figure in FIGURES:
            columns = ("before", "after", "ratio")
            medians = [statistics.median(each[figure][name] for each in pairs) for name in columns]
            ratios = ", ".join(f"{each[figure]['ratio']:.3f}" for each in pairs)
            cells = f"{medians[0]:,.2f} | {medians[1]:,.2f} | {medians[2]:.3f}"
            lines.append(f"| {case} | {figure} | {cells} | {ratios} |")
        pools = [f"{pairs[0]['pool_bytes'][side]:,}" for side in SIDES]
        lines.append(f"| {case} | pool_bytes | {' | '.join(pools)} | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    app.run(main)
