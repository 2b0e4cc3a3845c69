"""The kernels of `lowering/kernels/`, in Python, on host memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from tracegraph.lowering.planning.memory_plan import ALIGNMENT

Kernel = Callable[[tuple[bytes, ...]], None]
WORD_BYTES = (16, 8, 4, 1)


def make_kernels(values: dict[int, int]) -> dict[str, Kernel]:
    """Returns the kernels by symbol.

    Args:
        values: those of the handles of conditional nodes, which kernels set.
    """
    setters = (set_flag, set_index, start_turns, count_turn)
    kernels: dict[str, Kernel] = {
        setter.__name__: functools.partial(setter, values) for setter in setters
    }
    kernels |= {f"copy_slice_{size}": functools.partial(copy_slice, size) for size in WORD_BYTES}
    kernels |= {
        f"set_branch_{size}": functools.partial(set_branch, size, values) for size in (1, 4)
    }
    return kernels | {
        f"count_ahead_{size}": functools.partial(count_ahead, size) for size in (4, 8)
    }


def set_flag(values: dict[int, int], parameters: tuple[bytes, ...]) -> None:
    handle, address = map(_read_number, parameters)
    values[handle] = int(ctypes.string_at(address, 1) != b"\0")


def set_index(values: dict[int, int], parameters: tuple[bytes, ...]) -> None:
    handle, address, count = map(_read_number, parameters)
    index = ctypes.c_int32.from_address(address).value
    values[handle] = index if 0 <= index < count else count - 1


def set_branch(nbytes: int, values: dict[int, int], parameters: tuple[bytes, ...]) -> None:
    handle, address, place, count = map(_read_number, parameters)
    number = int.from_bytes(ctypes.string_at(address, nbytes), "little")
    values[handle] = int((int(not number) if nbytes == 1 else min(number, count - 1)) == place)


def start_turns(values: dict[int, int], parameters: tuple[bytes, ...]) -> None:
    handle, address = map(_read_number, parameters)
    ctypes.c_uint32.from_address(address).value = 0
    values[handle] = 1


def count_turn(values: dict[int, int], parameters: tuple[bytes, ...]) -> None:
    handle, address, turns = map(_read_number, parameters)
    counter = ctypes.c_uint32.from_address(address)
    counter.value += 1
    values[handle] = int(counter.value < turns)


def copy_slice(word_bytes: int, parameters: tuple[bytes, ...]) -> None:
    source, target, counter, words = map(_read_number, parameters[:4])
    turn = ctypes.c_uint32.from_address(counter).value
    places = [int.from_bytes(each, "little", signed=True) for each in parameters[4:]]
    offsets = [
        min(max(first + turn * step, 0), last) for first, step, last in (places[:3], places[3:])
    ]
    for address in (source + offsets[0], target + offsets[1]):
        assert address % word_bytes == 0, f"{address:#x} is no multiple of {word_bytes}"
    ctypes.memmove(target + offsets[1], source + offsets[0], words * word_bytes)


def count_ahead(nbytes: int, parameters: tuple[bytes, ...]) -> None:
    source, values, first, step, count = map(_read_number, parameters)
    start = int.from_bytes(ctypes.string_at(source, nbytes), "little") + first
    for index in range(count):
        number = (start + index * step) % (1 << 8 * nbytes)
        ctypes.memmove(values + index * ALIGNMENT, number.to_bytes(nbytes, "little"), nbytes)


def _read_number(parameter: bytes) -> int:
    return int.from_bytes(parameter, "little")
