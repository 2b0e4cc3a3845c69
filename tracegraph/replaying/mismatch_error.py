"""The error of a graph that is called with another signature than its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.mismatch import LeafSpec, describe_mismatch, describe_static_mismatch
from tracegraph.runtime.errors import ReplayError
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.signature import Signature


def make_mismatch_error(
    name: str,
    wanted: Signature,
    names: Sequence[str],
    statics: Sequence[tuple[str, Any]],
    found: PreparedCall,
    *,
    other_way: str | None = None,
) -> ReplayError:
    """Returns an error that shows wanted and got side by side where they differ.

    Args:
        name: of the captured function.
        wanted: the graph's signature.
        names: of the leaves of the signature.
        statics: its static values, each with its name.
        found: what it was called with.
        other_way: to call the function with this signature; None where the function captures anew.
    """
    differences = (
        describe_mismatch(
            _list_leaf_specs(names, wanted), _list_leaf_specs(found.names, found.signature)
        ),
        describe_static_mismatch(statics, found.list_static_values()),
    )
    fix = other_way or f"call `{name}`, which captures anew"
    difference = "; ".join(filter(None, differences)) or "the structure of the arguments"
    return ReplayError(
        f"the graph of `{name}` is called with another signature",
        where=f"{locate_caller()}: {difference}",
        why="a graph has static shapes: its kernels and buffers fit one signature only",
        fix=f"pass what it was captured with, or {fix}",
        anchor="signature",
    )


def _list_leaf_specs(names: Sequence[str], signature: Signature) -> list[LeafSpec]:
    return [
        (name, leaf.shape, leaf.dtype, leaf.weak_type)
        for name, leaf in zip(names, signature.leaves, strict=True)
    ]
