"""The error of a graph that is called with another signature than its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.mismatch import LeafSpec, describe_mismatch, describe_static_mismatch
from tracegraph.constraints.spread import print_sharding
from tracegraph.runtime.errors import ReplayError, shorten_list
from tracegraph.tracing.call_spec import CallSpec
from tracegraph.tracing.prepared_call import PreparedCall
from tracegraph.tracing.signature import LeafType, Signature

# Characters before and behind the first difference of two structures.
_CONTEXT = 30


def make_mismatch_error(
    call: CallSpec,
    found: PreparedCall,
    *,
    other_way: str | None = None,
) -> ReplayError:
    """Returns an error that shows wanted and got side by side where they differ.

    Args:
        call: what the graph takes.
        found: what it was called with.
        other_way: to call the function with this signature; None where the function captures anew.
    """
    wanted, names = call.signature, call.names
    differences = (
        describe_mismatch(
            _list_leaf_specs(names, wanted), _list_leaf_specs(found.names, found.signature)
        ),
        _describe_shardings(names, wanted, found),
        describe_static_mismatch(call.statics, found.list_static_values()),
    )
    fix = other_way or f"call `{call.name}`, which captures anew"
    trees = wanted.tree, found.signature.tree
    difference = "; ".join(filter(None, differences)) or _describe_structures(*trees)
    return ReplayError(
        f"the graph of `{call.name}` is called with another signature",
        where=f"{locate_caller()}: {difference}",
        why="a graph has static shapes: its kernels and buffers fit one signature only",
        fix=f"pass what it was captured with, or {fix}",
        anchor="signature",
    )


def _describe_shardings(names: Sequence[str], wanted: Signature, found: PreparedCall) -> str:
    """Returns which leaves are spread in another way over several devices, or in other memory."""
    before = dict(zip(names, wanted.leaves, strict=True))
    after = zip(found.names, found.signature.leaves, strict=True)
    lines = [
        f"{name}: {_print_places(before[name], leaf)}"
        for name, leaf in after
        if name in before and _find_place(leaf) != _find_place(before[name])
    ]
    return "; ".join(shorten_list(lines))


def _describe_structures(wanted: Any, got: Any) -> str:
    """Returns where the texts of two trees differ, as at an attribute that is no array."""
    texts = [" ".join(str(tree).split()) for tree in (wanted, got)]
    pairs = enumerate(zip(*texts, strict=False))
    start = next((index for index, (one, other) in pairs if one != other), 0)
    one, other = (text[max(0, start - _CONTEXT) : start + _CONTEXT] for text in texts)
    place = "the structure of the arguments"
    return place if one == other else f"{place}: wanted ...{one}..., got ...{other}..."


def _find_place(leaf: LeafType) -> tuple[Any, bool]:
    return leaf.sharding, leaf.is_on_host


def _print_places(*given: LeafType) -> str:
    texts = list(map(_print_place, given))
    if texts[0] == texts[1]:
        # Then the meshes have the same axes, over other devices or in another order.
        texts = [
            f"{text} on {_list_devices(each.sharding)}"
            for text, each in zip(texts, given, strict=True)
        ]
    return f"wanted {texts[0]}, got {texts[1]}"


def _list_devices(sharding: Any) -> str:
    devices = getattr(getattr(sharding, "mesh", None), "devices", np.empty(0))
    return ", ".join(map(str, devices.flat))


def _print_place(leaf: LeafType) -> str:
    if leaf.sharding is not None:
        return print_sharding(leaf.sharding)
    return "host memory" if leaf.is_on_host else "one device"


def _list_leaf_specs(names: Sequence[str], signature: Signature) -> list[LeafSpec]:
    return [
        (name, leaf.shape, leaf.dtype, leaf.weak_type)
        for name, leaf in zip(names, signature.leaves, strict=True)
    ]
