"""Verification on a GPU: a graph must compute what its XLA executable computes.

It is not compared with `jax.jit`: two compilations of one program may choose other kernels. The
pool is filled with NaN bytes before the first replay, so that a read of memory that nothing has
written shows. Two replays are compared, bit for bit: one on the call's own arguments, copied in,
and one on other arguments that the graph's nodes are pointed at, as far as every loop ends on them:
Note [Loops that may not end]. Arguments that are lent are read where they are both times: no node
writes them, and one that was not pointed at them has no memory to read. Only where XLA's program
adds floats in no fixed order, or where it calls a library between two graphs, is a small difference
allowed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.lowering.collector import hold_collector
from tracegraph.replaying.replayable_graph import ReplayableGraph
from tracegraph.runtime.definition.packing import count_packed_bytes
from tracegraph.runtime.device import MemoryComparison
from tracegraph.runtime.errors import OutOfMemoryError
from tracegraph.runtime.jax_interop import is_in_memory_of, to_plain, to_row_major, unwrap_key
from tracegraph.verification.difference import measure_difference, relate
from tracegraph.verification.expectation import Expectation
from tracegraph.verification.reference_run import run_reference
from tracegraph.verification.report import VerificationReport, judge_differences


@hold_collector
def verify_on_device(
    comparison: MemoryComparison,
    captured: ReplayableGraph,
    leaves: Sequence[Any],
    paths: Sequence[str],
    expectation: Expectation,
) -> VerificationReport:
    """Replays twice and compares with XLA's own executables.

    Args:
        comparison: of the device that the graph is on.
        captured: the graph, with the executables that it was made from.
        leaves: one value per dynamic leaf.
        paths: one name per result.
        expectation: what is expected, and which other arguments may be tried.

    Raises:
        VerificationError: a result differs; all are named. Or XLA's executables failed.
        OutOfMemoryError: there is no memory for the copies that the comparison needs.
    """
    try:
        return _compare_twice(comparison, captured, leaves, paths, expectation)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(
            f"no memory is left to verify `{captured.name}`",
            where=f"verification at capture: {str(error).splitlines()[0]}",
            why="the comparison needs copies of all arguments and results beside the graph's own",
            fix="capture with verify=False, or verify with smaller arguments first",
            anchor="out-of-memory",
        ) from error


def _compare_twice(
    comparison: MemoryComparison,
    captured: ReplayableGraph,
    leaves: Sequence[Any],
    paths: Sequence[str],
    expectation: Expectation,
) -> VerificationReport:
    values = place_values(captured, leaves)
    report, others = expectation.report, expectation.others
    note = "; ".join(filter(None, (report.note, others.note)))
    close: set[str] = set()
    for is_other in (False, True):
        # Constants are what they are; only arguments can be others.
        may_differ = others.may_differ if is_other else ()
        given = _copy_arguments(comparison, captured, values[: len(leaves)], may_differ)
        with captured.reserve():
            # XLA's executable comes second, for it uses up what is donated. The graph may only read
            # what it does not own: if it writes there, the executable gets other inputs.
            got = captured.replay_arrays(given, is_rebound=is_other)
            expected = run_reference(captured, [*given, *values[len(leaves) :]])
            suspects = comparison.find_unequal(
                [
                    (
                        address,
                        array.unsafe_buffer_pointer(),
                        count_packed_bytes(array.shape, array.dtype),
                    )
                    for (address, _), array in zip(got, expected, strict=True)
                ]
            )
            wanted = [expected[index] for index in suspects]
            addresses = [got[index][0] for index in suspects]
            differences = _measure(comparison, addresses, wanted)
        suspected = [paths[index] for index in suspects]
        close |= {*judge_differences(captured.name, suspected, differences, wanted, report)}
    named = tuple(path for path in paths if path in close)
    return dataclasses.replace(report, exact=len(paths) - len(named), close=named, note=note)


def _copy_arguments(
    comparison: MemoryComparison,
    captured: ReplayableGraph,
    values: Sequence[jax.Array],
    may_differ: Sequence[bool],
) -> list[jax.Array]:
    """Returns what to call with: private copies, but for what is lent."""
    is_lent = captured.replay.is_lent[: len(values)]
    is_own = [not each for each in is_lent]
    own = list(itertools.compress(values, is_own))
    copies = iter(_copy_values(comparison, own, list(itertools.compress(may_differ, is_own))))
    return [v if lent else next(copies) for v, lent in zip(values, is_lent, strict=True)]


def _copy_values(
    comparison: MemoryComparison, values: Sequence[jax.Array], may_differ: Sequence[bool]
) -> list[jax.Array]:
    """Returns private copies, with other values where they may differ."""
    if not any(may_differ):
        return comparison.copy_arrays(values, is_rotated=False)
    rotated = iter(
        comparison.copy_arrays(list(itertools.compress(values, may_differ)), is_rotated=True)
    )
    if all(may_differ):
        return list(rotated)
    others = (value for value, differs in zip(values, may_differ, strict=True) if not differs)
    same = iter(comparison.copy_arrays(list(others), is_rotated=False))
    return [next(rotated if differs else same) for differs in may_differ]


def _measure(
    comparison: MemoryComparison, addresses: Sequence[int], wanted: Sequence[jax.Array]
) -> list[float]:
    """Returns the difference of each result; floats stay on the device, others are copied."""
    pairs = list(zip(addresses, wanted, strict=True))
    there = [pair for pair in pairs if comparison.measures(pair[1].dtype)]
    found = iter(
        comparison.measure_floats(
            [
                (address, each.unsafe_buffer_pointer(), each.size, each.dtype)
                for address, each in there
            ]
        )
    )
    return [
        relate(next(found))
        if comparison.measures(each.dtype)
        else measure_difference(comparison.read_range(address, each.shape, each.dtype), each)
        for address, each in pairs
    ]


def place_values(captured: ReplayableGraph, leaves: Sequence[Any]) -> list[jax.Array]:
    """Returns a plain array on the device for every static input, constants included."""
    specs = [spec.buffer for spec in captured.lowered.program.inputs]
    values = [*(to_plain(unwrap_key(leaf)) for leaf in leaves), *captured.constants]
    here = captured.replay.jax_device
    arrays = [
        value
        if isinstance(value, jax.Array) and is_in_memory_of(value, here)
        else jax.device_put(np.asarray(value, spec.dtype), here)
        for value, spec in zip(values, specs, strict=True)
    ]
    return [to_row_major(array) for array in arrays]
