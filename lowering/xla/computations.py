"""The computations of XLA's program, each read when it is first looked into.

Note [Computations on demand]
Steps come from thunks. What is read from the HLO are names and the user's lines, constants, and
what a few kernels compute: the entry computation for the most part, seldom one of the hundreds that
fusions call. But most of the time to parse a program, to find fields in it that the schema does not
have and to free it was theirs. So in our schema a module holds computations as bytes, which are
written as messages are, and a field that is not known is looked for where a computation is read. A
train step of ResNet-18 is read in 74 ms that way, before in 113 (docs/design/capture_time.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tracegraph.lowering.xla.container import parse_message, read_message
from tracegraph.lowering.xla.schema import COMPUTATION, COMPUTATION_ID, find_class


class Computations(Mapping[int, Mapping[str, Any]]):
    """The instructions of each computation by name, by its number.

    Args:
        module: an ``xla.HloModuleProto``.

    Raises:
        UnsupportedError: where one is read that is no ``xla.HloComputationProto``, or has a field
            that the schema does not have.
    """

    def __init__(self, module: Any) -> None:
        pool = module.DESCRIPTOR.file.pool
        self._kind = find_class(pool, COMPUTATION)
        of_number = find_class(pool, COMPUTATION_ID)
        self._encoded: dict[int, bytes] = {}
        for place, encoded in enumerate(module.computations):
            where = f"{module.DESCRIPTOR.full_name}.computations[{place}]"
            # All of its other fields are unknown to the type that has its number alone.
            numbered: Any = parse_message(of_number, encoded, where)
            self._encoded[numbered.id] = encoded
        self._messages: dict[int, Any] = {}
        self._instructions: dict[int, dict[str, Any]] = {}

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        if number not in self._instructions:
            instructions = self.read(number).instructions
            self._instructions[number] = {each.name: each for each in instructions}
        return self._instructions[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._encoded)

    def __len__(self) -> int:
        return len(self._encoded)

    def read(self, number: int) -> Any:
        """Returns a computation, an ``xla.HloComputationProto``.

        Raises:
            KeyError: there is none of this number.
        """
        if number not in self._messages:
            where = f"{COMPUTATION} {number}"
            self._messages[number] = read_message(self._kind, self._encoded[number], where)
        return self._messages[number]

    def list_instructions(self, *opcodes: str) -> list[Any]:
        """Returns the instructions with one of some opcodes, in the order of the program."""
        texts = [opcode.encode() for opcode in opcodes]
        numbers = [
            number
            for number, encoded in self._encoded.items()
            if any(text in encoded for text in texts)
        ]
        return [
            instruction
            for number in numbers
            for instruction in self.read(number).instructions
            if instruction.opcode in opcodes
        ]
