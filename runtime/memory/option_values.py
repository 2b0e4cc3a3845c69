"""Values of the allocator options: each reader returns None for a text that is not allowed."""

from __future__ import annotations

import re
from collections.abc import Callable

MIB = 1 << 20
GIB = 1 << 30
# Powers of two in MiB that `roundup_power2_divisions` tells apart: 1 MiB to 32 GiB and more.
INTERVALS_MIB = tuple(1 << exponent for exponent in range(16))
MAX_REGISTER_THREADS = 128


def read_choice(*choices: str) -> Callable[[str], str | None]:
    """Returns a reader of one of a few words."""
    return lambda text: text if text in choices else None


def read_flag(text: str) -> bool | None:
    """Returns the flag that ``True`` or ``False`` says, in this spelling only."""
    return {"True": True, "False": False}.get(text)


def read_count(text: str) -> int | None:
    """Returns a whole number of at most nine digits."""
    # Nine digits are a thousand TiB of MiB: more is a typo.
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def read_mib(
    least: int = 0, most: int | None = None, multiple: int = 1
) -> Callable[[str], int | None]:
    """Returns a reader of whole MiB, in bytes."""

    def read(text: str) -> int | None:
        count = read_count(text)
        if count is None or count < least or count % multiple:
            return None
        return None if most is not None and count > most else count * MIB

    return read


def read_number(text: str) -> float | None:
    """Returns a number that is not negative, as 0.8 or 5e-1."""
    return float(text) if re.fullmatch(r"[0-9]*\.?[0-9]+([eE]-?[0-9]{1,3})?", text) else None


def read_share(text: str) -> float | None:
    """Returns a number from 0 to 1."""
    number = read_number(text)
    return number if number is not None and 0 <= number <= 1 else None


def read_open_share(text: str) -> float | None:
    """Returns a number above 0 and below 1."""
    number = read_number(text)
    return number if number is not None and 0 < number < 1 else None


def read_reserve(text: str) -> float | int | None:
    """Returns a share of the device (float), or the bytes of whole GiB written as 40G (int)."""
    if text.endswith("G"):
        gib = read_count(text[:-1])
        return gib * GIB if gib else None
    number = read_number(text)
    return number if number is not None and 0 < number <= 9 / 8 else None


def _is_power_of_two(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0


def read_threads(text: str) -> int | None:
    """Returns a power of two, at most MAX_REGISTER_THREADS."""
    count = read_count(text)
    if count is None or count > MAX_REGISTER_THREADS:
        return None
    return count if _is_power_of_two(count) else None


def read_divisions(text: str) -> tuple[tuple[int, int], ...] | None:
    """Returns a pair (power of two of MiB, divisions) for each of INTERVALS_MIB."""
    if not text.startswith("["):
        count = read_count(text)
        if count is None or not _is_power_of_two(count):
            return None
        return tuple((interval, count) for interval in INTERVALS_MIB)
    if not text.endswith("]"):
        return None
    return _read_division_list(text[1:-1].split(","))


def _read_division_list(pairs: list[str]) -> tuple[tuple[int, int], ...] | None:
    divisions = dict.fromkeys(INTERVALS_MIB, 0)
    last = 0
    for index, pair in enumerate(pairs):
        start, _, text = (part.strip() for part in pair.partition(":"))
        count = read_count(text)
        # Zero says that the sizes of an interval are not rounded.
        if count is None or (count and not _is_power_of_two(count)):
            return None
        if start == ">":
            divisions.update({each: count for each in INTERVALS_MIB if each > last})
            continue
        last = read_count(start) or 0
        if last not in divisions:
            return None
        # The first pair holds for everything below it too.
        first = INTERVALS_MIB[0] if index == 0 else last
        divisions.update({each: count for each in INTERVALS_MIB if first <= each <= last})
    return tuple(divisions.items())
