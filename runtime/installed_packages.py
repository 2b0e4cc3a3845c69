"""What is installed: Python's packages and CUDA's libraries; names of files tell the versions."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping

METADATA = ".dist-info"
SYSTEM_FOLDERS = ("/usr/local/cuda/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu")
SYSTEM_FOLDERS += ("/usr/lib/aarch64-linux-gnu",)


@functools.cache
def list_packages() -> Mapping[str, str]:
    """Returns the versions of all installed packages, by their names in small letters with dashes.

    `importlib.metadata` would read and parse a file of each.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        for entry in list_folder(folder or os.curdir):
            name, _, version = entry.name.removesuffix(METADATA).partition("-")
            if entry.name.endswith(METADATA):
                # As for an import, the first folder counts.
                found.setdefault(name.replace("_", "-").lower(), version)
    return types.MappingProxyType(found)


def find_libraries(names: Collection[str]) -> dict[str, str]:
    """Returns the files of shared libraries that no package has: their names say the version.

    Args:
        names: of the libraries, as ``libcudnn``.

    Returns:
        The paths of each, empty where there is none.
    """
    found: dict[str, set[str]] = {library: set() for library in names}
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *SYSTEM_FOLDERS]
    for folder in folders:
        for entry in list_folder(folder):
            library, is_shared, _ = entry.name.partition(".so")
            if is_shared and library in found:
                found[library].add(str(pathlib.Path(entry.path).resolve()))
    return {library: " ".join(sorted(paths)) for library, paths in found.items()}


def digest_sources(places: Iterable[str]) -> tuple[str, float]:
    """Returns a digest of files of Python, and the time of the last change of one, since 1970.

    Args:
        places: files, and folders with all that is below them.
    """
    digest, latest = hashlib.sha256(), 0.0
    for place in sorted(places):
        for path in sorted(_list_sources(place)):
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123
                digest.update(file.read())
                # Not the time of modification: installers give a new file that of an older one.
                latest = max(latest, os.fstat(file.fileno()).st_ctime)
    return digest.hexdigest(), latest


def find_installed(name: str) -> list[str]:
    """Returns where an imported package is installed; empty for one that is not, as a user's own.

    Args:
        name: of the module, the topmost of its package.
    """
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    places = [str(each) for each in getattr(module, "__path__", [file] if file else [])]
    parents = {str(pathlib.Path(place).parent) for place in places}
    # An editable package, and a script, are where nothing was installed.
    return places if all(map(_holds_metadata, parents)) else []


def list_folder(folder: str) -> list[os.DirEntry[str]]:
    """Returns what is in a folder, nothing where there is none or it can't be read.

    Not as `pathlib.Path`: to make one for each of a thousand files takes as long as reading them.
    """
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _list_sources(place: str) -> Iterator[str]:
    """Yields a file of Python, or those in a folder and the folders in it."""
    if place.endswith(".py"):
        yield place
        return
    for entry in list_folder(place):
        if entry.is_dir(follow_symlinks=False):
            yield from _list_sources(entry.path)
        elif entry.name.endswith(".py"):
            yield entry.path


def _holds_metadata(folder: str) -> bool:
    return any(entry.name.endswith(METADATA) for entry in list_folder(folder))
