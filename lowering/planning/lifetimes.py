"""Lifetimes: the steps during which the bytes of a buffer must not be touched by another.

Note [Lifetimes and streams]
Steps of different streams run side by side, so step indices alone do not say which comes first. A
lifetime is therefore extended at its end: it lasts until the greatest step that is *not* ordered
after all uses of the buffer. Every later step waits for all of them. If the lifetimes of ``a`` and
``b`` are disjoint and ``b`` starts later, every step that touches ``b`` lies after the end of
``a``, hence waits for every use of ``a``: the two may share bytes. Extending the start as well
would be correct, but would waste memory.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from tracegraph.lowering.device_program import DeviceProgram
from tracegraph.lowering.planning.lent_inputs import find_lent
from tracegraph.lowering.planning.step_order import find_ancestors, is_chain
from tracegraph.runtime.errors import InternalError


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """A buffer's size, and the first and last step (inclusive) at which it holds a value.

    Attributes:
        name: of the buffer.
        nbytes: its size.
        first: step at which it gets its value.
        last: step after which no step needs the value.
        is_kept: True when the value outlives a replay, or is there before it.
        is_lent: True for an input without memory of its own, see Note [Lent inputs].
        is_host: True for what is in host memory, see Note [Host memory].

    More than six fields because it is all that the plan knows of a buffer.
    """

    name: str
    nbytes: int
    first: int
    last: int
    is_kept: bool = False
    is_lent: bool = False
    is_host: bool = False

    @property
    def is_outside(self) -> bool:
        """True for what has no bytes in the arena."""
        return self.is_lent or self.is_host


def find_lifetimes(program: DeviceProgram) -> tuple[Lifetime, ...]:
    """Returns the lifetime of every buffer of a program, in the order of ``program.buffers``.

    Static inputs (copied, donated and constant) and constants of compiled programs live during all
    steps, outputs from their first write to the last step; they are kept between replays,
    unless their spec says otherwise. All others are temporaries, which live from their first write
    to their last use.

    Args:
        program: the steps in program order and the order that streams declare.

    Raises:
        InternalError: a step touches a buffer that the program does not list, or a buffer that is
            no input is never written or is read before it is written.
    """
    uses, first_writes = _collect_uses(program)
    inputs, lent = {spec.buffer.name for spec in program.inputs}, find_lent(program)
    outputs = {spec.buffer.name for spec in program.outputs}
    passing = {spec.buffer.name for spec in (*program.inputs, *program.outputs) if not spec.is_kept}
    _verify_buffers(program, inputs | outputs | uses.keys())
    ends = _find_ends(len(program.steps), program.edges)
    final = max(len(program.steps) - 1, 0)
    lifetimes: list[Lifetime] = []
    for buffer in program.buffers:
        name, nbytes = buffer.name, buffer.nbytes
        if buffer.is_host:
            lifetimes.append(Lifetime(name, nbytes, 0, final, is_kept=True, is_host=True))
            continue
        # A constant of a compiled program is filled once, before the first replay.
        if name in inputs or buffer.content is not None:
            is_kept, is_lent = name not in passing, name in lent
            lifetimes.append(Lifetime(name, nbytes, 0, final, is_kept, is_lent))
            continue
        if not nbytes:
            lifetimes.append(Lifetime(name, 0, 0, final, is_kept=name in outputs - passing))
            continue
        if name not in first_writes or uses[name][0] < first_writes[name]:
            raise _make_program_error(
                f"no step writes buffer `{name}` before it is read", program.name
            )
        last = final if name in outputs else max(map(ends.__getitem__, uses[name]))
        is_kept = name in outputs - passing
        lifetimes.append(Lifetime(name, nbytes, first_writes[name], last, is_kept))
    return tuple(lifetimes)


def _collect_uses(program: DeviceProgram) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Returns the steps that touch each buffer, ascending, and the first that writes it."""
    uses: dict[str, list[int]] = defaultdict(list)
    first_writes: dict[str, int] = {}
    for index, step in enumerate(program.steps):
        for name in {use.buffer for use in (*step.reads, *step.writes)}:
            uses[name].append(index)
        for use in step.writes:
            first_writes.setdefault(use.buffer, index)
    return uses, first_writes


def _verify_buffers(program: DeviceProgram, named: set[str]) -> None:
    listed = {buffer.name for buffer in program.buffers}
    if len(listed) < len(program.buffers):
        raise _make_program_error("a buffer is listed twice", program.name)
    if named - listed:
        unknown = ", ".join(f"`{name}`" for name in sorted(named - listed))
        raise _make_program_error(f"the program does not list the buffers {unknown}", program.name)


def _find_ends(count: int, edges: Sequence[tuple[int, int]]) -> Sequence[int]:
    """Returns for each step the greatest step that is not ordered after it (or itself)."""
    if is_chain(count, edges):
        return range(count)
    ancestors = find_ancestors(count, edges)
    ends = [0] * count
    pending = (1 << count) - 1
    for step in reversed(range(count)):
        ending = pending & ~ancestors[step]
        pending ^= ending
        while ending:
            ends[ending.bit_length() - 1] = step
            ending ^= 1 << (ending.bit_length() - 1)
    return ends


def _make_program_error(what: str, program_name: str) -> InternalError:
    return InternalError(
        what,
        where=f"lifetimes of `{program_name}`",
        why="a buffer can only get an offset when all steps that touch it are known",
    )
