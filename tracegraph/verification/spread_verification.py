"""Verification of a call over several devices: every part on every device, bit for bit.

The reference is XLA's program called by JAX's own way for compiled functions, on private copies.
The replay is the quick call that calls will be: nothing of what it was given may change but what is
donated, every device's part must be equal, and so must the shardings. It runs twice: what
collectives add up in an order left to chance shows as a difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.replaying.spread_call import SpreadCall
from tracegraph.replaying.spread_slots import read_leaves
from tracegraph.runtime.errors import VerificationError, shorten_list
from tracegraph.runtime.jax_interop import unwrap_key
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.verification.difference import measure_difference
from tracegraph.verification.report import VerificationReport, judge_differences, name_results


def verify_spread(prepared: PreparedCall, call: SpreadCall) -> VerificationReport:
    """Compares two replays with XLA's executable, device by device.

    Args:
        prepared: the call.
        call: its new program.

    Raises:
        VerificationError: a result differs on a device; all are named.
    """
    report = VerificationReport(reference="XLA's executable on every device")
    paths = name_results(call.checked.out_tree, call.checked.probes)
    expected = call.lowered.executable(*_copy_leaves(prepared))
    _check_shardings(call, paths, expected)
    for _ in range(2):
        replayed = call.run(_copy_leaves(prepared))
        names, got, wanted = _list_parts(paths, replayed, expected)
        differences = [measure_difference(*pair) for pair in zip(got, wanted, strict=True)]
        judge_differences(call.name, names, differences, wanted, report)
    split = _find_unequal_copies(paths, expected)
    note = f"not the same on all devices: {', '.join(shorten_list(split))}" if split else ""
    return dataclasses.replace(report, exact=len(paths), note=note)


def _copy_leaves(prepared: PreparedCall) -> list[Any]:
    """Returns the leaves, donated ones as copies in the same places: the program takes these."""
    leaves = read_leaves([*prepared.leaves])
    return [
        leaf.copy() if index in prepared.donated and isinstance(leaf, jax.Array) else leaf
        for index, leaf in enumerate(leaves)
    ]


def _check_shardings(call: SpreadCall, paths: Sequence[str], results: Sequence[Any]) -> None:
    """Raises where a result is in another place than the program says."""
    promised = jax.tree_util.tree_leaves(call.lowered.executable.output_shardings)
    pairs = zip(paths, results, promised, strict=True)
    wrong = [
        f"{path} ({result.sharding}, not {wanted})"
        for path, result, wanted in pairs
        if not result.sharding.is_equivalent_to(wanted, result.ndim)
    ]
    if wrong:
        raise VerificationError(
            f"{len(wrong)} results of `{call.name}` are on other devices than planned",
            where=", ".join(shorten_list(wrong)),
            why="what reads them next is compiled for their places",
            fix="internal error in tracegraph: please report this text and the function",
            anchor="verification",
        )


def _list_parts(
    paths: Sequence[str], got: Sequence[Any], wanted: Sequence[Any]
) -> tuple[list[str], list[Any], list[Any]]:
    """Returns name, value and expected value of every result on every device."""
    names: list[str] = []
    ours: list[Any] = []
    theirs: list[Any] = []
    for path, one, other in zip(paths, got, wanted, strict=True):
        pairs = zip(_list_shards(one), _list_shards(other), strict=True)
        for (device, part), (_, expected) in pairs:
            names.append(f"{path} on {device}")
            ours.append(part)
            theirs.append(expected)
    return names, ours, theirs


def _list_shards(array: Any) -> list[tuple[Any, np.ndarray[Any, Any]]]:
    array = unwrap_key(array)
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [(shard.device, np.asarray(shard.data)) for shard in shards]


def _find_unequal_copies(paths: Sequence[str], results: Sequence[Any]) -> list[str]:
    """Returns the results of which devices hold different copies, as ``check_vma=False`` allows."""
    found = []
    for path, result in zip(paths, results, strict=True):
        first: dict[str, bytes] = {}
        for shard in unwrap_key(result).addressable_shards:
            content = np.asarray(shard.data).tobytes()
            if first.setdefault(str(shard.index), content) != content:
                found.append(path)
                break
    return found
