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
_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "negate": operator.neg,
    "select": lambda condition, one, other: one if condition else other,
    **dict.fromkeys(["bitcast", "convert", "copy", "reshape"], lambda value: value),
}
# XLA computes them otherwise for truth values: any number but 0 converts to 1, and 1 + 1 is 1.
_OF_NUMBERS = frozenset(["add", "subtract", "multiply", "negate", "convert"])
# What an integer may be.
_Values: TypeAlias = frozenset[int]
# Returns what an element of a parameter may be, by the parameter's number.
_Arguments: TypeAlias = Callable[[int, int], _Values]


class TripCounts(NamedTuple):
    """How often a loop runs.

    Attributes:
        least: so often at least.
        most: so often at most; None where that is not known.
    """

    least: int = 0
    most: int | None = None


class _UnknownSignal(Exception):
    """A value depends on more than a few integers."""


def find_trip_counts(
    name: str, computations: Mapping[int, Mapping[str, Any]], most_trips: int = MOST_TRIPS
) -> TripCounts:
    """Returns how often a loop runs, see Note [Certain iterations].

    Args:
        name: of its instruction.
        computations: the instructions of every computation, by its number.
        most_trips: a loop is followed no further.
    """
    around = next((each for each in computations.values() if name in each), {})
    loop = around.get(name)
    if loop is None or loop.opcode != "while":
        return TripCounts()
    body, condition = (
        _Computation(computations[number].values(), computations)
        for number in loop.called_computation_ids
    )
    # Where something has effects, what is returned is not the last instruction.
    if (body.returned, condition.returned) != ("TUPLE", "PRED"):
        return TripCounts()
    start = _Computation(around.values(), computations)
    try:
        return _follow(_Loop(start, condition, body, loop.operand_ids[0]), most_trips)
    except _UnknownSignal:
        return TripCounts()


class _Computation:
    """What the instructions of a computation may be.

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
    def root(self) -> int:
        """The identity of what it returns."""
        return next(reversed(self._by_id))

    @property
    def returned(self) -> str:
        """The type of what it returns."""
        return _read_kind(self._by_id[self.root])

    def find(self, identity: int, arguments: _Arguments, element: int = 0) -> _Values:
        """Returns what an integer may be.

        Args:
            identity: of an instruction.
            arguments: of the computation.
            element: which one of a tuple.

        Raises:
            _UnknownSignal: nothing is known of it.
        """
        instruction = self._by_id[identity]
        try:
            return self._find(instruction, arguments, element)
        except _UnknownSignal:
            # What chooses between two values may be either.
            if self._find_kind(instruction) == "PRED":
                return frozenset((0, 1))
            raise

    def _find(self, instruction: Any, arguments: _Arguments, element: int) -> _Values:
        opcode, operands = instruction.opcode, instruction.operand_ids
        if opcode == "parameter":
            return arguments(instruction.parameter_number, element)
        if opcode == "get-tuple-element":
            return self.find(operands[0], arguments, instruction.tuple_index)
        if opcode == "tuple":
            return self.find(operands[element], arguments)
        if opcode == "fusion":
            inner = self._open_fusion(instruction)
            return inner.find(
                inner.root, lambda number, _: self.find(operands[number], arguments), element
            )
        kind = self._find_kind(instruction)
        if kind not in _BITS:
            raise _UnknownSignal
        if opcode == "constant":
            return self._find_constant(instruction, kind)
        compute = _find_operation(instruction)
        if compute is None or (kind == "PRED" and opcode in _OF_NUMBERS):
            raise _UnknownSignal
        found = [self.find(each, arguments) for each in operands]
        if math.prod(map(len, found)) > MOST_STARTS:
            raise _UnknownSignal
        return frozenset(_wrap(compute(*each), kind) for each in itertools.product(*found))

    def _find_constant(self, instruction: Any, kind: str) -> _Values:
        identity = instruction.id
        if identity not in self._constants:
            value = int.from_bytes(read_literal(instruction), "little")
            self._constants[identity] = frozenset([_wrap(value, kind)])
        return self._constants[identity]

    def _find_kind(self, instruction: Any) -> str:
        identity = instruction.id
        if identity not in self._kinds:
            self._kinds[identity] = _read_kind(instruction)
        return self._kinds[identity]

    def _open_fusion(self, instruction: Any) -> _Computation:
        if instruction.id not in self._fused:
            fused = list_fused(instruction, self._computations)
            self._fused[instruction.id] = _Computation(fused, self._computations)
        return self._fused[instruction.id]


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


def _follow(loop: _Loop, most_trips: int) -> TripCounts:
    """Returns how often a loop runs from each of its starts.

    Raises:
        _UnknownSignal: its condition depends on more than integers.
    """
    starts = _find_starts(loop)
    if math.prod(map(len, starts.values())) > MOST_STARTS:
        raise _UnknownSignal
    found = [
        _count_trips(loop, dict(zip(starts, values, strict=True)), most_trips)
        for values in itertools.product(*starts.values())
    ]
    least = min(each.least for each in found)
    ends = [each.most for each in found if each.most is not None]
    return TripCounts(least, max(ends) if len(ends) == len(found) else None)


def _find_starts(loop: _Loop) -> dict[int, _Values]:
    """Returns what the elements of the tuple that the condition depends on start with."""
    starts: dict[int, _Values] = {}
    waiting: list[int] = []

    def start(_: int, element: int) -> _Values:
        if element not in starts:
            starts[element] = loop.around.find(loop.start, _know_nothing, element)
            waiting.append(element)
        return starts[element]

    loop.condition.find(loop.condition.root, start)
    while waiting:
        loop.body.find(loop.body.root, start, waiting.pop())
    return starts


def _know_nothing(*_: int) -> _Values:
    raise _UnknownSignal


def _count_trips(loop: _Loop, state: Mapping[int, int], most_trips: int) -> TripCounts:
    """Returns how often a loop runs from one start."""
    for trips in range(most_trips + 1):
        values = {element: frozenset([value]) for element, value in state.items()}

        def find(_: int, element: int, values: Mapping[int, _Values] = values) -> _Values:
            if element not in values:
                raise _UnknownSignal
            return values[element]

        goes_on = loop.condition.find(loop.condition.root, find)
        if goes_on == {0}:
            return TripCounts(trips, trips)
        after = {each: loop.body.find(loop.body.root, find, each) for each in state}
        if goes_on != {1} or any(len(each) > 1 for each in after.values()):
            return TripCounts(trips, None)
        state = {element: value for element, (value,) in after.items()}
    return TripCounts(most_trips, None)


def _read_kind(instruction: Any) -> str:
    """Returns the type of a scalar; nothing for an array or a tuple."""
    shape = instruction.shape
    return "" if shape.dimensions else read_name(shape, "element_type")


def _find_operation(instruction: Any) -> Callable[..., int] | None:
    if instruction.opcode == "compare":
        return _COMPARISONS.get(instruction.comparison_direction)
    return _OPERATIONS.get(instruction.opcode)


def _wrap(value: int, kind: str) -> int:
    """Returns an integer as a type holds it."""
    bits = _BITS[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind.startswith("S") and value >> (bits - 1) else value
