"""KernelStore: a folder of saved files by key, which many processes share.

Note [Shared folder]
A file appears whole or not at all, under its last name, so no reader needs a lock, and a process
that dies leaves nothing that another would wait for. Two that write one key write equal contents;
the last one stays. What is read is checked as any saved file, and a file that is not as it was
written, or not this user's alone, counts as absent: it is removed, with one line in the log. So is
a folder that cannot be used: nothing here raises for what the disk does.

Files that were not used for longest go first when the folder is larger than its limit. A file's
modification time is that of its last use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import pathlib
import stat
from collections.abc import Iterable, Sequence
from typing import Any

from tracegraph.runtime.environment import read_kernel_cache_bytes, read_kernel_cache_path
from tracegraph.runtime.errors import SavedFileError
from tracegraph.runtime.saving.saved_file import SavedFile, read_file, write_file

LOGGER = logging.getLogger("tracegraph")
SUFFIX = ".tgk"
STORES_NOTHING = "stores nothing"
# An unfinished file that is older than this: the process that wrote it has ended.
_ABANDONED_S = 3600.0


@dataclasses.dataclass(frozen=True)
class StoreInfo:
    """What a store holds.

    Attributes:
        path: of its folder.
        entries: files in it.
        nbytes: of them together.
        limit: bytes that it is kept to.
    """

    path: pathlib.Path
    entries: int
    nbytes: int
    limit: int


def find_store() -> KernelStore | None:
    """Returns the store that the environment names; None where the cache is off.

    Raises:
        ConfigError: an environment variable has a value that is not allowed.
    """
    path = read_kernel_cache_path()
    return None if path is None else _make_store(path, read_kernel_cache_bytes())


class KernelStore:
    """Saved files in one folder, see Note [Shared folder].

    Args:
        path: of the folder; it is made when the first file is stored.
        limit: bytes that all files may take together.
    """

    def __init__(self, path: pathlib.Path, limit: int) -> None:
        self.path, self._limit = path, limit
        self._has_logged = False

    def find(self, key: str) -> SavedFile | None:
        """Returns the file of a key, or None; a file that cannot be used is removed.

        Args:
            key: letters and digits.
        """
        path = self._place(key)
        try:
            is_file = stat.S_ISREG(path.lstat().st_mode)
            # A pipe would be waited for, and a link may lead anywhere.
            file = read_file(path, is_private=True) if is_file else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._log_once("cannot be read", str(error))
            return None
        except SavedFileError as error:
            # Another process may have removed it meanwhile, for room.
            if os.path.lexists(path):
                self.drop(key, error.what)
            return None
        if file is None:
            self.drop(key, "it is not a regular file")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return file

    def holds(self, beginning: str) -> bool:
        """True where there is a file whose key begins so.

        Args:
            beginning: letters and digits.
        """
        try:
            with os.scandir(self.path) as entries:
                return any(entry.name.startswith(beginning) for entry in entries)
        except OSError:
            return False

    def drop(self, key: str, why: str) -> None:
        """Removes the file of a key, with a line in the log.

        Args:
            key: of the file.
            why: what is wrong with it.
        """
        LOGGER.warning("the kernel cache drops %s: %s", self._place(key), why)
        with contextlib.suppress(OSError):
            self._place(key).unlink()

    def add(self, key: str, content: Any, blobs: Sequence[bytes]) -> bool:
        """Stores a file; False where the disk does not take it, or the limit is less than it.

        Args:
            key: letters and digits.
            content: of JSON.
            blobs: byte strings.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.path.stat()
            if owner.st_uid != os.geteuid() or stat.S_IMODE(owner.st_mode) & 0o022:
                self._log_once(STORES_NOTHING, f"others may write to {self.path}")
                return False
            if write_file(self._place(key), content, blobs) > self._limit:
                # All others would have to go for it, and then it would go itself.
                self._place(key).unlink(missing_ok=True)
                return False
        except (OSError, SavedFileError) as error:
            self._log_once(STORES_NOTHING, str(error).partition("\n")[0])
            return False
        self._evict()
        return True

    def clear(self) -> int:
        """Removes all files; returns how many there were."""
        return _remove(path for path, _ in self._list_files())

    def read_info(self) -> StoreInfo:
        """Returns what is there now."""
        sizes = [found.st_size for _, found in self._list_files()]
        return StoreInfo(self.path, len(sizes), sum(sizes), self._limit)

    def _place(self, key: str) -> pathlib.Path:
        return self.path / f"{key}{SUFFIX}"

    def _list_files(self) -> list[tuple[pathlib.Path, os.stat_result]]:
        try:
            paths = list(self.path.glob(f"*{SUFFIX}"))
        except OSError:
            return []
        found: list[tuple[pathlib.Path, os.stat_result]] = []
        for path in paths:
            with contextlib.suppress(OSError):
                found.append((path, path.lstat()))
        return found

    def _evict(self) -> None:
        """Removes the files that were not used for longest, and what dead writers left."""
        files = sorted(self._list_files(), key=lambda each: each[1].st_mtime)
        excess = itertools.accumulate(found.st_size for _, found in reversed(files))
        kept = sum(total <= self._limit for total in excess)
        _remove(path for path, _ in files[: len(files) - kept])
        newest = files[-1][1].st_mtime if files else 0.0
        _remove(
            path for path in self._list_unfinished() if newest - _read_time(path) > _ABANDONED_S
        )

    def _list_unfinished(self) -> list[pathlib.Path]:
        try:
            return list(self.path.glob(f".*{SUFFIX}.*"))
        except OSError:
            return []

    def _log_once(self, effect: str, problem: str) -> None:
        if not self._has_logged:
            self._has_logged = True
            LOGGER.warning("the kernel cache %s: %s", effect, problem)


@functools.cache
def _make_store(path: pathlib.Path, limit: int) -> KernelStore:
    return KernelStore(path, limit)


def _remove(paths: Iterable[pathlib.Path]) -> int:
    """Removes files; returns how many. Another process may have removed some of them."""
    count = 0
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
            count += 1
    return count


def _read_time(path: pathlib.Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return math.inf
