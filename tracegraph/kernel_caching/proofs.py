"""Proofs: what the verification of a saved graph found on this machine, for other processes.

A file that was made without its device is verified where it is loaded first. The report is kept in
the kernel cache, under a key of the file, the signature and what it runs on.
"""

from __future__ import annotations

import hashlib
import json

from tracegraph.kernel_caching.cached_lowering import find_usable_store
from tracegraph.kernel_caching.surroundings import read_versions
from tracegraph.runtime.device import Device
from tracegraph.runtime.saving.record_codec import ContentProblem, RecordCodec
from tracegraph.verification.report import VerificationReport

_codec = RecordCodec([VerificationReport])


def make_proof_key(digest: str, index: int, device: Device) -> str:
    """Returns the key of a proof.

    Args:
        digest: of the file.
        index: of the signature.
        device: that it runs on.
    """
    parts = [digest, index, str(device.target), read_versions()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def find_proof(key: str) -> VerificationReport | None:
    """Returns what the verification found before; None if there was none."""
    store = find_usable_store()
    file = store.find(key) if store is not None else None
    if store is None or file is None:
        return None
    try:
        if not isinstance(file.content, dict) or file.content.get("proof") != key:
            raise ContentProblem("the content", "it is not that of this proof")
        return _codec.decode(file.content.get("report"), file.blobs, VerificationReport)
    except ContentProblem as problem:
        store.drop(key, str(problem))
        return None


def add_proof(key: str, report: VerificationReport) -> None:
    """Keeps what the verification found."""
    store = find_usable_store()
    if store is not None:
        encoded = _codec.encode(report)
        store.add(key, {"proof": key, "report": encoded.tree}, encoded.blobs)
