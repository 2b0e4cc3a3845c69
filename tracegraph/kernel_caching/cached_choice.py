"""Cached choices: which replacements were faster, kept beside the programs that were timed.

A choice is stored under a key that follows from that of the program without replacements, so that
it is as complete as that one. A later process traces, finds the choice and lowers what it says.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from tracegraph.kernel_caching.cached_lowering import CacheSlot
from tracegraph.replacements.report import Replacement
from tracegraph.runtime.saving.record_codec import ContentProblem, RecordCodec


@dataclasses.dataclass(frozen=True)
class RuleOutcomes:
    """What became of each rule that found something.

    Attributes:
        replacements: in the order in which they were tried.
    """

    replacements: tuple[Replacement, ...]


_codec = RecordCodec([RuleOutcomes, Replacement])


def find_choice(slot: CacheSlot) -> RuleOutcomes | None:
    """Returns the choice for a program, or None.

    Args:
        slot: of the program without replacements.
    """
    key = _derive_key(slot)
    file = None if key is None else slot.store.find(key)
    if key is None or file is None:
        return None
    try:
        if not isinstance(file.content, dict) or file.content.keys() != {"key", "choice"}:
            raise ContentProblem("the content", "it is not a choice")
        if file.content["key"] != key:
            raise ContentProblem("the content", "it is that of another program")
        return _codec.decode(file.content["choice"], file.blobs, RuleOutcomes)
    except ContentProblem as problem:
        slot.store.drop(key, str(problem))
        return None


def add_choice(slot: CacheSlot, replacements: Sequence[Replacement]) -> None:
    """Stores a choice.

    Args:
        slot: of the program without replacements.
        replacements: what became of each rule.
    """
    key = _derive_key(slot)
    if key is not None:
        encoded = _codec.encode(RuleOutcomes(tuple(replacements)))
        slot.store.add(key, {"key": key, "choice": encoded.tree}, encoded.blobs)


def _derive_key(slot: CacheSlot) -> str | None:
    key = slot.find_key()
    if key is None:
        return None
    return hashlib.sha256(f"choice of replacements, {key}".encode()).hexdigest()
