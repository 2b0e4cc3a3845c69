"""The allocator of a device: chosen once, at its first use, by the environment and the user."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tracegraph.runtime.environment import read_alloc_conf, read_no_memory_caching
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.memory.allocator import Allocator
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.caching.direct_allocator import DirectAllocator
from tracegraph.runtime.memory.config import AllocatorConfig
from tracegraph.runtime.memory.providers.pluggable import PluggableAllocator, PluggableProvider
from tracegraph.runtime.memory.providers.provider import EventSource, Provider


@dataclasses.dataclass(frozen=True)
class MemorySource:
    """What a device has to allocate from.

    Attributes:
        device: its index.
        providers: what makes each kind of provider; the first is the device's default. The names
            ``expandable`` and ``async`` serve the options of that kind.
        events: of its streams.
        find_stream: returns the driver's handle of a stream's number.
        read_memory: returns the free and the total bytes of the device.
    """

    device: int
    providers: Mapping[str, Callable[[], Provider]]
    events: EventSource
    find_stream: Callable[[int], int]
    read_memory: Callable[[], tuple[int, int]]


class _Choice:
    """The user's allocator for all devices, and the allocators in use."""

    def __init__(self) -> None:
        self.pluggable: PluggableAllocator | None = None
        self.opened: list[tuple[Allocator, MemorySource]] = []
        self.lock = threading.Lock()


_choice = _Choice()


def change_current_allocator(allocator: PluggableAllocator) -> None:
    """Makes the functions of a library the allocator of every device.

    Args:
        allocator: names the library and its two functions.

    Raises:
        ConfigError: a device has an allocator already, or it is no PluggableAllocator.
    """
    if not isinstance(allocator, PluggableAllocator):
        raise ConfigError(
            f"`allocator` is a {type(allocator).__name__}",
            where="argument `allocator` of change_current_allocator",
            why="an allocator is two functions of a shared library",
            fix="pass tg.memory.PluggableAllocator(path_to_so, alloc_fn_name, free_fn_name)",
            anchor="pluggable-allocator",
        )
    with _choice.lock:
        if _choice.opened:
            raise ConfigError(
                "the allocator is in use and cannot be changed",
                where="change_current_allocator",
                why="memory that one allocator allocated cannot be freed by another",
                fix="call it before the first capture and the first call of tg.memory",
                anchor="pluggable-allocator",
            )
        _choice.pluggable = allocator


def open_allocator(source: MemorySource) -> Allocator:
    """Returns a new allocator of a device, as environment and user want it.

    Raises:
        ConfigError: a setting is wrong, or names a provider that the device does not have.
    """
    with _choice.lock:
        config, pluggable = read_alloc_conf(), _choice.pluggable
        is_direct = read_no_memory_caching()
        provider = _make_provider(source, config, pluggable)
        is_direct = is_direct or pluggable is not None or config.backend == "cudaMallocAsync"
        make = _make_direct if is_direct else CachingAllocator
        allocator = make(provider, config=config, events=source.events, device=source.device)
        _choice.opened.append((allocator, source))
    return allocator


def list_allocators() -> tuple[Allocator, ...]:
    """Returns the allocators that are in use, in the order of their first use."""
    return tuple(allocator for allocator, _ in _choice.opened)


def make_pluggable_provider(
    pluggable: PluggableAllocator, allocator: Allocator
) -> PluggableProvider:
    """Returns a provider of a library's memory, on the device of an allocator that is in use."""
    (source,) = (source for each, source in _choice.opened if each is allocator)
    return pluggable.make_provider(source.device, source.find_stream, source.read_memory)


def find_backend_name(allocator: Allocator) -> str:
    """Returns ``native``, ``cudaMallocAsync`` or ``pluggable``, the words of the CUDA semantics."""
    if _choice.pluggable is not None:
        return "pluggable"
    return allocator.config.backend


def _make_direct(provider: Provider, **options: Any) -> DirectAllocator:
    # With caching turned off there are no statistics either, as in PyTorch.
    counts = not read_no_memory_caching()
    return DirectAllocator(provider, **options, counts=counts, trim=getattr(provider, "trim", None))


def _make_provider(
    source: MemorySource, config: AllocatorConfig, pluggable: PluggableAllocator | None
) -> Provider:
    if pluggable is not None:
        return pluggable.make_provider(source.device, source.find_stream, source.read_memory)
    if config.backend == "cudaMallocAsync":
        return source.providers["async"]()
    if config.expandable_segments:
        return source.providers["expandable"]()
    names = [name for name in source.providers if name not in ("async", "expandable")]
    name = config.provider or names[0]
    if name in names:
        return source.providers[name]()
    raise ConfigError(
        f"`provider` is {name!r}, which device {source.device} does not have",
        where="TRACEGRAPH_ALLOC_CONF in the environment of this process",
        why=f"the providers of this device are {', '.join(names)}",
        fix=f"set provider:{names[0]}, or leave it out",
        anchor="config",
    )
