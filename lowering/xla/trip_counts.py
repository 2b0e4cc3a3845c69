"""Trip counts: how often a loop runs whose trip count XLA does not know.

Note [Certain iterations]
XLA knows a trip count where a loop counts from one constant to another. A solver counts the stages
of a step from the first or, where the last step was accepted, from the second: then XLA asks on the
host after each. What such a condition depends on are integers that start at one of a few constants
and that the body counts, so the loop can be followed from each of them. What it does from all of
them is certain: the fewest iterations come one after another, ahead of the loop's node. Only what
may follow is left to it.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from tracegraph.lowering.xla.constants import read_literal
from tracegraph.lowering.xla.enums import read_name
from tracegraph.lowering.xla.loop_fusions import list_fused

# A loop is followed so far, from so many starts; more would take longer than is won.
MOST_TRIPS, MOST_STARTS = 32, 16
# A value is followed through so many instructions, each an operand of the one before. Python allows
# a thousand calls within one another, and the caller's own are among them.
MAX_DEPTH = 64

_BITS = {"PRED": 1, "S8": 8, "U8": 8, "S16": 16, "U16": 16, "S32": 32, "U32": 32}
_BITS |= {"S64": 64, "U64": 64}
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
}
# By the number of operands.
_OPERATIONS: Mapping[int, Mapping[str, Callable[..., Any]]] = {
    1: {
        "not": operator.invert,
        "negate": operator.neg,
        **dict.fromkeys(["bitcast", "convert", "copy", "reshape"], lambda value: value),
    },
    2: {
        "add": operator.add,
        "subtract": operator.sub,
        "multiply": operator.mul,
        "minimum": min,
        "maximum": max,
        "and": operator.and_,
        "or": operator.or_,
        "xor": operator.xor,
    },
    3: {"select": lambda condition, one, other: one if condition else other},
}
# XLA computes them otherwise for truth values: any number but 0 converts to 1, and 1 + 1 is 1.
_OF_NUMBERS = frozenset(["add", "subtract", "multiply", "negate", "convert"])
# What an integer may be.
_Values: TypeAlias = frozenset[int]
# Returns what an element of a parameter may be, by the parameter's number; also given the depth.
_Arguments: TypeAlias = Callable[[int, int, int], _Values | None]


class TripCounts(NamedTuple):
    """How often a loop runs.

    Attributes:
        least: so often at least.
        most: so often at most; None where that is not known.
    """

    least: int = 0
    most: int | None = None


def find_trip_counts(name: str, computations: Mapping[int, Mapping[str, Any]]) -> TripCounts:
    """Returns how often a loop runs, see Note [Certain iterations].

    Args:
        name: of its instruction.
        computations: the instructions of every computation, by its number.
    """
    around = next((each for each in computations.values() if name in each), {})
    loop = around.get(name)
    if loop is None or loop.opcode != "while":
        return TripCounts()
    called = [
        _Computation(computations.get(number, {}).values(), computations)
        for number in loop.called_computation_ids
    ]
    # Where something has effects, what is returned is not the last instruction.
    if [each.returned for each in called] != ["TUPLE", "PRED"] or len(loop.operand_ids) != 1:
        return TripCounts()
    body, condition = called
    start = _Computation(around.values(), computations)
    return _follow(_Loop(start, condition, body, loop.operand_ids[0]))


class _Computation:
    """The instructions of a computation, and what is known of them for any arguments.

    Args:
        instructions: the root last.
        computations: the instructions of every computation, by its number.
    """

    def __init__(
        self, instructions: Iterable[Any], computations: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self._by_id = {each.id: each for each in instructions}
        self._computations = computations
        # Read once, as the loop is followed for a while.
        self._kinds: dict[int, str] = {}
        self._constants: dict[int, _Values] = {}
        self._fused: dict[int, _Computation] = {}

    @property
    def root(self) -> int | None:
        """The identity of what it returns; None where it has no instructions."""
        return next(reversed(self._by_id), None)

    @property
    def returned(self) -> str:
        """The type of what it returns; nothing for an array."""
        return _read_kind(self._by_id[self.root]) if self.root is not None else ""

    def find_instruction(self, identity: int | None) -> Any:
        """Returns an instruction; None where there is none."""
        return None if identity is None else self._by_id.get(identity)

    def find_kind(self, instruction: Any) -> str:
        """Returns the type of a scalar; nothing for an array."""
        identity = instruction.id
        if identity not in self._kinds:
            self._kinds[identity] = _read_kind(instruction)
        return self._kinds[identity]

    def find_constant(self, instruction: Any, kind: str) -> _Values:
        """Returns the value of a constant."""
        identity = instruction.id
        if identity not in self._constants:
            value = int.from_bytes(read_literal(instruction), "little")
            self._constants[identity] = frozenset([_wrap(value, kind)])
        return self._constants[identity]

    def open_fusion(self, instruction: Any) -> _Computation:
        """Returns what a fusion computes."""
        if instruction.id not in self._fused:
            fused = list_fused(instruction, self._computations)
            self._fused[instruction.id] = _Computation(fused, self._computations)
        return self._fused[instruction.id]


class _Evaluation:
    """What the instructions of a computation may be for some arguments.

    Each is looked at once: a value that is used twice by what is used twice would take four looks.

    Args:
        computation: that they are of.
        arguments: what its parameters may be.
    """

    def __init__(self, computation: _Computation, arguments: _Arguments) -> None:
        self._computation, self._arguments = computation, arguments
        self._known: dict[tuple[int | None, int], _Values | None] = {}

    def find_result(self, element: int = 0, depth: int = 0) -> _Values | None:
        """Returns what the computation may return, see `find`."""
        return self.find(self._computation.root, element, depth)

    def find(self, identity: int | None, element: int = 0, depth: int = 0) -> _Values | None:
        """Returns what an integer may be; None where that is not known.

        Args:
            identity: of an instruction.
            element: which one of a tuple.
            depth: through how many instructions the search came here.
        """
        key = identity, element
        if key not in self._known:
            self._known[key] = self._find(identity, element, depth + 1)
        return self._known[key]

    def _find(self, identity: int | None, element: int, depth: int) -> _Values | None:
        instruction = self._computation.find_instruction(identity)
        if instruction is None or depth > MAX_DEPTH:
            return None
        found = self._compute(instruction, element, depth)
        # What chooses between two values may be either.
        if found is None and self._computation.find_kind(instruction) == "PRED":
            return frozenset((0, 1))
        return found

    def _compute(self, instruction: Any, element: int, depth: int) -> _Values | None:
        opcode = instruction.opcode
        if opcode == "parameter":
            return self._arguments(instruction.parameter_number, element, depth)
        if opcode == "get-tuple-element":
            return self._find_operand(instruction, 0, instruction.tuple_index, depth)
        if opcode == "tuple":
            return self._find_operand(instruction, element, 0, depth)
        if opcode == "fusion":
            fused = self._computation.open_fusion(instruction)
            operands = functools.partial(self._find_operand, instruction)
            return _Evaluation(fused, operands).find_result(element, depth)
        kind = self._computation.find_kind(instruction)
        if kind not in _BITS:
            return None
        if opcode == "constant":
            return self._computation.find_constant(instruction, kind)
        compute = _find_operation(instruction)
        if compute is None or (kind == "PRED" and opcode in _OF_NUMBERS):
            return None
        found = [self.find(each, 0, depth) for each in instruction.operand_ids]
        values = [each for each in found if each is not None]
        if len(values) != len(found) or math.prod(map(len, values)) > MOST_STARTS:
            return None
        return frozenset(_wrap(compute(*each), kind) for each in itertools.product(*values))

    def _find_operand(
        self, instruction: Any, number: int, element: int, depth: int
    ) -> _Values | None:
        operands = instruction.operand_ids
        is_there = 0 <= number < len(operands)
        return self.find(operands[number], element, depth) if is_there else None


class _Loop(NamedTuple):
    """A loop over a tuple.

    Attributes:
        around: the computation that it is in.
        condition: says whether another iteration follows.
        body: one iteration.
        start: the identity of the tuple that it starts with.
    """

    around: _Computation
    condition: _Computation
    body: _Computation
    start: int


def _follow(loop: _Loop) -> TripCounts:
    """Returns how often a loop runs from each of its starts."""
    starts = _find_starts(loop)
    if math.prod(map(len, starts.values())) > MOST_STARTS:
        return TripCounts()
    found = [
        _count_trips(loop, dict(zip(starts, values, strict=True)))
        for values in itertools.product(*starts.values())
    ]
    least = min(each.least for each in found)
    ends = [each.most for each in found if each.most is not None]
    return TripCounts(least, max(ends) if len(ends) == len(found) else None)


def _find_starts(loop: _Loop) -> dict[int, _Values]:
    """Returns what the elements of the tuple that the condition depends on start with."""
    starts: dict[int, _Values] = {}
    waiting: list[int] = []
    around = _Evaluation(loop.around, _know_nothing)

    def start(_: int, element: int, depth: int) -> _Values | None:
        if element in starts:
            return starts[element]
        found = around.find(loop.start, element, depth)
        if found is not None:
            starts[element] = found
            waiting.append(element)
        return found

    _Evaluation(loop.condition, start).find_result()
    body = _Evaluation(loop.body, start)
    while waiting:
        body.find_result(waiting.pop())
    return starts


def _know_nothing(*_: int) -> None:
    return None


def _count_trips(loop: _Loop, state: Mapping[int, int]) -> TripCounts:
    """Returns how often a loop runs from one start."""
    for trips in range(MOST_TRIPS + 1):
        values = {element: frozenset([value]) for element, value in state.items()}

        def find(
            _: int, element: int, __: int, values: Mapping[int, _Values] = values
        ) -> _Values | None:
            return values.get(element)

        goes_on = _Evaluation(loop.condition, find).find_result()
        if goes_on == {0}:
            return TripCounts(trips, trips)
        body = _Evaluation(loop.body, find)
        after = {each: body.find_result(each) for each in state}
        following = {element: found for element, found in after.items() if found is not None}
        if goes_on != {1} or [*map(len, following.values())] != [1] * len(state):
            return TripCounts(trips, None)
        state = {element: value for element, (value,) in following.items()}
    return TripCounts(MOST_TRIPS, None)


def _read_kind(instruction: Any) -> str:
    """Returns the type of a scalar; nothing for an array or a tuple."""
    shape = instruction.shape
    return "" if shape.dimensions else read_name(shape, "element_type")


def _find_operation(instruction: Any) -> Callable[..., int] | None:
    count = len(instruction.operand_ids)
    if instruction.opcode == "compare" and count == 2:
        return _COMPARISONS.get(instruction.comparison_direction)
    return _OPERATIONS.get(count, {}).get(instruction.opcode)


def _wrap(value: int, kind: str) -> int:
    """Returns an integer as a type holds it."""
    bits = _BITS[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind.startswith("S") and value >> (bits - 1) else value
