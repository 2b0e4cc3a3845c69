"""Where tracegraph's own files are, to tell them from a user's."""

from __future__ import annotations

import os
import pathlib


def _list_own_folders() -> tuple[str, ...]:
    runtime = pathlib.Path(__file__).resolve().parent
    house = runtime.parent
    if (house / "__init__.py").is_file():
        # In a wheel the other two layers are inside of `tracegraph`, as `runtime` is.
        folders = [house]
    else:
        folders = [house / "tracegraph", house / "lowering", runtime]
    return tuple(f"{folder}{os.sep}" for folder in folders)


# Each ends with a separator: a file is ours if its path starts with one of them.
OWN_FOLDERS = _list_own_folders()
