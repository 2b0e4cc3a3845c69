"""Snapshots: state and history of the allocators as one dictionary, and its file.

The dictionary and the file are those of `torch.cuda.memory`, so that pytorch.org/memory_viz draws
them. The file is a pickle of plain values. Reading one runs no code of the file.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from tracegraph.runtime.errors import InternalError, TracegraphError
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.history import History
from tracegraph.runtime.memory.snapshots.plain_values import (
    BrokenPickleError,
    NotPlainError,
    read_plain,
    to_plain,
    write_plain,
)
from tracegraph.runtime.memory.snapshots.snapshot_check import find_problem

Snapshot: TypeAlias = dict[str, Any]

# What PyTorch writes for a size without a limit.
_UNLIMITED = -1


class SnapshotSource(Protocol):
    """What a snapshot needs of an allocator; its lock keeps trace and segments consistent."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while the two below are read."""
        ...

    @property
    def device(self) -> int:
        """Index of the device."""
        ...

    @property
    def history(self) -> History:
        """What the allocator did."""
        ...

    def snapshot(self, pool_id: Any = None) -> list[dict[str, Any]]:
        """Returns its segments with their blocks, in the keys of a snapshot file."""
        ...


def build_snapshot(
    allocators: Iterable[SnapshotSource],
    config: AllocatorConfig,
    *,
    pool_id: tuple[int, ...] | None = None,
    plans: Sequence[Mapping[str, Any]] = (),
    extra: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Returns the state and the history of allocators, one per device, as plain values.

    Args:
        allocators: in any order; devices between them that have none get an empty trace.
        config: their settings.
        pool_id: keeps only the segments of this pool.
        plans: memory plans of captured graphs, of `describe_plan`; the web viewer ignores them.
        extra: further keys of the top level, as ``host_segments`` and ``host_traces``.

    Returns:
        The dictionary that `write_snapshot` writes.
    """
    segments: list[dict[str, Any]] = []
    traces: dict[int, list[dict[str, Any]]] = {}
    for allocator in allocators:
        with allocator.lock:
            traces[allocator.device] = allocator.history.read_entries()
            segments += allocator.snapshot(pool_id)
    count = max([*traces, *(segment["device"] for segment in segments), 0]) + 1
    snapshot: Snapshot = {
        "segments": segments,
        "device_traces": [traces.get(device, []) for device in range(count)],
        "allocator_settings": describe_settings(config),
        "external_annotations": [],
        "tracegraph_plans": list(plans),
        **(extra or {}),
    }
    _share_frames(segments, traces.values())
    plain = to_plain(snapshot)
    _check_readable(plain)
    return plain


def describe_settings(config: AllocatorConfig) -> dict[str, Any]:
    """Returns the settings under the names that a snapshot file has for them.

    Example:
        >>> settings = describe_settings(AllocatorConfig())
        >>> settings["max_split_size"], settings["roundup_power2_divisions"]["1"]
        (-1, 0)
    """
    limit = config.max_split_bytes
    return {
        "PYTORCH_CUDA_ALLOC_CONF": config.text,
        "max_split_size": _UNLIMITED if limit is None else limit,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "pinned_num_register_threads": config.pinned_num_register_threads,
        "release_lock_on_cudamalloc": config.release_lock_on_cudamalloc,
        "pinned_use_cuda_host_register": config.pinned_use_cuda_host_register,
        "roundup_power2_divisions": {
            str(1 << power): config.find_divisions(1 << (power + 20)) for power in range(16)
        },
    }


def describe_plan(
    name: str,
    arena_address: int,
    arena_bytes: int,
    buffers: Iterable[tuple[str, int, int, int, int]],
) -> dict[str, Any]:
    """Returns the memory plan of a captured graph as a snapshot file holds it.

    Args:
        name: of the captured function.
        arena_address: of its first byte; 0 for a plan without an arena.
        arena_bytes: size of the arena.
        buffers: name, offset and size in bytes, first and last step (inclusive) of each.

    Example:
        >>> describe_plan("step", 4096, 512, [("loss", 0, 4, 2, 3)])["buffers"]
        [{'name': 'loss', 'offset': 0, 'bytes': 4, 'first': 2, 'last': 3}]
    """
    keys = ("name", "offset", "bytes", "first", "last")
    return {
        "name": name,
        "arena_address": arena_address,
        "arena_bytes": arena_bytes,
        "buffers": [dict(zip(keys, buffer, strict=True)) for buffer in buffers],
    }


def write_snapshot(path: str | pathlib.Path, snapshot: Snapshot) -> None:
    """Writes a snapshot that pytorch.org/memory_viz and ``python -m tracegraph memory`` read.

    Args:
        path: of the new file; by convention it ends in ``.pickle``.
        snapshot: of `build_snapshot`.

    Raises:
        InternalError: the snapshot holds something that a reader would refuse.
        OSError: the file cannot be written.
    """
    _check_readable(snapshot)
    pathlib.Path(path).write_bytes(write_plain(snapshot))


def read_snapshot(path: str | pathlib.Path) -> Snapshot:
    """Returns the snapshot in a file, ours or PyTorch's; runs no code of it.

    Args:
        path: of a file that `write_snapshot` or ``torch.cuda.memory`` wrote.

    Raises:
        TracegraphError: there is no such file, or it holds no snapshot, or more than plain values.
    """
    path = pathlib.Path(path)
    try:
        snapshot = read_plain(path.read_bytes())
    except OSError as error:
        why = f"{type(error).__name__}: {error.strerror}"
        raise _make_file_error(path, "cannot be read", why) from error
    except NotPlainError as error:
        raise _make_file_error(path, f"holds `{error}`", "only plain values are read") from error
    except BrokenPickleError as error:
        why = "a snapshot is a pickle, whose last byte is a full stop"
        raise _make_file_error(path, str(error), why) from error
    problem = find_problem(snapshot)
    if problem:
        raise _make_file_error(path, "is not a snapshot", problem)
    return snapshot


def _share_frames(
    segments: Iterable[dict[str, Any]], traces: Iterable[Iterable[dict[str, Any]]]
) -> None:
    """Lets equal call stacks be one list: a loop that allocates has the same one at every turn."""
    known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    blocks = (block for segment in segments for block in segment["blocks"])
    for record in itertools.chain(segments, blocks, *traces):
        if "frames" in record:
            key = tuple((each["filename"], each["line"], each["name"]) for each in record["frames"])
            record["frames"] = known.setdefault(key, record["frames"])


def _check_readable(snapshot: Any) -> None:
    problem = find_problem(snapshot)
    if problem:
        raise InternalError(
            f"a snapshot would be unreadable: {problem}",
            where="snapshot of the allocators",
            why="viewers compute addresses from sizes and read no other form",
        )


def _make_file_error(path: pathlib.Path, what: str, why: str) -> TracegraphError:
    return TracegraphError(
        f"snapshot file {path} {what}",
        where=f"reading {path}",
        why=why,
        fix="write it with tg.memory.dump_snapshot(path), and copy it whole",
        anchor="snapshot",
    )
