"""RecordCodec: records of plain values to a tree of JSON and byte strings, and back.

Note [Rows]
A tree has the types that it uses, with the names of their fields, and one row per record: the
number of its type and its values. A value that is a record is the number of its row, which comes
earlier, so that no tree has cycles, and equal records are stored once. Byte strings are numbers of
blobs; equal ones are stored once, too: the layers of a model share their kernels. Every other value
that JSON does not have is a list that begins with a letter. ::

    {"types": [["BufferUse", "buffer", "offset", "nbytes"], ...],
     "rows": [[0, "%1", 0, 64], ...],
     "value": ["r", 12]}

Reading is total: whatever a tree holds, the result is a value of the wanted type or an error that
names the row and the field. It makes records of the given types only, checks each field against
its annotation, and imports, looks up and runs nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tracegraph.runtime.saving.field_checks import Check, make_check

# Deeper values than any record has would only exhaust the stack.
MAX_DEPTH = 16
_PLAIN = (type(None), bool, int, str)


class ContentProblem(Exception):
    """What is wrong with a tree, and where in it.

    Args:
        place: as ``row 12 (KernelNode), field shape``.
        problem: what is wrong there.
    """

    def __init__(self, place: str, problem: str) -> None:
        self.place, self.problem = place, problem
        super().__init__(f"{place}: {problem}")


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What a value became.

    Attributes:
        tree: of JSON.
        blobs: byte strings that it refers to.
    """

    tree: Any
    blobs: tuple[bytes, ...]


class RecordCodec:
    """Writes and reads values that are made of records of given types.

    Args:
        kinds: frozen dataclasses, NamedTuples and enums. Their names are written, so no two are
            equal.

    Example:
        >>> from tracegraph.runtime.definition.nodes import BufferUse, CopyNode
        >>> codec = RecordCodec([BufferUse, CopyNode])
        >>> node = CopyNode("copy", BufferUse("a", 0, 8), BufferUse("b", 0, 8))
        >>> encoded = codec.encode(node)
        >>> codec.decode(encoded.tree, encoded.blobs, CopyNode) == node
        True
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds: dict[str, _Kind] = {}
        for kind in kinds:
            if kind.__name__ in self._kinds:
                raise ValueError(f"two types are called {kind.__name__}")
            self._kinds[kind.__name__] = _Kind(kind)

    def encode(
        self, value: Any, *, externals: Sequence[Any] = (), blobs: Sequence[bytes] = ()
    ) -> Encoded:
        """Returns a value as a tree and blobs.

        Args:
            value: what to write.
            externals: objects in it that are written as their numbers in this list.
            blobs: byte strings that are there already; those of the value are added.

        Raises:
            TypeError: it holds what is neither plain nor of a known type; the text names the field.
        """
        writer = _Writer(self._kinds, externals, blobs)
        root = writer.encode(value, "the value")
        tree = {"types": writer.types, "rows": writer.rows, "value": root}
        return Encoded(tree, tuple(writer.blobs))

    def decode(
        self,
        tree: Any,
        blobs: Sequence[bytes | memoryview],
        wanted: Any,
        *,
        externals: Sequence[Any] = (),
    ) -> Any:
        """Returns the value of a tree.

        Args:
            tree: of JSON.
            blobs: byte strings that it refers to.
            wanted: the annotation that the value must have.
            externals: what stands for those of `encode`, in the same order.

        Raises:
            ContentProblem: something in the tree is not as `encode` writes it.
        """
        return _Reader(self._kinds, blobs, externals).decode(tree, wanted)


class _Kind:
    """A type of records or an enum: how its values are taken apart, checked and made.

    Attributes:
        kind: the type.
        names: of its fields; empty for an enum.
    """

    def __init__(self, kind: type) -> None:
        self.kind, self.name = kind, kind.__name__
        self.members: Mapping[str, Any] = {}
        if issubclass(kind, enum.Enum):
            self.names, self.members = (), dict(kind.__members__)
        elif dataclasses.is_dataclass(kind):
            self.names = tuple(each.name for each in dataclasses.fields(kind) if each.init)
        elif issubclass(kind, tuple) and (names := getattr(kind, "_fields", None)) is not None:
            self.names = tuple(names)
        else:
            raise ValueError(f"{kind.__name__} is not a dataclass, NamedTuple or enum")

    @functools.cached_property
    def checks(self) -> tuple[Check, ...]:
        """One per field; made at first use, as annotations may name types that come later."""
        hints = typing.get_type_hints(self.kind)
        return tuple(make_check(hints[name]) for name in self.names)

    def make(self, values: Sequence[Any], place: str) -> Any:
        """Returns a record with these values.

        Raises:
            ContentProblem: one has another type than its field.
        """
        for name, check, value in zip(self.names, self.checks, values, strict=True):
            if not check(value):
                problem = f"a value of type {type(value).__name__} does not belong there"
                raise ContentProblem(f"{place}, field {name}", problem)
        try:
            return self.kind(*values)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ContentProblem(place, f"it cannot be made: {error}") from None


class _Writer:
    """Collects the types, rows and blobs of one tree."""

    def __init__(
        self, kinds: Mapping[str, _Kind], externals: Sequence[Any], blobs: Sequence[bytes]
    ) -> None:
        self.types: list[list[str]] = []
        self.rows: list[list[Any]] = []
        self.blobs: list[bytes] = list(blobs)
        self._kinds = kinds
        self._externals = {id(each): number for number, each in enumerate(externals)}
        self._type_numbers: dict[str, int] = {}
        self._blob_numbers = {blob: number for number, blob in enumerate(self.blobs)}
        # By identity first: kernels are the same object in hundreds of nodes.
        self._seen: dict[int, tuple[Any, int]] = {}
        self._row_numbers: dict[str, int] = {}

    def encode(self, value: Any, place: str) -> Any:
        """Returns what stands for a value in a row."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        known = self._kinds.get(kind.__name__)
        if known is not None and known.kind is kind:
            return self._encode_known(value, known)
        if kind is float:
            return ["f", value.hex()]
        if kind is complex:
            return ["c", value.real.hex(), value.imag.hex()]
        if isinstance(value, bytes | bytearray | memoryview):
            return ["b", self._add_blob(bytes(value))]
        if kind is tuple:
            return ["t", *[self.encode(each, place) for each in value]]
        if kind is frozenset:
            items = [self.encode(each, place) for each in value]
            return ["s", *sorted(items, key=repr)]
        if isinstance(value, Mapping):
            items = [[self.encode(k, place), self.encode(v, place)] for k, v in value.items()]
            return ["d", *items]
        if isinstance(value, np.dtype) and value.name in _DTYPES:
            return ["y", value.name]
        if id(value) in self._externals:
            return ["x", self._externals[id(value)]]
        raise TypeError(f"{place} is of type {kind.__qualname__}, which no file holds")

    def _encode_known(self, value: Any, known: _Kind) -> Any:
        if known.members:
            return ["e", self._find_type(known), value.name]
        seen = self._seen.get(id(value))
        if seen is not None:
            return ["r", seen[1]]
        # The number comes after those of the parts, which a row refers to.
        parts = [
            self.encode(getattr(value, name), f"{name} of {known.name}") for name in known.names
        ]
        row = [self._find_type(known), *parts]
        # Not by equality of the records: 1, 1.0 and True are equal.
        number = self._row_numbers.setdefault(repr(row), len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
        self._seen[id(value)] = value, number
        return ["r", number]

    def _find_type(self, known: _Kind) -> int:
        if known.name not in self._type_numbers:
            self._type_numbers[known.name] = len(self.types)
            self.types.append([known.name, *known.names])
        return self._type_numbers[known.name]

    def _add_blob(self, blob: bytes) -> int:
        number = self._blob_numbers.setdefault(blob, len(self.blobs))
        if number == len(self.blobs):
            self.blobs.append(blob)
        return number


class _Reader:
    """Makes the records of one tree, row by row."""

    def __init__(
        self,
        kinds: Mapping[str, _Kind],
        blobs: Sequence[bytes | memoryview],
        externals: Sequence[Any],
    ) -> None:
        self._kinds, self._blobs, self._externals = kinds, blobs, externals
        self._types: list[_Kind] = []
        self._records: list[Any] = []

    def decode(self, tree: Any, wanted: Any) -> Any:
        """Returns the value of a tree."""
        if not isinstance(tree, dict) or tree.keys() != {"types", "rows", "value"}:
            raise ContentProblem("the content", "it has not types, rows and a value")
        if not isinstance(tree["types"], list) or not isinstance(tree["rows"], list):
            raise ContentProblem("the content", "its types or rows are not lists")
        self._types = [self._read_type(each, i) for i, each in enumerate(tree["types"])]
        for number, row in enumerate(tree["rows"]):
            self._records.append(self._read_row(row, number))
        value = self._read(tree["value"], "the value", MAX_DEPTH)
        if not make_check(wanted)(value):
            raise ContentProblem("the value", f"it is of type {type(value).__name__}")
        return value

    def _read_type(self, names: Any, number: int) -> _Kind:
        place = f"type {number}"
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise ContentProblem(place, "it has no name")
        known = self._kinds.get(names[0])
        if known is None:
            raise ContentProblem(place, f"{names[0][:80]!r} is not known to this version")
        if names[1:] != [*known.names]:
            wanted = ", ".join(known.names) or "none"
            raise ContentProblem(place, f"{names[0]} has other fields than here: {wanted}")
        return known

    def _read_row(self, row: Any, number: int) -> Any:
        place = f"row {number}"
        if not isinstance(row, list) or not row:
            raise ContentProblem(place, "it is empty")
        known = self._find_type(row[0], place)
        place = f"{place} ({known.name})"
        if known.members or len(row) != 1 + len(known.names):
            raise ContentProblem(place, f"it has {len(row) - 1} values")
        values = [
            each if type(each) in _PLAIN else self._read(each, place, MAX_DEPTH) for each in row[1:]
        ]
        return known.make(values, place)

    def _find_type(self, number: Any, place: str) -> _Kind:
        if type(number) is not int or not 0 <= number < len(self._types):
            raise ContentProblem(place, f"there is no type {number!r:.80}")
        return self._types[number]

    def _read(self, value: Any, place: str, depth: int) -> Any:
        """Returns what stands in a row for a value."""
        if type(value) in _PLAIN:
            return value
        if type(value) is not list or not value or not isinstance(value[0], str):
            raise ContentProblem(place, f"{value!r:.80} stands for no value")
        if depth == 0:
            raise ContentProblem(place, f"values are nested more than {MAX_DEPTH} deep")
        letter = value[0]
        if letter == "r":
            return self._find(self._records, value, place, "record")
        if letter == "b":
            return bytes(self._find(self._blobs, value, place, "blob"))
        if letter == "x":
            return self._find(self._externals, value, place, "external")
        rest = value[1:]
        if letter == "d":
            return self._read_dict(rest, place, depth - 1)
        if letter in ("t", "s"):
            items = [
                each if type(each) in _PLAIN else self._read(each, place, depth - 1)
                for each in rest
            ]
            return tuple(items) if letter == "t" else _make_set(items, place)
        return self._read_leaf(letter, rest, place)

    def _read_leaf(self, letter: str, rest: list[Any], place: str) -> Any:
        if letter == "e" and len(rest) == 2:
            members = self._find_type(rest[0], place).members
            if type(rest[1]) is str and rest[1] in members:
                return members[rest[1]]
        if not all(type(each) is str for each in rest):
            raise ContentProblem(place, f"{[letter, *rest]!r:.80} stands for no value")
        if letter == "f" and len(rest) == 1:
            return _read_float(rest[0], place)
        if letter == "c" and len(rest) == 2:
            return complex(_read_float(rest[0], place), _read_float(rest[1], place))
        if letter == "y" and len(rest) == 1:
            return _read_dtype(rest[0], place)
        raise ContentProblem(place, f"{[letter, *rest]!r:.80} stands for no value")

    def _find(self, found: Sequence[Any], value: list[Any], place: str, what: str) -> Any:
        if len(value) != 2 or type(value[1]) is not int or not 0 <= value[1] < len(found):
            raise ContentProblem(place, f"there is no {what} {value[1:]!r:.80} before it")
        return found[value[1]]

    def _read_dict(self, pairs: list[Any], place: str, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for pair in pairs:
            if type(pair) is not list or len(pair) != 2:
                raise ContentProblem(place, "a pair of a dict has not two values")
            key, value = (self._read(each, place, depth) for each in pair)
            if not _is_plain(key):
                raise ContentProblem(place, "a key of a dict is not plain")
            if key in found:
                raise ContentProblem(place, "a key is twice in a dict")
            found[key] = value
        return found


def _is_plain(value: Any) -> bool:
    """True for what is hashed by its own bytes: records may share parts, level by level."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or type(value) is bytes


def _make_set(items: list[Any], place: str) -> frozenset[Any]:
    if not all(map(_is_plain, items)):
        raise ContentProblem(place, "an item of a set is not plain")
    found = frozenset(items)
    if len(found) != len(items):
        raise ContentProblem(place, "an item is twice in a set")
    return found


def _read_float(text: str, place: str) -> float:
    try:
        return float.fromhex(text)
    except (ValueError, OverflowError):
        raise ContentProblem(place, f"{text[:80]!r} is not a number") from None


def _read_dtype(name: str, place: str) -> np.dtype[Any]:
    if name not in _DTYPES:
        raise ContentProblem(place, f"there is no dtype {name[:80]!r}")
    return np.dtype(_DTYPES[name])


# By name: NumPy reads lists of fields, too, and knows those of ml_dtypes by their classes only.
_DTYPES = {
    name: getattr(ml_dtypes, name)
    for name in dir(ml_dtypes)
    if isinstance(getattr(ml_dtypes, name), type) and name not in ("finfo", "iinfo")
} | {np.dtype(code).name: np.dtype(code) for code in "?bhilBHILefdFD"}
