"""Which words of a library's kernels are addresses of which buffers.

Note [Moved libraries]
A library is called once, while a stream captures, and its kernels keep the addresses of that call.
To give a buffer another address later, one must know where in their parameters it stands, which no
library says. So it is called a second time, on addresses that are a different distance further for
each buffer: a word of eight bytes that has grown by such a distance is a pointer into that buffer.
If anything else differs, or a word by another amount, nothing of that call is moved; nor is a
buffer whose address stands nowhere. The driver lets an executable graph change the nodes inside of
a child graph. Handlers of `jax.ffi` and batched calls of cuBLAS are left out: they may keep
addresses in memory, which no parameter shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tracegraph.runtime.cuda.driver.calls import FillRange, KernelLaunch
from tracegraph.runtime.cuda.driver.captured_nodes import CapturedNode

WORD_BYTES = 8
# The same alignment as before, and still addresses that a GPU could have.
DISTANCE_BYTES = 1 << 34


@dataclasses.dataclass(frozen=True)
class Move:
    """A place where the address of a buffer stands.

    Attributes:
        node: of the library's graph.
        buffer: name of the buffer.
        parameter: index of the kernel's parameter; None for the target of a memset.
        word: which eight bytes of the parameter.
        offset: of what stands there from the buffer's first byte.
    """

    node: CapturedNode
    buffer: str
    parameter: int | None
    word: int
    offset: int


def find_moves(
    first: Sequence[CapturedNode],
    second: Sequence[CapturedNode],
    starts: Mapping[str, int],
    distances: Mapping[str, int],
) -> Mapping[str, tuple[Move, ...]]:
    """Returns, by buffer, where addresses stand in a library's graph, see Note [Moved libraries].

    Args:
        first: the nodes of the graph.
        second: those of the same call on other addresses.
        starts: address of each buffer's first byte, for the first call.
        distances: how much further each buffer was for the second; no two are the same.
    """
    names = {distance: name for name, distance in distances.items()}
    found: list[Move] = []
    if len(first) != len(second):
        return {}
    for one, other in zip(first, second, strict=True):
        moves = _compare(one, other, starts, names)
        if moves is None:
            return {}
        found += moves
    grouped = {name: tuple(m for m in found if m.buffer == name) for name in distances}
    return {name: moves for name, moves in grouped.items() if moves}


def _compare(
    one: CapturedNode, other: CapturedNode, starts: Mapping[str, int], names: Mapping[int, str]
) -> list[Move] | None:
    """Returns the moves of one node; None where something else differs, or is not known."""
    before, after = one.action, other.action
    if isinstance(before, KernelLaunch) and isinstance(after, KernelLaunch):
        return _compare_launches(one, before, after, starts, names)
    if isinstance(before, FillRange) and isinstance(after, FillRange):
        if dataclasses.replace(after, target_address=before.target_address) != before:
            return None
        was, now = before.target_address, after.target_address
        return _name_word(one, None, 0, was, now, starts, names)
    return None


def _compare_launches(
    node: CapturedNode,
    before: KernelLaunch,
    after: KernelLaunch,
    starts: Mapping[str, int],
    names: Mapping[int, str],
) -> list[Move] | None:
    if (before.function, before.shape) != (after.function, after.shape):
        return None
    found: list[Move] = []
    for index, pair in enumerate(zip(before.parameters, after.parameters, strict=True)):
        old, new = pair
        whole = len(old) // WORD_BYTES * WORD_BYTES
        if old[whole:] != new[whole:]:
            return None
        for place in range(0, whole, WORD_BYTES):
            was, now = (int.from_bytes(each[place : place + WORD_BYTES], "little") for each in pair)
            moves = _name_word(node, index, place // WORD_BYTES, was, now, starts, names)
            if moves is None:
                return None
            found += moves
    return found


def _name_word(
    node: CapturedNode,
    parameter: int | None,
    word: int,
    was: int,
    now: int,
    starts: Mapping[str, int],
    names: Mapping[int, str],
) -> list[Move] | None:
    """Returns the move that a word stands for: none if it is the same, None if it is unknown."""
    if was == now:
        return []
    name = names.get(now - was)
    return None if name is None else [Move(node, name, parameter, word, was - starts[name])]
