"""python -m tests.fuzz --count 500 --seed 0: many programs, and the seeds of those that differ."""

from __future__ import annotations

import argparse
import collections
import sys
import time
import traceback
from typing import Literal

import jax

from tests.fuzz.compare import compare_with_jit
from tests.fuzz.programs import make_program


def main() -> int:
    """Runs the programs of consecutive seeds; returns how many failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--verbose", action="store_true", help="print the traceback of each error")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    modes: tuple[Literal["whole", "partial"], ...] = ("whole", "partial")
    counts: collections.Counter[str] = collections.Counter()
    failed = 0
    start = time.perf_counter()
    for seed in range(options.seed, options.seed + options.count):
        program = make_program(seed)
        for mode in modes:
            try:
                counts[f"{mode}: {compare_with_jit(program, mode).value}"] += 1
            except Exception as error:  # noqa: BLE001 whatever it is, it is reported with its seed
                failed += 1
                steps = " ".join(step.__name__ for step in program.steps)
                text = f"{type(error).__name__}: {error}".splitlines()
                print(f"seed {seed}, {mode}: {' | '.join(text[:2])}\n    {steps}", flush=True)
                if options.verbose:
                    traceback.print_exc()
        # Programs of XLA stay in memory otherwise.
        if seed % 20 == 19:
            jax.clear_caches()
    for name, count in sorted(counts.items()):
        print(f"{count:5} {name}")
    print(f"{failed:5} failed, {time.perf_counter() - start:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
