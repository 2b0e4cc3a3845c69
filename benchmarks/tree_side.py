"""A checkout in a process of its own, which answers what `two_trees.py` asks.

The checkout and its `benchmarks` are on the path, so that each measures with its own.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
from collections.abc import Mapping

import jax
from gpu_models import make_cases
from gpu_replay import check_case
from gpu_report import CaseResult
from gpu_sides import JaxSide

import tracegraph as tg

# So many times fewer calls in a block than in `gpu_replay.py`: both sides of a round are to see the
# same machine.
BLOCK_DIVISOR = 5


class TreeSide:
    """The cases of this checkout, one at a time.

    Args:
        is_dry: for tiny sizes.
    """

    def __init__(self, is_dry: bool) -> None:
        self._cases = {case.name: case for case in make_cases(is_dry=is_dry)}

    def prepare(self, name: str) -> Mapping[str, float]:
        """Captures a case, compares it with `jax.jit`, and returns its bytes.

        Raises:
            RuntimeError: the results differ.
        """
        case = self._cases[name]
        donated = (0,) if case.has_state else ()
        capture = tg.capture(case.function, donate_argnums=donated)
        jit = jax.jit(case.function, donate_argnums=donated)
        result = CaseResult(name)
        refusal = check_case(case, capture, jit, result)
        if refusal:
            raise RuntimeError(f"{name}: {refusal}")
        self._calls = max(case.calls // BLOCK_DIVISOR, 1)
        self._side = JaxSide(case, capture)
        # Each block begins with a collection, which would take far longer than the block.
        gc.freeze()
        return {"pool_bytes": result.capture["pool_bytes"]}

    def measure(self, processor: int) -> Mapping[str, float]:
        """Times one block of calls from a processor, in microseconds per call."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {processor})
        try:
            return {
                "total_us": self._side.time_total(self._calls),
                "host_us": statistics.median(self._side.time_each()),
                "launch_us": statistics.median(self._side.time_launch()),
            }
        finally:
            os.sched_setaffinity(0, before)


def main() -> None:
    """Answers requests, one line of JSON each, until there are no more."""
    # What libraries print goes to the standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    is_dry = "--dry-run" in sys.argv
    if is_dry:
        jax.config.update("jax_platforms", "cpu")
    side = TreeSide(is_dry)
    methods = {"prepare": side.prepare, "measure": side.measure}
    for line in sys.stdin:
        method, argument = json.loads(line)
        print(json.dumps(methods[method](argument)), file=answers, flush=True)


if __name__ == "__main__":
    main()
