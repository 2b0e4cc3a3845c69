"""Options of the allocators: one table, and the parser of its text.

The text is that of the CUDA semantics: ``option:value,option:value``. A settings call replaces all
settings; of an option that is given twice the last one counts. Sizes in the text are in MiB.

| Option | Values (default first) | Meaning |
|---|---|---|
| ``backend`` | native, cudaMallocAsync | which caches: this package, or the driver's own pool |
| ``provider`` | not set, jax, cuda, host | where segments come from; not set: as the device does |
| ``max_split_size_mb`` | no limit, 20 or more | larger blocks are never split |
| ``max_non_split_rounding_mb`` | 20 or more | waste allowed where such a block is served |
| ``garbage_collection_threshold`` | off, between 0 and 1 | share above which old blocks are freed |
| ``roundup_power2_divisions`` | off, N, ``[M:N,...,>:N]`` | steps between powers of two |
| ``large_segment_size_mb`` | 20, even, 10 to 1024 | segment of requests under 10 MiB |
| ``expandable_segments`` | False, True | memory is mapped page by page, not with provider:jax |
| ``expandable_segments_reserve`` | 1.125, share, ``40G`` | address range of such a segment |
| ``release_lock_on_cudamalloc`` | False, True | other threads allocate meanwhile |
| ``graph_capture_record_stream_reuse`` | False, True | reuse inside a capture, after a join |
| ``per_process_memory_fraction`` | 1.0, 0 to 1 | most of the device that may be reserved |
| ``throw_on_cudamalloc_oom`` | False, True | refuse before the driver is asked |
| ``pinned_use_cuda_host_register`` | False, True | page-lock ordinary memory |
| ``pinned_num_register_threads`` | 1, power of two to 128 | threads that touch its pages |
| ``pinned_use_background_threads`` | False, True | a thread polls the events |
| ``pinned_reserve_segment_size_mb`` | 0 or more | page-locked once, and served from first |
| ``pinned_max_round_threshold_mb`` | no limit, 0 or more | above it sizes are exact |
| ``pinned_max_cached_size_mb`` | no limit, 0 or more | above it freed memory is not cached |

The pinned ones apply to page-locked host memory. Of the others ``backend:cudaMallocAsync`` heeds
none, and warns if there are any; the rest apply to every provider.

Two options of the CUDA semantics have nothing to act on here and are refused with the reason:
``expandable_segments_reserve_by_class`` (streams have no classes) and ``pinned_free_catch_all`` (no
finaliser of ours raises).
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any

from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.memory.option_values import (
    INTERVALS_MIB,
    MIB,
    read_choice,
    read_divisions,
    read_flag,
    read_mib,
    read_open_share,
    read_reserve,
    read_share,
    read_threads,
)

MIN_SPLIT_LIMIT_MIB = 20
MIN_LARGE_SEGMENT_MIB, MAX_LARGE_SEGMENT_MIB = 10, 1024

_NATIVE_ONLY = (
    "provider",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "large_segment_size_mb",
    "expandable_segments",
    "expandable_segments_reserve",
    "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse",
    "per_process_memory_fraction",
    "throw_on_cudamalloc_oom",
)
_MEANINGLESS = {
    "expandable_segments_reserve_by_class": "streams have no classes here",
    "pinned_free_catch_all": "no finaliser of pinned memory raises here",
}


@dataclasses.dataclass(frozen=True)
class AllocatorConfig:
    """Settings of the allocators of a process.

    More than six fields because it is the table of options, one field each.

    Attributes:
        backend: ``native`` or ``cudaMallocAsync``.
        provider: ``jax``, ``cuda`` or ``host``; empty for the device's own.
        max_split_bytes: blocks of this size and more are never split; None for no limit.
        max_non_split_rounding_bytes: how much larger than the request such a block may be.
        garbage_collection_threshold: share of the allowed bytes above which old free blocks are
            released; 0.0 for never.
        roundup_power2_divisions: pairs (power of two in MiB, divisions), see `find_divisions`.
        large_segment_bytes: segment that serves requests above 1 MiB and under 10 MiB.
        expandable_segments: segments are address ranges, mapped page by page.
        expandable_segments_reserve: address range of one: a share of the device (float) or bytes
            (int); None for 9/8 of the device.
        release_lock_on_cudamalloc: the lock is free while the provider works.
        graph_capture_record_stream_reuse: blocks that were used on several streams are served again
            inside a capture once these have joined.
        per_process_memory_fraction: most of the device that may be reserved.
        throw_on_cudamalloc_oom: a request beyond that share fails at once.
        pinned_use_cuda_host_register: page-lock ordinary memory, instead of
            asking the driver for locked memory.
        pinned_num_register_threads: threads that touch its pages first.
        pinned_use_background_threads: a thread polls the events of freed pinned blocks.
        pinned_reserve_segment_bytes: page-locked at the first request, and served from first.
        pinned_max_round_bytes: larger pinned requests are not rounded to powers of two.
        pinned_max_cached_bytes: larger pinned blocks are released when they are freed.
        text: what it was parsed from.

    Example:
        >>> config = AllocatorConfig()
        >>> config.max_split_bytes, config.max_non_split_rounding_bytes, config.provider
        (None, 20971520, '')
    """

    backend: str = "native"
    provider: str = ""
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[tuple[int, int], ...] = ()
    large_segment_bytes: int = 20 * MIB
    expandable_segments: bool = False
    expandable_segments_reserve: float | int | None = None
    release_lock_on_cudamalloc: bool = False
    graph_capture_record_stream_reuse: bool = False
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    pinned_use_cuda_host_register: bool = False
    pinned_num_register_threads: int = 1
    pinned_use_background_threads: bool = False
    pinned_reserve_segment_bytes: int = 0
    pinned_max_round_bytes: int | None = None
    pinned_max_cached_bytes: int | None = None
    text: str = dataclasses.field(default="", compare=False)

    def find_divisions(self, nbytes: int) -> int:
        """Returns in how many steps the powers of two around a size are divided; 0 for none.

        A pair (M, N) holds for sizes from M MiB to twice that; sizes under 1 MiB are served by the
        first pair, sizes of 64 GiB and more by the last.

        Example:
            >>> config = parse_alloc_conf("roundup_power2_divisions:[64:8,128:2,>:1]")
            >>> [config.find_divisions(size << 20) for size in (1, 84, 200, 400)]
            [8, 8, 2, 1]
        """
        if not self.roundup_power2_divisions:
            return 0
        exponent = max((nbytes >> 20).bit_length() - 1, 0)
        interval = INTERVALS_MIB[min(exponent, len(INTERVALS_MIB) - 1)]
        return dict(self.roundup_power2_divisions).get(interval, 0)

    def find_address_bytes(self, total_bytes: int) -> int:
        """Returns the address range that an expandable segment takes.

        Args:
            total_bytes: memory of the device; 9/8 of it is the most and the default.

        Example:
            >>> parse_alloc_conf("expandable_segments_reserve:0.5").find_address_bytes(1 << 30)
            536870912
        """
        most = total_bytes * 9 // 8
        reserve = self.expandable_segments_reserve
        if reserve is None:
            return most
        wanted = int(reserve * total_bytes) if isinstance(reserve, float) else reserve
        return min(wanted, most)


@dataclasses.dataclass(frozen=True)
class _Option:
    """How the value of an option is read; ``read`` returns None for what is not ``allowed``."""

    field: str
    read: Callable[[str], Any]
    allowed: str


def parse_alloc_conf(text: str, *, source: str = "the allocator settings") -> AllocatorConfig:
    """Returns the settings that a text describes; what it leaves out has its default.

    Args:
        text: as ``max_split_size_mb:512,expandable_segments:True``; empty for the defaults.
        source: where the text comes from, for errors.

    Raises:
        ConfigError: an option is unknown or has a value that is not allowed.

    Example:
        >>> parse_alloc_conf("max_split_size_mb:512").max_split_bytes
        536870912
    """
    values: dict[str, Any] = {}
    given: list[str] = []
    # A comma inside brackets separates the pairs of a list, not two options.
    for entry in re.split(r",(?![^\[\]]*\])", text) if text.strip() else ():
        name, _, value = (part.strip() for part in entry.partition(":"))
        option = _find_option(name, entry.strip(), source)
        parsed = option.read(value)
        if parsed is None:
            raise _make_value_error(name, value, option.allowed, source)
        values[option.field] = parsed
        given.append(name)
    config = AllocatorConfig(**values, text=text)
    _check_together(config, given, source)
    return config


def _find_option(name: str, entry: str, source: str) -> _Option:
    if name in OPTIONS:
        return OPTIONS[name]
    if name in _MEANINGLESS:
        raise ConfigError(
            f"allocator option `{name}` does not apply",
            where=f"{source}, entry {entry!r}",
            why=_MEANINGLESS[name],
            fix=f"leave `{name}` out",
            anchor="config",
        )
    raise ConfigError(
        f"there is no allocator option `{name}`",
        where=f"{source}, entry {entry!r}",
        why=f"the options are {', '.join(OPTIONS)}",
        fix="write option:value, separated by commas, or leave this one out",
        anchor="config",
    )


def _make_value_error(name: str, value: str, allowed: str, source: str) -> ConfigError:
    return ConfigError(
        f"allocator option `{name}` has the value {value!r}",
        where=source,
        why=f"allowed: {allowed}",
        fix=f"write {name}: followed by an allowed value, or leave it out",
        anchor="config",
    )


def _check_together(config: AllocatorConfig, given: list[str], source: str) -> None:
    if config.expandable_segments and config.provider == "jax":
        raise _make_value_error(
            "expandable_segments",
            "True",
            "False beside provider:jax, whose arrays cannot grow, or another provider",
            source,
        )
    if config.backend == "native":
        return
    if config.provider not in ("", "cuda"):
        raise _make_value_error(
            "provider",
            config.provider,
            "cuda, or none, beside backend:cudaMallocAsync, which is the driver's own pool",
            source,
        )
    ignored = [name for name in given if name in _NATIVE_ONLY and name != "provider"]
    if ignored:
        warnings.warn(
            f"backend:cudaMallocAsync ignores {', '.join(ignored)}: the driver's pool caches",
            UserWarning,
            stacklevel=3,
        )


_FLAG = "True, False"
OPTIONS = {
    "backend": _Option(
        "backend", read_choice("native", "cudaMallocAsync"), "native, cudaMallocAsync"
    ),
    "provider": _Option("provider", read_choice("jax", "cuda", "host"), "jax, cuda, host"),
    "max_split_size_mb": _Option(
        "max_split_bytes", read_mib(MIN_SPLIT_LIMIT_MIB), "whole MiB, 20 or more"
    ),
    "max_non_split_rounding_mb": _Option(
        "max_non_split_rounding_bytes", read_mib(MIN_SPLIT_LIMIT_MIB), "whole MiB, 20 or more"
    ),
    "garbage_collection_threshold": _Option(
        "garbage_collection_threshold", read_open_share, "a number above 0 and below 1"
    ),
    "roundup_power2_divisions": _Option(
        "roundup_power2_divisions",
        read_divisions,
        "a power of two, or a list as [64:8,128:2,>:1] of a power of two of MiB (1 to 32768) and "
        "its divisions (a power of two, or 0)",
    ),
    "large_segment_size_mb": _Option(
        "large_segment_bytes",
        read_mib(MIN_LARGE_SEGMENT_MIB, MAX_LARGE_SEGMENT_MIB, 2),
        "an even number of MiB, 10 to 1024",
    ),
    "expandable_segments": _Option("expandable_segments", read_flag, _FLAG),
    "expandable_segments_reserve": _Option(
        "expandable_segments_reserve",
        read_reserve,
        "a share of the device above 0, at most 1.125, or whole GiB as 40G",
    ),
    "release_lock_on_cudamalloc": _Option("release_lock_on_cudamalloc", read_flag, _FLAG),
    "graph_capture_record_stream_reuse": _Option(
        "graph_capture_record_stream_reuse", read_flag, _FLAG
    ),
    "per_process_memory_fraction": _Option(
        "per_process_memory_fraction", read_share, "a number from 0 to 1"
    ),
    "throw_on_cudamalloc_oom": _Option("throw_on_cudamalloc_oom", read_flag, _FLAG),
    "pinned_use_cuda_host_register": _Option("pinned_use_cuda_host_register", read_flag, _FLAG),
    "pinned_num_register_threads": _Option(
        "pinned_num_register_threads", read_threads, "a power of two from 1 to 128"
    ),
    "pinned_use_background_threads": _Option("pinned_use_background_threads", read_flag, _FLAG),
    "pinned_reserve_segment_size_mb": _Option(
        "pinned_reserve_segment_bytes", read_mib(), "whole MiB, 0 or more"
    ),
    "pinned_max_round_threshold_mb": _Option(
        "pinned_max_round_bytes", read_mib(), "whole MiB, 0 or more"
    ),
    "pinned_max_cached_size_mb": _Option(
        "pinned_max_cached_bytes", read_mib(), "whole MiB, 0 or more"
    ),
}
