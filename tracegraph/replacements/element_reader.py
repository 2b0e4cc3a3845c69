"""Element reader: one element of a value of the Graph → ElementFunction.

An element is read at an index. What the ops behind it are computed from is read at the indices that
they have there, down to arrays, which are loaded. Values of integers are indices themselves, so
that a mask or a position is computed from what is known of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tracegraph.ir.graph import Literal, Op, Operand, Value
from tracegraph.lowering.kernels.element_functions import (
    BOOL,
    FLOAT,
    INT,
    ElementFunction,
    ElementOp,
    find_type,
    keep_needed,
)
from tracegraph.lowering.kernels.row_functions import EXPRESSIONS
from tracegraph.replacements.indices import (
    Index,
    Quotient,
    Remainder,
    Scalar,
    Variable,
    flatten_index,
    make_scalar,
)
from tracegraph.replacements.places import Indices, fit_place, move_place

# By JAX's names of types.
TYPES = {"float32": FLOAT, "bfloat16": FLOAT, "float16": FLOAT, "int32": INT, "bool": BOOL}
# A value of integers is an index, any other one a number of an op.
Element: TypeAlias = Index | int
# A kernel computes each element again that it needs again.
MAX_OPS = 96
# What takes more instructions than a load does: it is done once, by XLA, but for what depends on
# a sum of the kernel.
_DEAR = frozenset(
    ["pow", "exp", "exp2", "log", "log1p", "expm1", "tanh", "erf", "erfc", "logistic"]
)
_COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge"])
_ONE, _ZERO = "3f800000", "00000000"
_LOW, _HIGH = -(1 << 31), (1 << 31) - 1


class UnreadableError(Exception):
    """An op, or an array, that no element function takes."""


class ElementReader:
    """Reads elements of values, and what they are made from.

    Args:
        makers: the op of each value.
        arrays: the number of the kernel's parameter for each value that is loaded; it grows.

    Attributes:
        sum: the matmul whose sums the kernel has, and where they are read; for `read` to find.
        max_ops: what is needed beyond so many ops is loaded.
    """

    max_ops = MAX_OPS

    def __init__(self, makers: Mapping[Operand, Op], arrays: dict[Value, int]) -> None:
        self._makers, self._arrays = makers, arrays
        self._ops: list[ElementOp] = []
        self._known: dict[Any, Element] = {}
        self._emitted: dict[ElementOp, int] = {}
        self._of_sum: set[int] = set()
        self._seeks_sum = False
        self.sum: tuple[Op, Indices] | None = None

    def read_score(self, value: Operand, place: Indices) -> Element:
        """Reads an element that is computed from a sum of the kernel, which becomes a variable.

        Raises:
            UnreadableError: its type is none that kernels read.
        """
        self._seeks_sum = True
        return self.read(value, place)

    def read(self, value: Operand, place: Indices) -> Element:
        """Returns what stands for an element.

        Args:
            value: of the graph.
            place: of the element, an index for each axis.

        Raises:
            UnreadableError: its type is none that kernels read.
        """
        if isinstance(value, Literal):
            return self._read_literal(value)
        key = (value, place)
        if key not in self._known:
            self._known[key] = self._read(value, place)
        return self._known[key]

    def finish(self, *results: Element) -> ElementFunction:
        """Returns the function that computes what was read."""
        numbers = tuple(self._emit_element(each) for each in results)
        return keep_needed(ElementFunction(tuple(self._ops), numbers))

    def clamp(self, index: Index, low: int, high: int) -> Index:
        """Returns an index that is no smaller and no larger than two numbers."""
        if index.low >= low and index.high <= high:
            return index
        at_least = self._emit("int_max", self._emit_index(index), self._emit_constant(low))
        number = self._emit("int_min", at_least, self._emit_constant(high))
        return make_scalar(number, low, high)

    def _read(self, value: Value, place: Indices) -> Element:
        maker = self._makers.get(value)
        if maker is None or len(self._ops) > self.max_ops:
            return self._load(value, place)
        state = self._save()
        try:
            return self._read_op(maker, place)
        except UnreadableError:
            # All of it or none: what an op that is left out would read is not read.
            self._restore(state)
            return self._load(value, place)

    def _save(self) -> Any:
        known, emitted = dict(self._known), dict(self._emitted)
        return len(self._ops), dict(self._arrays), known, emitted, set(self._of_sum), self.sum

    def _restore(self, state: Any) -> None:
        count, arrays, self._known, self._emitted, self._of_sum, self.sum = state
        del self._ops[count:]
        # It is shared with other readers.
        for value in [each for each in self._arrays if each not in arrays]:
            del self._arrays[value]

    def _load(self, value: Value, place: Indices) -> Element:
        kind = TYPES.get(str(value.dtype))
        if kind is None or math.prod(value.shape) > _HIGH:
            raise UnreadableError
        index = self._emit_index(flatten_index(place, value.shape))
        parameter = self._arrays.setdefault(value, len(self._arrays))
        number = self._add(ElementOp("load", kind, (index,), str(parameter)))
        return make_scalar(number, _LOW, _HIGH) if kind == INT else number

    def _read_literal(self, literal: Literal) -> Element:
        kind = TYPES.get(str(literal.aval.dtype))
        if kind is None:
            raise UnreadableError
        if kind == INT:
            return Index(constant=int(literal.value))
        if kind == BOOL:
            return self._add(ElementOp("constant", BOOL, (), str(bool(literal.value)).lower()))
        bits = f"{np.float32(literal.value).view(np.uint32):08x}"
        return self._add(ElementOp("constant", FLOAT, (), bits))

    def _read_op(self, op: Op, place: Indices) -> Element:
        if len(op.results) != 1 or str(op.results[0].dtype) not in TYPES:
            raise UnreadableError
        if op.name == "dot_general" and self._seeks_sum and self.sum in (None, (op, place)):
            self.sum = (op, place)
            number = self._add(ElementOp("variable", FLOAT, (), "sum"))
            self._of_sum.add(number)
            return number
        moved = move_place(op, place)
        if moved is not None:
            return self.read(op.operands[0], moved)
        read = _READERS.get(op.name)
        if read is not None:
            return read(self, op, place)
        opcode = {"add_any": "add"}.get(op.name, op.name)
        if opcode not in EXPRESSIONS:
            raise UnreadableError
        return self._read_arithmetic(op, opcode, self._read_all(op, place))

    def _read_all(self, op: Op, place: Indices) -> list[Element]:
        """Reads the operands of an element-wise op."""
        return [self.read(each, fit_place(place, each.aval.shape)) for each in op.operands]

    def _read_arithmetic(self, op: Op, opcode: str, operands: Sequence[Element]) -> Element:
        if TYPES[str(op.results[0].dtype)] == INT:
            return self._compute_index(opcode, operands)
        if self._is_dear(opcode, operands):
            raise UnreadableError
        return self._emit(opcode, *map(self._emit_element, operands))

    def _is_dear(self, opcode: str, operands: Sequence[Element]) -> bool:
        """True for what is not computed again for each element."""
        return opcode in _DEAR and not any(each in self._of_sum for each in operands)

    def _compute_index(self, opcode: str, operands: Sequence[Element]) -> Index:
        first, second = (*operands, Index())[:2]
        if not isinstance(first, Index) or not isinstance(second, Index):
            raise UnreadableError
        if opcode == "add":
            return first.add(second)
        if opcode == "sub":
            return first.add(second.times(-1))
        if opcode == "neg":
            return first.times(-1)
        if opcode == "mul" and not (first.terms and second.terms):
            return first.times(second.constant) if first.terms else second.times(first.constant)
        if opcode in ("max", "min"):
            bounds = zip((first.low, first.high), (second.low, second.high), strict=True)
            choose = max if opcode == "max" else min
            numbers = self._emit_index(first), self._emit_index(second)
            return make_scalar(self._emit(f"int_{opcode}", *numbers), *(choose(b) for b in bounds))
        raise UnreadableError

    def _read_conversion(self, op: Op, place: Indices) -> Element:
        value = self.read(op.operands[0], place)
        kinds = [TYPES.get(str(each.aval.dtype)) for each in (op.operands[0], op.results[0])]
        if kinds[0] == kinds[1]:
            return value
        if kinds == [INT, FLOAT]:
            return self._emit("to_float", self._emit_element(value))
        if kinds == [BOOL, FLOAT] and not isinstance(value, Index):
            one, zero = (self._add(ElementOp("constant", FLOAT, (), b)) for b in (_ONE, _ZERO))
            return self._emit("select", value, one, zero)
        raise UnreadableError

    def _read_power(self, op: Op, place: Indices) -> Element:
        value, power = self.read(op.operands[0], place), op.params["y"]
        if abs(power) not in (1, 2, 3) or isinstance(value, Index):
            raise UnreadableError
        found = value if abs(power) == 1 else self._emit("square", value)
        found = self._emit("mul", found, value) if abs(power) == 3 else found
        if power > 0:
            return found
        return self._emit("div", self._add(ElementOp("constant", FLOAT, (), _ONE)), found)

    def _read_places(self, op: Op, place: Indices) -> Element:
        index = place[op.params["dimension"]]
        is_index = TYPES[str(op.results[0].dtype)] == INT
        return index if is_index else self._emit("to_float", self._emit_index(index))

    def _read_comparison(self, op: Op, place: Indices) -> Element:
        first, second = self._read_all(op, place)
        if isinstance(first, Index) and isinstance(second, Index):
            difference = first.add(second.times(-1))
            known = _compare_with_zero(op.name, difference)
            if known is not None:
                return self._add(ElementOp("constant", BOOL, (), str(known).lower()))
        return self._emit(op.name, self._emit_element(first), self._emit_element(second))

    def _read_logic(self, op: Op, place: Indices) -> Element:
        operands = self._read_all(op, place)
        if TYPES[str(op.results[0].dtype)] != BOOL:
            raise UnreadableError
        return self._emit(op.name, *map(self._emit_element, operands))

    def _read_choice(self, op: Op, place: Indices) -> Element:
        condition, *cases = self._read_all(op, place)
        if isinstance(condition, Index) or len(cases) != 2:
            raise UnreadableError
        decided = self._ops[condition]
        if decided.opcode == "constant":
            return cases[decided.detail == "true"]
        number = self._emit("select", condition, *map(self._emit_element, reversed(cases)))
        bounds = [(each.low, each.high) for each in cases if isinstance(each, Index)]
        if not bounds:
            return number
        lows, highs = zip(*bounds, strict=True)
        return make_scalar(number, min(lows), max(highs))

    def _read_joined(self, op: Op, place: Indices) -> Element:
        axis = op.params["dimension"]
        starts = [0]
        for operand in op.operands:
            starts.append(starts[-1] + operand.aval.shape[axis])

        def read(number: int) -> Element:
            # Where another piece is meant, this one is read too, at a place that it has.
            size = starts[number + 1] - starts[number]
            at = self.clamp(place[axis].add(-starts[number]), 0, size - 1)
            return self.read(op.operands[number], (*place[:axis], at, *place[axis + 1 :]))

        return self._read_pieces(place[axis], starts, read)

    def _read_stack(self, op: Op, place: Indices) -> Element:
        axis = op.params["axis"]
        rest = (*place[:axis], *place[axis + 1 :])
        starts = range(len(op.operands) + 1)
        return self._read_pieces(place[axis], starts, lambda n: self.read(op.operands[n], rest))

    def _read_pieces(
        self, at: Index, starts: Sequence[int], read: Callable[[int], Element]
    ) -> Element:
        """Returns the piece that an index is in, of which each begins where the one before ends."""
        near = [
            n for n in range(len(starts) - 1) if at.high >= starts[n] and at.low < starts[n + 1]
        ]
        found = read(near[-1])
        for number in reversed(near[:-1]):
            other = self._emit_element(read(number))
            ends = self._emit_constant(starts[number + 1])
            is_before = self._emit("lt", self._emit_index(at), ends)
            chosen = self._emit("select", is_before, other, self._emit_element(found))
            found = make_scalar(chosen, _LOW, _HIGH) if isinstance(found, Index) else chosen
        return found

    def _emit_element(self, element: Element) -> int:
        return self._emit_index(element) if isinstance(element, Index) else element

    def _emit_index(self, index: Index) -> int:
        found: int | None = None
        # In an order that does not change from run to run.
        for atom, factor in sorted(index.terms, key=repr):
            term = self._emit_atom(atom)
            if factor != 1:
                term = self._emit("int_mul", term, self._emit_constant(factor))
            found = term if found is None else self._emit("int_add", found, term)
        if found is None:
            return self._emit_constant(index.constant)
        if not index.constant:
            return found
        return self._emit("int_add", found, self._emit_constant(index.constant))

    def _emit_atom(self, atom: Variable | Scalar | Quotient | Remainder) -> int:
        if isinstance(atom, Variable):
            return self._add(ElementOp("variable", INT, (), atom.name))
        if isinstance(atom, Scalar):
            return atom.number
        opcode = "int_div" if isinstance(atom, Quotient) else "int_rem"
        return self._emit(opcode, self._emit_index(atom.index), self._emit_constant(atom.divisor))

    def _emit_constant(self, value: int) -> int:
        return self._add(ElementOp("constant", INT, (), str(value)))

    def _emit(self, opcode: str, *operands: int) -> int:
        kind = find_type(opcode, self._ops[operands[-1]].type)
        number = self._add(ElementOp(opcode, kind, operands))
        if any(each in self._of_sum for each in operands):
            self._of_sum.add(number)
        return number

    def _add(self, op: ElementOp) -> int:
        if op not in self._emitted:
            self._emitted[op] = len(self._ops)
            self._ops.append(op)
        return self._emitted[op]


def _compare_with_zero(name: str, difference: Index) -> bool | None:
    """Returns whether a comparison holds for the difference of its sides, if that is known."""
    low, high = difference.low, difference.high
    always, never = {
        "lt": (high < 0, low >= 0),
        "le": (high <= 0, low > 0),
        "gt": (low > 0, high <= 0),
        "ge": (low >= 0, high < 0),
        "eq": (low == high == 0, low > 0 or high < 0),
        "ne": (low > 0 or high < 0, low == high == 0),
    }[name]
    return True if always else False if never else None


_READERS: dict[str, Callable[[ElementReader, Op, Indices], Element]] = {
    "convert_element_type": ElementReader._read_conversion,
    "integer_pow": ElementReader._read_power,
    "iota": ElementReader._read_places,
    "concatenate": ElementReader._read_joined,
    "stack": ElementReader._read_stack,
    "select_n": ElementReader._read_choice,
    **dict.fromkeys(_COMPARISONS, ElementReader._read_comparison),
    **dict.fromkeys(["and", "or", "not", "is_finite"], ElementReader._read_logic),
}
