"""The descriptions of protobuf messages that a shared library carries for its own use."""

from __future__ import annotations

import graphlib
import mmap
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tracegraph.lowering.xla.varint import read_varint
from tracegraph.runtime.errors import UnsupportedError

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

# A description begins with field 1, the name of its .proto file, whose end this finds: one of the
# fields that may come next follows (package, imports, messages, enums, ..., edition).
_NAME_END = re.compile(rb"\.proto(?=[\x12\x1a\x22\x2a\x32\x3a\x42\x50\x58\x62\x70])")
_NAME_BYTES = range(len(".proto") + 1, 128)
# Numbers and wire types of the fields of FileDescriptorProto; 9 (source places) is never embedded.
_BYTES, _VARINT = 2, 0
_FIELDS: dict[int, int] = {
    **dict.fromkeys((1, 2, 3, 4, 5, 6, 7, 8, 12, 15), _BYTES),
    **dict.fromkeys((10, 11, 14), _VARINT),
}
_WHERE = "shared library"


def scan_library(path: pathlib.Path) -> dict[str, FileDescriptorProto]:
    """Returns the description of each .proto file in a shared library, by the .proto file's name.

    Args:
        path: the library; it is read, never loaded.

    Raises:
        OSError: it cannot be read.
    """
    found: dict[str, FileDescriptorProto] = {}
    if not path.stat().st_size:
        return found
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        for match in _NAME_END.finditer(library):
            for begin in _find_begins(library, match.end()):
                description = _read_description(library, begin, match.end())
                if description is None:
                    continue
                found.setdefault(description.name, description)
    return found


def find_closure(
    files: dict[str, FileDescriptorProto], messages: tuple[str, ...]
) -> list[FileDescriptorProto]:
    """Returns the files that the messages need, each after those that it imports.

    Raises:
        KeyError: a message or an imported file is not among the files.
        ValueError: files import each other.
    """
    homes = {name: file.name for file in files.values() for name in _name_messages(file)}
    imports: dict[str, list[str]] = {}
    waiting = [homes[message] for message in messages]
    while waiting:
        name = waiting.pop()
        if name not in imports:
            imports[name] = list(files[name].dependency)
            waiting.extend(imports[name])
    return [files[name] for name in graphlib.TopologicalSorter(imports).static_order()]


def _name_messages(file: FileDescriptorProto) -> Iterator[str]:
    """Yields the full names of the messages at the top of a file."""
    for message in file.message_type:
        yield f"{file.package}.{message.name}" if file.package else message.name


def _find_begins(library: mmap.mmap, name_end: int) -> Iterator[int]:
    """Yields where a description may begin: a tag, the name's length, the name."""
    for size in _NAME_BYTES:
        begin = name_end - size - 2
        if begin >= 0 and library[begin] == 0x0A and library[begin + 1] == size:
            yield begin


def _read_description(library: mmap.mmap, begin: int, name_end: int) -> FileDescriptorProto | None:
    """Returns the description that begins here, or None if this is something else.

    Nothing says where it ends: it is the longest run of fields in ascending order, as protobuf
    writes them, that is read and written again without a change.
    """
    # Loaded where a program is read, not by `import tracegraph`.
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    for end in reversed([name_end, *_find_field_ends(library, name_end)]):
        data = library[begin:end]
        try:
            description = FileDescriptorProto.FromString(data)
        except DecodeError:
            continue
        is_whole = description.SerializeToString(deterministic=True) == data
        return description if is_whole and _has_content(description) else None
    return None


def _has_content(description: FileDescriptorProto) -> bool:
    """True for more than a name, which any text that ends in .proto could be."""
    return bool(description.message_type or description.enum_type or description.dependency)


def _find_field_ends(library: mmap.mmap, offset: int) -> Iterator[int]:
    """Yields the end of each further field, in ascending order of their numbers."""
    number = 1
    while offset < len(library):
        try:
            tag, offset = read_varint(library, offset, _WHERE)
            value, offset = read_varint(library, offset, _WHERE)
        except UnsupportedError:
            # Other bytes than those of a field.
            return
        if tag >> 3 < max(number, 2) or _FIELDS.get(tag >> 3) != tag & 7:
            return
        number = tag >> 3
        offset += value if tag & 7 == _BYTES else 0
        if offset > len(library):
            return
        yield offset
