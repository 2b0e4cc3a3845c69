"""The table of `memory_summary`: the rows and columns of PyTorch's, from the same statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

_Format: TypeAlias = Callable[[int, int], str]

WIDTH = 75
FIELDS = ("current", "peak", "allocated", "freed")
_BYTE_UNITS = ("B  ", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_UNITS = (" ", "K", "M")
_HEADINGS = ("Cur Usage", "Peak Usage", "Tot Alloc", "Tot Freed")
_POOLS = (("large_pool", "      from large pool"), ("small_pool", "      from small pool"))


def format_summary(
    stats: Mapping[str, int], *, device: int = 0, is_abbreviated: bool = False
) -> str:
    """Returns the statistics of an allocator as a table.

    Args:
        stats: by PyTorch's keys, as ``allocated_bytes.all.current``. A row without statistics shows
            zeros.
        device: index of the device, for the title.
        is_abbreviated: leaves out the rows of the large and the small pool.

    Example:
        >>> stats = {"allocated_bytes.all.current": 3 << 20, "num_ooms": 2}
        >>> text = format_summary(stats, is_abbreviated=True)
        >>> print(text.splitlines()[7])
        | Allocated memory      |   3072 KiB |      0 B   |      0 B   |      0 B   |
    """
    ooms = f"OOMs: {stats.get('num_ooms', 0)}"
    retries = f"allocation retries: {stats.get('num_alloc_retries', 0)}"
    heading = "".join(f"|{each:^12}" for each in _HEADINGS)
    half = WIDTH // 2
    lines = [
        "=" * WIDTH,
        f"tracegraph memory summary, device ID {device}".center(WIDTH),
        "-" * WIDTH,
        f"{ooms:^{half}}|{retries:^{half}}",
        "=" * WIDTH,
        f"{'Metric':^23}{heading}",
        *_format_rows(stats, () if is_abbreviated else _POOLS),
        "=" * WIDTH,
    ]
    return "".join(f"|{line}|\n" for line in lines)


def _format_rows(stats: Mapping[str, int], pools: tuple[tuple[str, str], ...]) -> Iterator[str]:
    for metric, title, format_value in _METRICS:
        yield "-" * WIDTH
        whole = _read_fields(stats, f"{metric}.all")
        yield _format_row(title, whole, whole, format_value)
        for pool, name in pools:
            # In the unit of the row above, so that the rows add up before the reader's eyes.
            yield _format_row(name, _read_fields(stats, f"{metric}.{pool}"), whole, format_value)
    for metric, title, format_value in _OVERSIZE:
        yield "-" * WIDTH
        whole = _read_fields(stats, metric)
        yield _format_row(title, whole, whole, format_value)


def _read_fields(stats: Mapping[str, int], prefix: str) -> tuple[int, ...]:
    return tuple(stats.get(f"{prefix}.{field}", 0) for field in FIELDS)


def _format_row(
    title: str, values: tuple[int, ...], scale: tuple[int, ...], format_value: _Format
) -> str:
    cells = "".join(
        f"| {format_value(value, whole)} " for value, whole in zip(values, scale, strict=True)
    )
    return f" {title:<22}{cells}"


def format_size(nbytes: int, scale: int) -> str:
    """Returns bytes in the unit that fits ``scale`` bytes, ten letters wide, rounded down.

    Example:
        >>> format_size(5 << 20, 1 << 30)
        '     5 MiB'
    """
    power = 0
    while scale >= 768 * 1024 and power < len(_BYTE_UNITS) - 1:
        scale, power = scale // 1024, power + 1
    return f"{nbytes >> (10 * power):6d} {_BYTE_UNITS[power]}"


def format_count(count: int, scale: int) -> str:
    """Returns a count in the unit that fits ``scale``, ten letters wide, rounded down.

    Example:
        >>> format_count(2_000_000, 2_000_000)
        '   2000 K '
    """
    power = 0
    while scale >= 750 * 1000 and power < len(_COUNT_UNITS) - 1:
        scale, power = scale // 1000, power + 1
    return f"{count // 1000**power:7d} {_COUNT_UNITS[power]} "


_METRICS: tuple[tuple[str, str, _Format], ...] = (
    ("allocated_bytes", "Allocated memory", format_size),
    ("active_bytes", "Active memory", format_size),
    ("requested_bytes", "Requested memory", format_size),
    ("reserved_bytes", "GPU reserved memory", format_size),
    ("inactive_split_bytes", "Non-releasable memory", format_size),
    ("allocation", "Allocations", format_count),
    ("active", "Active allocs", format_count),
    ("segment", "GPU reserved segments", format_count),
    ("inactive_split", "Non-releasable allocs", format_count),
)
_OVERSIZE: tuple[tuple[str, str, _Format], ...] = (
    ("oversize_allocations", "Oversize allocations", format_count),
    ("oversize_segments", "Oversize GPU segments", format_count),
)
