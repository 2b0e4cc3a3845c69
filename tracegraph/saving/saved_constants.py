"""Closed-over arrays, as weights: in a file, or left out and given by who loads it.

A graph knows them as inputs of its own, and XLA's program has the values of smaller ones.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.constraints.mismatch import print_leaf_type
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.errors import SavedFileError, shorten_list
from tracegraph.runtime.jax_interop import unwrap_key
from tracegraph.runtime.saving.record_codec import ContentProblem
from tracegraph.saving.held_arrays import list_leaves

ANCHOR = "saved-constants"


@dataclasses.dataclass(frozen=True)
class SavedConstant:
    """One closed-over array, as its memory holds it.

    Attributes:
        name: by which a user knows it.
        shape: of the memory: that of a typed PRNG key includes its key data.
        dtype: of the memory.
        data: its bytes in the order of rows; None where they are left out.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    data: bytes | None

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {print_leaf_type(self.shape, self.dtype, False)}"


@dataclasses.dataclass(frozen=True)
class SavedConstants:
    """The closed-over arrays of a function.

    Attributes:
        held: those that are inputs of its graphs.
        embedded: those that are part of XLA's programs; the data is there, not here.
        has_data: whether the values of all were asked for.
    """

    held: tuple[SavedConstant, ...]
    embedded: tuple[SavedConstant, ...]
    has_data: bool


def pack_constant(name: str, array: Any, *, has_data: bool) -> SavedConstant:
    """Returns the record of an array.

    Args:
        name: by which a user knows it.
        array: as memory holds it.
        has_data: False to leave the bytes out.
    """
    data = np.asarray(array).tobytes() if has_data else None
    return SavedConstant(name, tuple(array.shape), np.dtype(array.dtype), data)


def unpack_constants(
    saved: Sequence[SavedConstant], given: Any, source: str
) -> list[np.ndarray[Any, Any] | jax.Array]:
    """Returns the array of each constant: as given, else as the file has it.

    Args:
        saved: as they came from the file.
        given: a list of arrays, one per constant; a mapping of names to trees of arrays; or None.
        source: what messages call the file.

    Raises:
        SavedFileError: one is missing, or has another type.
        ContentProblem: the file has other bytes for one than it takes.
    """
    found = _match(saved, given, source)
    missing = [each for each in saved if each.data is None and each.name not in found]
    if missing:
        top = dict.fromkeys(each.name.partition("[")[0].partition(".")[0] for each in missing)
        pairs = [f"{name!r}: {name if name.isidentifier() else '...'}" for name in top]
        example = ", ".join(shorten_list(pairs, 3))
        raise SavedFileError(
            f"{source} needs {len(missing)} closed-over arrays that it does not hold",
            where=", ".join(shorten_list(list(map(str, missing)))),
            why="it was saved with constants=False, so that it holds none of them",
            fix=f"pass them: tg.load(path, constants={{{example}}}), or a list in this order",
            anchor=ANCHOR,
        )
    return [found[each.name] if each.name in found else _read(each) for each in saved]


def _match(saved: Sequence[SavedConstant], given: Any, source: str) -> dict[str, Any]:
    """Returns what was given for each constant, by its name."""
    if given is None:
        return {}
    names = [each.name for each in saved]
    if isinstance(given, Mapping):
        given = {name: _open_module(tree) for name, tree in given.items()}
        places = dict(list_leaves(given.items()))
        found = {name: places[name] for name in names if name in places}
        unused = [
            f"{name} is not taken"
            for name, tree in given.items()
            if not any(path in found for path, _ in list_leaves([(name, tree)]))
        ]
    else:
        values = list(given)
        found = dict(zip(names, values, strict=False))
        counts = f"wanted {len(names)} arrays, got {len(values)}"
        unused = [] if len(values) == len(names) else [counts]
    wrong = [
        f"{each}, got {_print_type(found[each.name])}"
        for each in saved
        if each.name in found and not _fits(each, found[each.name])
    ]
    if unused or wrong:
        raise SavedFileError(
            f"`constants` has other arrays than the graphs of {source} take",
            where=", ".join(shorten_list([*unused, *wrong])),
            why="a graph reads its closed-over arrays at fixed places, of the shapes that it has",
            fix=f"pass arrays for: {', '.join(shorten_list(list(map(str, saved)))) or 'none'}",
            anchor=ANCHOR,
        )
    return {name: _unwrap(value) for name, value in found.items()}


def _open_module(value: Any) -> Any:
    is_module = isinstance(value, types.ModuleType)
    return types.SimpleNamespace(**vars(value)) if is_module else value


def _fits(saved: SavedConstant, value: Any) -> bool:
    array = unwrap_key(value)
    if not isinstance(array, jax.Array | np.ndarray):
        return False
    return tuple(array.shape) == saved.shape and array.dtype == saved.dtype


def _unwrap(value: Any) -> Any:
    array = unwrap_key(value)
    # What another graph returned is read now: it may be overwritten.
    return np.array(array) if isinstance(array, Array | np.ndarray) else array


def _print_type(value: Any) -> str:
    array = unwrap_key(value)
    if isinstance(array, jax.Array | np.ndarray):
        return print_leaf_type(tuple(array.shape), array.dtype, False)
    return f"an object of type {type(value).__name__}"


def _read(saved: SavedConstant) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(saved.data or b"", saved.dtype).reshape(saved.shape)
    except (ValueError, TypeError):
        count = len(saved.data or b"")
        raise ContentProblem(f"the constant {saved.name}", f"it has {count} bytes") from None
