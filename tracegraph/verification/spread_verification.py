"""Verification of a call over several devices: every part on every device, bit for bit.

On the host device, whose call is one of XLA's:
The reference is XLA's program called by JAX's own way for compiled functions, on private copies.
The replay is the quick call that calls will be: nothing of what it was given may change but what is
donated, every device's part must be equal, and so must the shardings. It runs twice: what
collectives add up in an order left to chance shows as a difference.

On GPUs the reference is XLA's program, and the replays are launches of our graphs: one that copies
its arguments and one that reads them where they are, on other values, with the halves of each
argument exchanged, where `choose_other_inputs` allows that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.replaying.spread_call import SpreadCall
from tracegraph.replaying.spread_graph import SpreadGraph
from tracegraph.replaying.spread_slots import read_leaves
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.arrays.spread_buffer import place_value
from tracegraph.runtime.errors import VerificationError, shorten_list
from tracegraph.runtime.jax_interop import join_parts, list_parts, to_plain, unwrap_key
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.result_names import name_results
from tracegraph.verification.difference import measure_difference
from tracegraph.verification.expectation import expect
from tracegraph.verification.other_inputs import choose_other_inputs
from tracegraph.verification.reference_run import run_reference
from tracegraph.verification.report import VerificationReport, judge_differences


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
    expected = call.lowered.executable(*copy_leaves(prepared))
    _check_shardings(call, paths, expected)
    for _ in range(2):
        _judge_parts(call.name, paths, call.run(copy_leaves(prepared)), expected, report)
    note = _describe_unequal_copies(paths, expected)
    return dataclasses.replace(report, exact=len(paths), note=note)


def verify_spread_graph(prepared: PreparedCall, captured: SpreadGraph) -> VerificationReport:
    """Compares two replays of the graphs of several GPUs with XLA's executable, GPU by GPU.

    Args:
        prepared: the call.
        captured: its new graphs.

    Raises:
        VerificationError: a result differs on a GPU; all are named.
    """
    report = expect(captured.checked, captured.lowered)
    paths = name_results(captured.checked.out_tree, captured.checked.probes)
    others = choose_other_inputs(captured.checked.graph)
    placed = place_leaves(prepared, captured)
    flags = others.may_differ if any(others.may_differ) else (False,) * len(placed)
    close: dict[str, None] = {}
    split = ""
    for is_second in (False, True):
        given = [
            _turn_parts(leaf) if is_second and may_differ else leaf
            for leaf, may_differ in zip(placed, flags, strict=False)
        ]
        inputs = [*given, *_place_constants(captured)]
        expected = run_reference(captured, [_copy(each) for each in inputs])
        replayed = [_read(each) for each in captured.replay_once(given, is_rebound=is_second)]
        close |= dict.fromkeys(_judge_parts(captured.name, paths, replayed, expected, report))
        split = _describe_unequal_copies(paths, expected)
    note = "; ".join(filter(None, (split, others.note)))
    return dataclasses.replace(report, exact=len(paths) - len(close), close=tuple(close), note=note)


def place_leaves(prepared: PreparedCall, captured: SpreadGraph) -> list[Any]:
    """Returns the leaves of a call as plain arrays on the devices of its graphs.

    Args:
        prepared: the call.
        captured: its graphs.
    """
    leaves = (to_plain(unwrap_key(leaf)) for leaf in prepared.leaves)
    pairs = zip(leaves, captured.replay.inputs, strict=False)
    return [place_value(leaf, buffer.jax_device) for leaf, buffer in pairs]


def _turn_parts(array: Any) -> Any:
    """Returns an array with the two halves of each part exchanged."""
    if not array.size:
        return array
    return join_parts(array.aval, array.sharding, [_turn(part) for part in list_parts(array)])


def _turn(part: Any) -> Any:
    flat = np.asarray(part).reshape(-1)
    turned = np.roll(flat, flat.size // 2).reshape(part.shape)
    return jax.device_put(turned, part.sharding)


def _place_constants(captured: SpreadGraph) -> list[Any]:
    buffers = captured.replay.inputs[len(captured.names) :]
    pairs = zip(captured.constants, buffers, strict=True)
    return [place_value(to_plain(value), buffer.jax_device) for value, buffer in pairs]


def _copy(array: Any) -> Any:
    # The executable takes what is donated.
    return array.copy()


def _read(value: Any) -> Any:
    return value.jax() if isinstance(value, Array) else value.to_jax()


def _judge_parts(
    name: str,
    paths: Sequence[str],
    replayed: Sequence[Any],
    expected: Sequence[Any],
    report: VerificationReport,
) -> list[str]:
    """Compares every part; returns the names of the results that are equal within the tolerance."""
    names, got, wanted = _list_parts(paths, replayed, expected)
    differences = [measure_difference(*pair) for pair in zip(got, wanted, strict=True)]
    close = judge_differences(name, names, differences, wanted, report)
    return list(dict.fromkeys(each.rpartition(" on ")[0] for each in close))


def copy_leaves(prepared: PreparedCall) -> list[Any]:
    """Returns the leaves, donated ones as copies in the same places: the program takes these.

    Args:
        prepared: the call.
    """
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


def _describe_unequal_copies(paths: Sequence[str], results: Sequence[Any]) -> str:
    found = _find_unequal_copies(paths, results)
    return f"not the same on all devices: {', '.join(shorten_list(found))}" if found else ""


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
