"""Memory of a device that users allocate by its address."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

from tracegraph.runtime.default_device import find_any_device
from tracegraph.runtime.errors import ConfigError, TracegraphError
from tracegraph.runtime.memory.allocator import Allocator
from tracegraph.runtime.memory.caching.block import Block
from tracegraph.runtime.streams.stream import Stream, current_stream

# The blocks of `caching_allocator_alloc` that are not deleted yet, by address.
_blocks: dict[int, tuple[Allocator, Block]] = {}


def caching_allocator_alloc(
    size: SupportsIndex, device: Any = None, stream: Stream | None = None
) -> int:
    """Allocates memory of a device; its contents are undefined.

    Args:
        size: bytes, at least 0; the allocator rounds up.
        device: a JAX device, the index of one, or None for the device that captures use.
        stream: the stream that will use the memory; None for the current one. Work on another
            stream has to wait for it.

    Returns:
        The address of the first byte.

    Raises:
        ConfigError: ``size`` is not an integer, or ``stream`` is not a tg.Stream.
        OutOfMemoryError: the device does not have enough memory.
        TracegraphError: ``size`` is negative.

    Example:
        >>> address = tg.memory.caching_allocator_alloc(1024)
        >>> tg.memory.caching_allocator_delete(address)
    """
    call = "caching_allocator_alloc"
    nbytes = _read_index("size", size, call, "pass a number of bytes, as 4 * 1024")
    if stream is not None and not isinstance(stream, Stream):
        why = "memory is used on a stream of tracegraph"
        raise _make_argument_error("stream", stream, call, why, "pass a tg.Stream, or leave it out")
    found = find_any_device(device)
    number = found.number_stream(stream if stream is not None else current_stream())
    block = found.allocator.allocate(nbytes, number)
    _blocks[block.address] = found.allocator, block
    return block.address


def caching_allocator_delete(mem_ptr: SupportsIndex) -> None:
    """Frees memory that `caching_allocator_alloc` returned.

    Args:
        mem_ptr: its address.

    Raises:
        ConfigError: ``mem_ptr`` is not an integer.
        TracegraphError: `caching_allocator_alloc` did not return it, or it was deleted before.

    Example:
        >>> address = tg.memory.caching_allocator_alloc(1024)
        >>> tg.memory.caching_allocator_delete(address)
    """
    call = "caching_allocator_delete"
    address = _read_index("mem_ptr", mem_ptr, call, "pass what caching_allocator_alloc returned")
    # Removed before it is freed: from then on the address may belong to another block.
    owner, block = _blocks.pop(address, (None, None))
    if owner is None or block is None:
        raise TracegraphError(
            f"nothing that caching_allocator_alloc returned is at {address:#x}",
            where=f"argument `mem_ptr` of tg.memory.{call}",
            why="it was deleted before, is the memory of a graph, or was not allocated here",
            fix="pass the address that caching_allocator_alloc returned, once",
            anchor="pool",
        )
    owner.free(block)


def _read_index(name: str, value: Any, call: str, fix: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise _make_argument_error(name, value, call, "it must be an integer", fix) from None


def _make_argument_error(name: str, value: Any, call: str, why: str, fix: str) -> ConfigError:
    return ConfigError(
        f"`{name}` is {value!r}",
        where=f"argument `{name}` of tg.memory.{call}",
        why=why,
        fix=fix,
        anchor="config",
    )
