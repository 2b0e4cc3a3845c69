"""Shows what differs between two signatures; the error of a graph that refuses its own call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from tracegraph.constraints.frames import locate_caller
from tracegraph.ir.printer import print_dtype
from tracegraph.runtime.errors import InternalError, shorten_list

LeafSpec: TypeAlias = tuple[str, tuple[int, ...], Any, bool]


def describe_mismatch(wanted: Sequence[LeafSpec], got: Sequence[LeafSpec]) -> str:
    """Compares two lists of leaves by path.

    Args:
        wanted: path, shape, dtype and weak type of every leaf that was captured.
        got: the same of the leaves that were passed.

    Returns:
        What differs of the first leaves that do, joined by ``; ``, and how many more there are;
        an empty text if none does.

    Example:
        >>> describe_mismatch([("batch['x']", (32, 784), "float32", False)],
        ...                   [("batch['x']", (16, 784), "float32", False)])
        "batch['x']: wanted f32[32,784], got f32[16,784]"
    """
    wanted_types, got_types = _print_types(wanted), _print_types(got)
    lines = []
    for path in dict.fromkeys([*wanted_types, *got_types]):
        one, other = wanted_types.get(path, "nothing"), got_types.get(path, "nothing")
        if one != other:
            lines.append(f"{path}: wanted {one}, got {other}")
    return "; ".join(shorten_list(lines))


def describe_static_mismatch(
    wanted: Sequence[tuple[str, Any]], got: Sequence[tuple[str, Any]]
) -> str:
    """Compares two lists of static values by name, as `describe_mismatch` compares leaves.

    Example:
        >>> describe_static_mismatch([("static argument 1", 2)], [("static argument 1", 3)])
        'static argument 1: wanted 2, got 3'
    """
    wanted_texts = {name: repr(value) for name, value in wanted}
    got_texts = {name: repr(value) for name, value in got}
    return "; ".join(
        f"{name}: wanted {wanted_texts.get(name, 'nothing')}, got {got_texts.get(name, 'nothing')}"
        for name in dict.fromkeys([*wanted_texts, *got_texts])
        if wanted_texts.get(name) != got_texts.get(name)
    )


def make_refusal_error(name: str) -> InternalError:
    """Returns an internal error: a new graph does not take the call that it was made for."""
    return InternalError(
        f"the graph of `{name}` refuses the call that it was captured for",
        where=locate_caller(),
        why="the arguments changed while they were checked, or their type is not what it says",
    )


def _print_types(leaves: Sequence[LeafSpec]) -> dict[str, str]:
    return {path: print_leaf_type(shape, dtype, is_weak) for path, shape, dtype, is_weak in leaves}


def print_leaf_type(shape: tuple[int, ...], dtype: Any, is_weak: bool) -> str:
    """Returns the type of a leaf, as ``f32[32,784]``."""
    sizes = ",".join(str(size) for size in shape)
    name = print_dtype(dtype if hasattr(dtype, "name") else np.dtype(dtype))
    return f"{name}[{sizes}]{' (weak type)' if is_weak else ''}"
