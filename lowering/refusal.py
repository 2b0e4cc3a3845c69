"""Refused work: what an `UnsupportedError` says of each piece, for who can cut it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tracegraph.runtime.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class RefusedWork:
    """A piece of a compiled region that no graph holds.

    Attributes:
        region: the region's name.
        kind: XLA's word for it, as ``fft``; ``program`` for the compiled program as a whole.
        reason: reads on after ``it``; empty where the kind is the reason.
        path: XLA's name of the operation in the traced function, as ``jit(region0)/fft``; empty
            where XLA does not know it.
    """

    region: str
    kind: str
    reason: str = ""
    path: str = ""


def add_refusals(error: UnsupportedError, refused: Iterable[RefusedWork]) -> UnsupportedError:
    """Adds records to an error, for `read_refusals`, and returns it."""
    # Not a constructor argument: every error of the tree is made from its four lines.
    vars(error)["refused"] = (*read_refusals(error), *refused)
    return error


def read_refusals(error: UnsupportedError) -> tuple[RefusedWork, ...]:
    """Returns what an error refuses; nothing if it is not about the work of regions."""
    return vars(error).get("refused", ())
