"""Forward copies: steps that use a copied piece where it is, so that the copy goes.

Note [Forwarded copies]
A loop over stacked arrays, as ``scan`` writes it, copies one piece of each of them per iteration
into a temporary, and a piece of each result back. XLA needs the copies, because the address of a
piece is known at run time only. In an unrolled iteration it is a constant: kernels can read the
piece where it is, and write it where it belongs. Of a GPT of 12 layers a fifth of the nodes are
such copies.

A piece is read in place if nothing writes it before its last reader, and written in place if
nothing touches it from the first write of the temporary to the copy, and nothing writes it before
the last use of the temporary. In arguments and results whose addresses change from call to call
only kernels are pointed to: a node of a library or inside of a loop could not be given another
address any more, and the whole array would be copied. A piece starts at a multiple of 256, as
everything that XLA's kernels are given.

A piece is in a buffer that is there anyway, or in one no larger than the temporary in its place. So
no more bytes are alive at any step, but for a result that is written in place ahead of what wrote
to it first: until then, its memory may have served others.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from tracegraph.lowering.device_program import (
    Copy,
    DeviceProgram,
    DeviceStep,
    ExecutableCall,
    Step,
    list_uses,
)
from tracegraph.lowering.planning.drop_steps import drop_steps
from tracegraph.lowering.planning.memory_plan import ALIGNMENT
from tracegraph.lowering.request import Role
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, KernelNode


class Forwarded(NamedTuple):
    """A program without copies.

    Attributes:
        program: the same one where none could be forwarded.
        may_grow: True if more bytes than before may be alive at one step.
    """

    program: DeviceProgram
    may_grow: bool = False


def forward_copies(program: DeviceProgram) -> Forwarded:
    """Returns the program without the copies that can be forwarded.

    Args:
        program: steps in an order that gives the right result; a program that calls regions is
            returned as it is.
    """
    if any(isinstance(step, ExecutableCall) for step in program.steps):
        return Forwarded(program)
    work = _Forwarding(program)
    gone = [index for index in range(len(program.steps)) if work.forward(index)]
    if not gone:
        return Forwarded(program)
    buffers = tuple(spec for spec in program.buffers if spec.name not in work.replaced)
    steps = tuple(work.steps)
    found = drop_steps(dataclasses.replace(program, buffers=buffers, steps=steps), gone)
    return Forwarded(found, work.may_grow)


class _Forwarding:
    """The steps of a program while copies of it are forwarded, one after another.

    Args:
        program: see `forward_copies`.

    Attributes:
        steps: as they are now.
        replaced: names of the temporaries that no step uses any more.
        may_grow: True once a result is written ahead of its first write.
    """

    def __init__(self, program: DeviceProgram) -> None:
        self.steps: list[Step] = list(program.steps)
        self.replaced: set[str] = set()
        self.may_grow = False
        self._sizes = {spec.name: spec.nbytes for spec in program.buffers}
        fixed = [spec.buffer.name for spec in (*program.inputs, *program.outputs)]
        fixed += [spec.name for spec in program.buffers if spec.content is not None]
        self._fixed = frozenset(fixed)
        # What has another address at each call.
        moving = [spec.buffer.name for spec in program.inputs if spec.role is Role.COPIED]
        moving += [spec.buffer.name for spec in program.outputs if spec.alias is None]
        self._moving = frozenset(moving)
        # A kernel would read it, or write it, through the bus.
        self._host = {spec.name for spec in program.buffers if spec.is_host}
        self._users: dict[str, set[int]] = defaultdict(set)
        for index, step in enumerate(self.steps):
            for use in list_uses(step):
                self._users[use.buffer].add(index)

    def forward(self, index: int) -> bool:
        """Forwards a step, if it is a copy that can be; True if it can go."""
        step = self.steps[index]
        node = step.node if isinstance(step, DeviceStep) else None
        if not isinstance(node, CopyNode):
            return False
        source, target = node.source, node.target
        if {source.buffer, target.buffer} & self._host:
            return False
        if self._can_read_in_place(index, source, target):
            self._replace(index, target, source)
            return True
        if self._can_write_in_place(index, source, target):
            first = min(self._users[source.buffer])
            self.may_grow |= first < min(self._users[target.buffer])
            self._replace(index, source, target)
            return True
        return False

    def _can_read_in_place(self, index: int, piece: BufferUse, stand_in: BufferUse) -> bool:
        others = self._find_others(index, piece, stand_in)
        if not others or others[0] < index or self._is_written(others, stand_in):
            return False
        last = others[-1]
        lives = self._lives(piece, last, last) or self._sizes[piece.buffer] <= stand_in.nbytes
        return lives and not self._is_written(self._between(piece, index + 1, last + 1), piece)

    def _can_write_in_place(self, index: int, stand_in: BufferUse, piece: BufferUse) -> bool:
        others = self._find_others(index, piece, stand_in)
        if not others or others[0] > index:
            return False
        first, last = others[0], others[-1]
        later = [each for each in others if each > index]
        if self._is_written(later, stand_in) or not self._lives(piece, first, index):
            return False
        if self._is_touched(self._between(piece, first, index), piece):
            return False
        return not self._is_written(self._between(piece, index + 1, last + 1), piece)

    def _find_others(self, index: int, piece: BufferUse, stand_in: BufferUse) -> list[int]:
        """Returns the other users of a temporary, in order; none where they must stay."""
        name = stand_in.buffer
        is_whole = not stand_in.offset and stand_in.nbytes == self._sizes[name]
        if name in self._fixed or name == piece.buffer or not is_whole or piece.offset % ALIGNMENT:
            return []
        others = sorted(self._users[name] - {index})
        can_move = all(self._can_move(self.steps[each], piece) for each in others)
        return others if can_move else []

    def _can_move(self, step: Step, piece: BufferUse) -> bool:
        if isinstance(step, ExecutableCall | Copy):
            return False
        is_kernel = isinstance(step, DeviceStep) and isinstance(step.node, KernelNode)
        return is_kernel or piece.buffer not in self._moving

    def _lives(self, piece: BufferUse, first: int, last: int) -> bool:
        """True where the buffer of a piece is there at two steps for other reasons."""
        users = self._users[piece.buffer]
        return piece.buffer in self._fixed or (min(users) <= first and max(users) >= last)

    def _between(self, piece: BufferUse, start: int, end: int) -> list[int]:
        return [each for each in self._users[piece.buffer] if start <= each < end]

    def _is_written(self, steps: Iterable[int], piece: BufferUse) -> bool:
        return any(use.overlaps(piece) for each in steps for use in self.steps[each].writes)

    def _is_touched(self, steps: Iterable[int], piece: BufferUse) -> bool:
        return any(use.overlaps(piece) for each in steps for use in list_uses(self.steps[each]))

    def _replace(self, index: int, stand_in: BufferUse, piece: BufferUse) -> None:
        name, users = stand_in.buffer, self._users.pop(stand_in.buffer) - {index}

        def relocate(use: BufferUse) -> BufferUse:
            if use.buffer != name:
                return use
            return BufferUse(piece.buffer, piece.offset + use.offset, use.nbytes)

        for each in users:
            step = self.steps[each]
            assert not isinstance(step, ExecutableCall | Copy)
            self.steps[each] = step.move(relocate)
        self._users[piece.buffer] = (self._users[piece.buffer] | users) - {index}
        self.replaced.add(name)
