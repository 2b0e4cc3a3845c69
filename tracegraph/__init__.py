"""CUDA graphs for JAX: capture a function once, replay it with one launch."""

from __future__ import annotations

import pathlib

_package = pathlib.Path(__file__).resolve().parent
_house = _package.parent
if not (_package / "runtime").is_dir() and (_house / "runtime").is_dir():
    # In a checkout `lowering/` and `runtime/` stand beside this folder; in a wheel they are in it.
    __path__.append(str(_house))
