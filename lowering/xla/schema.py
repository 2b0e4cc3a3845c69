"""The message types of XLA's compiled programs, as the installed CUDA plugin describes them.

Fields are added, moved and renumbered between versions of XLA. The plugin's shared library carries
the descriptions of all messages that it writes, so they are taken from there, and kept in a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from tracegraph.lowering.xla.descriptors import find_closure, scan_library
from tracegraph.lowering.xla.refusal import make_unreadable_error
from tracegraph.runtime.errors import UnsupportedError

if TYPE_CHECKING:
    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import Message

# Functions import protobuf themselves: a process that reads no program need not load it.

EXECUTABLE = "xla.gpu.GpuExecutableProto"
OPTIONS = "xla.ExecutableAndOptionsProto"
MANIFEST = "xla.SplitProtoManifest"
COMPUTATION = "xla.HloComputationProto"
# Of a computation the number alone; a type of ours.
COMPUTATION_ID = "xla.TracegraphComputationId"
_DEBUG_OPTIONS = "xla.DebugOptions"
ROOTS = (EXECUTABLE, OPTIONS, MANIFEST, _DEBUG_OPTIONS)

_LIBRARY = "xla_cuda_plugin.so"
_MAPPED = pathlib.Path("/proc/self/maps")
_DELETED = f"/{_LIBRARY} (deleted)"
# Part of each cache file's name and beginning; raised when the form or the roots change.
_CACHE_FORM = b"tracegraph schema 1\n"


@dataclasses.dataclass(frozen=True)
class Schema:
    """Message types of one version of XLA.

    Attributes:
        pool: the types.
        origin: where they come from, for errors.
        classes: of all message types of a program, kept here because protobuf's pool does not.
    """

    pool: DescriptorPool
    origin: str
    classes: tuple[type[Message], ...] = dataclasses.field(default=(), repr=False)

    def message_class(self, name: str) -> type[Message]:
        """Returns the class of a message type, such as ``xla.gpu.ThunkProto``.

        Raises:
            UnsupportedError: this version of XLA has no such type.
        """
        try:
            return find_class(self.pool, name)
        except KeyError as error:
            raise make_unreadable_error(
                f"the CUDA plugin describes no {name}", self.origin
            ) from error

    def fields_of(self, name: str) -> dict[str, FieldDescriptor]:
        """Returns the fields of a message type by name.

        Raises:
            UnsupportedError: this version of XLA has no such type.
        """
        fields = self.message_class(name).DESCRIPTOR.fields_by_name
        return cast("dict[str, FieldDescriptor]", dict(fields))


def find_class(pool: DescriptorPool, name: str) -> type[Message]:
    """Returns the class of a message type.

    Raises:
        KeyError: the pool has no such type.
    """
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(pool.FindMessageTypeByName(name))


def load_schema() -> Schema:
    """Returns the message types of the CUDA plugin that this process uses or would use.

    The first call for a plugin reads its library (about half a second), unless a file in
    ``$XDG_CACHE_HOME/tracegraph`` or ``~/.cache/tracegraph`` holds what an earlier process found.

    Raises:
        UnsupportedError: there is no plugin, there are several, or it describes no programs.
    """
    path = find_plugin()
    status = path.stat()
    return _load_schema(path, status.st_size, status.st_mtime_ns)


def legal_compile_options() -> frozenset[str]:
    """Returns the names that ``compiler_options=`` of a compile for this plugin may have.

    Raises:
        UnsupportedError: as for `load_schema`.
    """
    return frozenset(load_schema().fields_of(_DEBUG_OPTIONS))


def build_schema(files: Iterable[FileDescriptorProto], origin: str) -> Schema:
    """Returns the schema of described files, each after those that it imports.

    The computations of a module are bytes in it, see Note [Computations on demand].

    Raises:
        UnsupportedError: the descriptions do not fit together, or a message is missing.
    """
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    for file in files:
        try:
            pool.AddSerializedFile(_defer_computations(file).SerializeToString())
        except TypeError as error:
            raise make_unreadable_error(
                f"{file.name} of the CUDA plugin does not fit: {error}", origin
            ) from error
    schema = Schema(pool, origin)
    return dataclasses.replace(schema, classes=_list_classes(schema))


def _list_classes(schema: Schema) -> tuple[type[Message], ...]:
    """Returns the classes of all types of a program."""
    found: dict[str, type[Message]] = {}
    waiting = [*ROOTS, COMPUTATION, COMPUTATION_ID]
    while waiting:
        name = waiting.pop(0)
        if name in found:
            continue
        found[name] = schema.message_class(name)
        types = [field.message_type for field in found[name].DESCRIPTOR.fields]
        waiting += [each.full_name for each in types if each is not None]
    return tuple(found.values())


def _defer_computations(file: FileDescriptorProto) -> FileDescriptorProto:
    """Returns the description with bytes for computations, and with the type of their numbers."""
    messages = {f"{file.package}.{message.name}": message for message in file.message_type}
    if COMPUTATION not in messages:
        return file
    changed = type(file)()
    changed.CopyFrom(file)
    for message in changed.message_type:
        for field in message.field:
            if field.type_name == f".{COMPUTATION}":
                field.type = field.TYPE_BYTES
                field.ClearField("type_name")
    number = changed.message_type.add(name=COMPUTATION_ID.removeprefix(f"{file.package}."))
    number.field.extend(field for field in messages[COMPUTATION].field if field.name == "id")
    return changed


def find_plugin() -> pathlib.Path:
    """Returns the plugin's shared library: the one that this process has mapped, else installed.

    Raises:
        UnsupportedError: there is none, there are several and none is in use, or the one in use
            was replaced.
    """
    used = _find_plugin_in_use()
    if used is not None:
        return used
    found = _find_mapped_plugins() or _find_installed_plugins()
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(str(path) for path in found)
        raise UnsupportedError(
            "several CUDA plugins of JAX are installed",
            where=names,
            why="only one of them compiles for this process, and their programs differ",
            fix="pip uninstall the plugin of the CUDA version that you do not use",
            anchor="unsupported-jax",
        )
    raise UnsupportedError(
        "the CUDA plugin of JAX is not installed",
        where=f"no jax_plugins/xla_cuda*/{_LIBRARY} on the import path of this process",
        why="it compiles for the GPU and describes the form of the compiled programs",
        fix='pip install "jax[cuda13]", or "jax[cuda12]" for a driver of CUDA 12',
        anchor="unsupported-jax",
    )


def _find_plugin_in_use() -> pathlib.Path | None:
    """Returns the one plugin in this process's memory, or None if there is none or several.

    A library stays where it is mapped, so the long list is read again only if its file is no
    longer the same.
    """
    try:
        path, identity = _read_plugin_in_use()
        if _identify(path) != identity:
            _read_plugin_in_use.cache_clear()
            path, _ = _read_plugin_in_use()
    except LookupError:
        return None
    return path


@functools.lru_cache(maxsize=1)
def _read_plugin_in_use() -> tuple[pathlib.Path, tuple[int, int] | None]:
    """Returns the path of the one mapped plugin and what identifies its file.

    Raises:
        LookupError: there is none, or there are several; the next call looks again.
        UnsupportedError: its file was replaced.
    """
    found = _find_mapped_plugins()
    if len(found) != 1:
        raise LookupError
    return found[0], _identify(found[0])


def _identify(path: pathlib.Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _find_mapped_plugins() -> list[pathlib.Path]:
    """Returns the plugins in this process's memory; none where the system has no such list."""
    try:
        lines = _MAPPED.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    names = {line.split(maxsplit=5)[-1] for line in lines if f"/{_LIBRARY}" in line}
    for name in names:
        if name.endswith(_DELETED):
            raise make_unreadable_error(
                "the CUDA plugin was replaced while this process used it; restart", name
            )
    return sorted(pathlib.Path(name) for name in names if name.endswith(f"/{_LIBRARY}"))


def _find_installed_plugins() -> list[pathlib.Path]:
    spec = importlib.util.find_spec("jax_plugins")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = {
        path.resolve()
        for folder in folders
        for path in pathlib.Path(folder).glob(f"xla_cuda*/{_LIBRARY}")
    }
    return sorted(found)


@functools.lru_cache(maxsize=4)
def _load_schema(path: pathlib.Path, size: int, changed_ns: int) -> Schema:
    """Returns the schema of one library, which its path, size and time of change identify."""
    identity = f"{path}|{size}|{changed_ns}".encode()
    cache = _find_cache_file(identity)
    files = _read_cache(cache)
    if files is not None:
        return build_schema(files, str(path))
    try:
        found = find_closure(scan_library(path), ROOTS)
    except KeyError as error:
        raise make_unreadable_error(
            f"the CUDA plugin describes no {error.args[0]}", str(path)
        ) from error
    except ValueError as error:
        raise make_unreadable_error(
            f"files of the CUDA plugin import each other: {error}", str(path)
        ) from error
    schema = build_schema(found, str(path))
    _write_cache(cache, found)
    return schema


def _find_cache_file(identity: bytes) -> pathlib.Path | None:
    """Returns the cache file of one library, or None if this process has no home folder."""
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        with contextlib.suppress(RuntimeError):  # no home folder is known
            folder = pathlib.Path.home() / ".cache"
    if not folder.is_absolute():
        return None
    key = hashlib.sha256(_CACHE_FORM + identity).hexdigest()
    return folder / "tracegraph" / f"schema-{key[:32]}.bin"


def _read_cache(cache: pathlib.Path | None) -> list[FileDescriptorProto] | None:
    """Returns the files that a cache file describes, or None if it is missing or broken."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.message import DecodeError

    try:
        data = b"" if cache is None else cache.read_bytes()
    except OSError:
        return None
    head, body = data[: len(_CACHE_FORM) + 32], data[len(_CACHE_FORM) + 32 :]
    if head != _CACHE_FORM + hashlib.sha256(body).digest():
        return None
    try:
        return list(FileDescriptorSet.FromString(body).file)
    except DecodeError:
        return None


def _write_cache(cache: pathlib.Path | None, files: list[FileDescriptorProto]) -> None:
    """Writes the cache file in one step; a folder that cannot be written has no cache."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    if cache is None:
        return
    body = FileDescriptorSet(file=files).SerializeToString()
    with contextlib.suppress(OSError):  # the next process scans again
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
            draft = pathlib.Path(folder) / cache.name
            draft.write_bytes(_CACHE_FORM + hashlib.sha256(body).digest() + body)
            draft.replace(cache)
