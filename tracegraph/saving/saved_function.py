"""A saved function as records, and as the content of a file.

Note [Parts of a file]. ``format`` and ``origin`` can be read by any version and are looked at
first. ``function`` has what tracegraph knows of a function and its signatures, ``lowered`` the
program, plan and nodes of each signature, in the same order, and ``extra`` what a kind of function
has beside that, as its buckets. Their blobs are in one list, so that kernels which signatures have
in common are in the file once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.saved_lowering import decode_lowered, encode_lowered
from tracegraph.runtime.errors import InternalError, SavedFileError
from tracegraph.runtime.saving.record_codec import ContentProblem, Encoded, RecordCodec
from tracegraph.runtime.saving.saved_file import ANCHOR, SavedFile, raise_damage
from tracegraph.saving.plain_values import VALUE_TYPES
from tracegraph.saving.saved_calls import CALL_TYPES, SavedCall, SavedResults
from tracegraph.saving.saved_constants import SavedConstant, SavedConstants
from tracegraph.saving.saved_parameters import SavedOptions, SavedParameter
from tracegraph.saving.saved_target import FileOrigin, read_origin
from tracegraph.saving.saved_trees import TREE_TYPES
from tracegraph.verification.expectation import Expectation
from tracegraph.verification.other_inputs import OtherInputs
from tracegraph.verification.report import VerificationReport

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class SavedEntry:
    """One signature.

    Attributes:
        call: the calls that it takes.
        results: what it returns.
        constants: for each of its closed-over arrays the name of the input, and the index of the
            constant.
        verification: what a comparison found; None where it is still to be made.
        expectation: what it is to find then.
    """

    call: SavedCall
    results: SavedResults
    constants: tuple[tuple[str, int], ...]
    verification: VerificationReport | None
    expectation: Expectation | None = None


@dataclasses.dataclass(frozen=True)
class SavedFunction:
    """A captured function.

    Attributes:
        name: of it.
        parameters: that its calls are checked against.
        own_parameters: those of the function itself, if it wraps another.
        options: of its capture.
        constants: its closed-over arrays.
        entries: one per signature, the one that was used last first.
    """

    name: str
    parameters: tuple[SavedParameter, ...]
    own_parameters: tuple[SavedParameter, ...]
    options: SavedOptions
    constants: SavedConstants
    entries: tuple[SavedEntry, ...]


@dataclasses.dataclass(frozen=True)
class Opened:
    """A file that was read, before its graphs are made.

    Attributes:
        source: what messages call it.
        origin: what it was made with.
        function: what it holds.
        lowered: tree of JSON of each signature.
        extra: tree of JSON, or None.
        blobs: byte strings that the trees refer to.
        checksum: of the file.

    More than six fields because they are the parts of a file.
    """

    source: str
    origin: FileOrigin
    function: SavedFunction
    lowered: tuple[Any, ...]
    extra: Any
    blobs: Sequence[bytes | memoryview]
    checksum: str


_codec = RecordCodec(
    (
        *VALUE_TYPES,
        *TREE_TYPES,
        *CALL_TYPES,
        SavedParameter,
        SavedOptions,
        SavedConstant,
        SavedConstants,
        VerificationReport,
        OtherInputs,
        Expectation,
        SavedEntry,
        SavedFunction,
    )
)


def encode_function(
    function: SavedFunction, lowered: Sequence[Lowered], origin: dict[str, Any]
) -> Encoded:
    """Returns the content of a file and its blobs.

    Args:
        function: what it holds.
        lowered: one per signature.
        origin: what `describe_origin` returns.

    Raises:
        SaveProblem: a lowering holds what belongs to this process.
    """
    encoded = _codec.encode(function)
    blobs, trees = encoded.blobs, []
    for entry, each in zip(function.entries, lowered, strict=True):
        is_unverified = entry.verification is None
        part = encode_lowered(each, blobs=blobs, has_references=is_unverified)
        blobs = part.blobs
        trees.append(part.tree)
    content = {"format": FORMAT, "origin": origin, "function": encoded.tree, "lowered": trees}
    return Encoded({**content, "extra": None}, blobs)


def open_function(file: SavedFile) -> Opened:
    """Returns what a file holds; nothing of it is for a device yet.

    Raises:
        SavedFileError: it has another format, or is not as `encode_function` writes it.
    """
    content, source = file.content, file.source
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise_damage(source, "the header", "it has no format")
    if content["format"] != FORMAT:
        raise SavedFileError(
            f"{source} has format {content['format']}, and this version of tracegraph reads "
            f"{FORMAT}",
            where=f"{source}, saved with {_name_version(content)}",
            why="what a graph is made of differs between formats",
            fix="load it with that version, or save it again with this one",
            anchor=ANCHOR,
        )
    if content.keys() != {"format", "origin", "function", "lowered", "extra"}:
        raise_damage(source, "the header", "its parts are not those of its format")
    origin = read_origin(content["origin"], source)
    try:
        function = _codec.decode(content["function"], file.blobs, SavedFunction)
    except ContentProblem as problem:
        raise_damage(source, f"the function, {problem.place}", problem.problem)
    trees = content["lowered"]
    if not isinstance(trees, list) or len(trees) != len(function.entries) or not trees:
        raise_damage(source, "the header", "it has not one program per signature")
    return Opened(
        source, origin, function, tuple(trees), content["extra"], file.blobs, file.checksum
    )


def decode_entry(opened: Opened, index: int, jax_device: Any) -> Lowered:
    """Returns the lowering of a signature.

    Args:
        opened: the file.
        index: of the signature.
        jax_device: that it is for; None to read it without loading code.

    Raises:
        ContentProblem: it is not as `encode_function` writes it.
    """
    tree = opened.lowered[index]
    # One per region of a GPU's graph, of which there are at most as many as records.
    rows = tree.get("lowered") if isinstance(tree, dict) else None
    count = len(rows["rows"]) if isinstance(rows, dict) and "rows" in rows else 0
    return decode_lowered(tree, opened.blobs, jax_device, [_raise_missing] * count)


def _raise_missing(*arrays: Any) -> NoReturn:
    raise InternalError(
        "a loaded graph asks for the executable that it was made from",
        where="a region of a loaded graph",
        why=f"a file for a GPU has kernels only; it was called with {len(arrays)} arrays",
    )


def _name_version(content: dict[str, Any]) -> str:
    origin = content.get("origin")
    version = origin.get("tracegraph") if isinstance(origin, dict) else None
    return f"tracegraph {version}" if isinstance(version, str) else "an unknown version"
