"""Where a thunk comes from: its HLO instruction, and the user's line behind that."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from tracegraph.lowering.xla.computations import Computations
from tracegraph.runtime.source_lines import Line, locate_lines

# A chain of callers that is longer runs in a circle.
_DEPTH_LIMIT = 1000


@dataclasses.dataclass(frozen=True)
class Origins:
    """Where the instructions of a compiled program come from, by their names.

    Attributes:
        stack_frames: the ``StackFrameIndexProto``.
        computations: the instructions of every computation by name, by its number.
    """

    stack_frames: Any = dataclasses.field(repr=False)
    computations: Mapping[int, Mapping[str, Any]] = dataclasses.field(repr=False)

    @functools.cached_property
    def instructions(self) -> dict[str, Any]:
        """Those of all computations."""
        found = self.computations.values()
        return {name: each for instructions in found for name, each in instructions.items()}

    def locate(self, name: str) -> str:
        """Returns where an instruction comes from, as ``train.py:41 in step, jit(step)/sort``.

        Args:
            name: of the instruction; one that is unknown is named alone.
        """
        instruction = self.instructions.get(name)
        if instruction is None:
            return f"HLO `{name}`"
        metadata = self._find_metadata(instruction)
        line = locate_lines(self._walk_frames(metadata.stack_frame_id))
        return ", ".join(part for part in (line, metadata.op_name, f"HLO `{name}`") if part)

    def find_line(self, name: str) -> str:
        """Returns the user's line of an instruction, as ``train.py:41 in step``; empty for none.

        Args:
            name: of the instruction.
        """
        instruction = self.instructions.get(name)
        if instruction is None:
            return ""
        return locate_lines(self._walk_frames(instruction.metadata.stack_frame_id)) or ""

    def find_path(self, name: str) -> str:
        """Returns JAX's path of an instruction, as ``jit(step)/sort``; empty for none.

        Args:
            name: of the instruction.
        """
        instruction = self.instructions.get(name)
        return "" if instruction is None else instruction.metadata.op_name

    def _find_metadata(self, instruction: Any) -> Any:
        """Returns what is known of an instruction, or of the nearest one that uses its value.

        XLA's passes put in instructions of their own, and some of these have no origin.
        """
        inside = next(
            found.values() for found in self.computations.values() if instruction.name in found
        )
        # It grows while it is read: the users, then theirs.
        found = {instruction.id}
        for each in (queue := [instruction]):
            if each.metadata.op_name:
                return each.metadata
            users = [user for user in inside if each.id in user.operand_ids]
            queue += [user for user in users if user.id not in found]
            found |= {user.id for user in users}
        return instruction.metadata

    def _walk_frames(self, frame_id: int) -> Iterator[Line]:
        """Yields the lines from the innermost frame outwards; ids start at 1."""
        index = self.stack_frames
        for _ in range(_DEPTH_LIMIT):
            if not 0 < frame_id <= len(index.stack_frames):
                return
            frame = index.stack_frames[frame_id - 1]
            frame_id = frame.parent_frame_id
            if not 0 < frame.file_location_id <= len(index.file_locations):
                continue
            location = index.file_locations[frame.file_location_id - 1]
            yield Line(
                _pick(index.file_names, location.file_name_id),
                location.line,
                _pick(index.function_names, location.function_name_id),
            )


def index_origins(module: Any) -> Origins:
    """Returns where the instructions of a compiled program come from.

    Args:
        module: an ``HloModuleProto``.
    """
    return Origins(module.stack_frame_index, Computations(module))


def _pick(names: Any, number: int) -> str:
    return names[number - 1] if 0 < number <= len(names) else "?"
