"""`load`: from a file that `save` wrote to a callable."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from tracegraph.buckets.saved_buckets import LoadedBucketedFunction, decode_buckets
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.constraints.frames import hides_own_frames, locate_caller
from tracegraph.lowering.collector import hold_collector
from tracegraph.options import raise_option_error, read_pool
from tracegraph.runtime.default_device import find_device
from tracegraph.runtime.environment import read_check_replay
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.saving.saved_file import read_file
from tracegraph.saving.loaded_function import LoadedFunction
from tracegraph.saving.loaded_graphs import load_parts
from tracegraph.saving.plain_values import Names
from tracegraph.saving.saved_function import open_function
from tracegraph.saving.saved_target import check_origin
from tracegraph.user_memory.mem_pool import MemPool


@hides_own_frames
@hold_collector
def load(
    path: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    pool: PoolId | MemPool | None = None,
    constants: Iterable[Any] | Mapping[str, Any] | None = None,
    nodes: Iterable[Any] = (),
) -> LoadedFunction:
    """Returns the captured function that `save` wrote to a file, ready to be replayed.

    Nothing is traced and nothing is compiled, and no source is needed. A file holds machine code
    that runs with all rights of this process: load only files that you would run, or pin them by
    ``sha256``.

    Args:
        path: of the file.
        sha256: of the whole file, in hexadecimal digits; another file is refused.
        pool: a private pool to share, as of `tg.capture`; None for one of its own.
        constants: closed-over arrays, instead of those in the file: a mapping from the variables
            that held them to arrays or trees of arrays, or a list in the order of the file.
        nodes: classes and functions that its trees and static values have, if this process knows
            them by another name than the one that saved it, or not yet.

    Returns:
        A function that is called as the captured one.

    Raises:
        SavedFileError: the file cannot be read, is damaged, is for another machine or version, or
            needs what is not here.
        ConfigError: an option has a value that is not allowed.
        OutOfMemoryError: the pool cannot hold its graphs.

    Example:
        >>> double = tg.capture(lambda x: x * 2)
        >>> _ = double(jnp.ones(3))
        >>> double.save(path.with_suffix(".tg"))
        >>> print(tg.load(path.with_suffix(".tg"))(jnp.arange(3.0)))
        [0. 2. 4.]
    """
    place = locate_caller()
    _check_given(place, sha256, constants)
    names = _read_nodes(place, nodes)
    file = read_file(path, sha256=sha256)
    opened = open_function(file)
    device = find_device(is_checking=read_check_replay())
    check_origin(opened.origin, device.target, opened.source)
    parts = load_parts(opened, device, names, constants)
    memory = FunctionPool(read_pool(pool, place, "tg.load"))
    if opened.extra is None:
        return LoadedFunction(parts, device, memory)
    return LoadedBucketedFunction(parts, device, memory, decode_buckets(opened.extra, parts))


def _check_given(place: str, sha256: Any, constants: Any) -> None:
    if sha256 is not None and not isinstance(sha256, str):
        why = "it is a text of hexadecimal digits"
        raise_option_error(f"sha256={sha256!r} is not allowed", place, why, "tg.load")
    if isinstance(constants, str) or not isinstance(constants, Iterable | None):
        why = "it is a list of arrays, or a mapping from names to arrays"
        raise_option_error(f"constants={constants!r} is not allowed", place, why, "tg.load")


def _read_nodes(place: str, nodes: Any) -> Names:
    """Returns the names of classes and functions; what has no name is refused."""
    given = list(nodes) if isinstance(nodes, Iterable) else [nodes]
    if not all(isinstance(getattr(each, "__qualname__", None), str) for each in given):
        why = "it is a list of classes and functions"
        raise_option_error(f"nodes={nodes!r} is not allowed", place, why, "tg.load")
    return Names(given)
