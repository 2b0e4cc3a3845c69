"""First calls of graphs that were compiled without their device, and so are still to be verified.

Such a file has XLA's executables beside the graph. The first call of a signature compares the two,
on its own arguments and on others, as a capture does. What was found is kept for other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegraph.kernel_caching.proofs import add_proof, find_proof, make_proof_key
from tracegraph.replaying.replayable_graph import ReplayableGraph
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import InternalError
from tracegraph.saving.loaded_graphs import LoadedEntry, LoadedParts
from tracegraph.tracing.result_names import name_results
from tracegraph.tracing.signature import Signature
from tracegraph.verification.device_verification import verify_on_device
from tracegraph.verification.host_verification import verify_on_host
from tracegraph.verification.report import VerificationReport


def find_unproven(parts: LoadedParts, device: Device) -> dict[Signature, str]:
    """Returns the signatures that are still to be verified, each with the key of its proof.

    Args:
        parts: what is known of a loaded function.
        device: that it is loaded on.
    """
    unproven = {}
    for index, entry in enumerate(parts.entries):
        if entry.verification is not None:
            continue
        key = make_proof_key(parts.checksum, index, device)
        if find_proof(key) is None:
            unproven[entry.call.signature] = key
    return unproven


def prove_graph(
    entry: LoadedEntry, graph: ReplayableGraph, leaves: Sequence[Any], device: Device, key: str
) -> VerificationReport:
    """Compares a graph with the executables of its file, and keeps what was found.

    Args:
        entry: its signature.
        graph: of the signature.
        leaves: one value per dynamic leaf; none is used up.
        device: that the graph is on.
        key: of the proof.

    Raises:
        VerificationError: a result differs; all are named.
        OutOfMemoryError: there is no memory for the copies that the comparison needs.
    """
    expectation, results = entry.expectation, entry.results
    if expectation is None:
        raise InternalError(
            f"a graph of `{graph.name}` is verified twice",
            where="tracegraph/saving/first_calls.py",
            why="its file has a proof",
        )
    paths = name_results(results.tree, results.probes)
    if device.comparison is None:
        report = verify_on_host(graph, leaves, paths, expectation.report)
    else:
        report = verify_on_device(device.comparison, graph, leaves, paths, expectation)
    add_proof(key, report)
    return report
