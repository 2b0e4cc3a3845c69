"""Functions of one element of an attention in tiles, as its kernels compute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from tracegraph.lowering.kernels.element_functions import (
    FLOAT,
    ElementFunction,
    ElementLines,
    ElementOp,
    keep_needed,
)

_ONE = ElementOp("constant", FLOAT, detail="3f800000")
_SUMS = ("sum0", "sum1")
# What the GPU has instructions for, that are less exact than functions of libraries.
FAST = {"exp": "exp_fast"}


class Terms:
    """Scalars of functions, each once.

    Attributes:
        ops: each comes after its operands.
    """

    def __init__(self) -> None:
        self.ops: list[ElementOp] = []
        self._numbers: dict[ElementOp, int] = {}

    def add(self, op: ElementOp) -> int:
        """Returns the number of a scalar."""
        if op not in self._numbers:
            self._numbers[op] = len(self.ops)
            self.ops.append(op)
        return self._numbers[op]

    def take(
        self,
        function: ElementFunction,
        write: Callable[[Terms, ElementOp], int] | None = None,
        known: Mapping[int, int] | None = None,
    ) -> int:
        """Returns the number of a function's result.

        Args:
            function: that is added.
            write: adds an op whose operands have new numbers; None to add it as it is.
            known: numbers of scalars that take the place of some of its ops.
        """
        places: list[int] = []
        for number, op in enumerate(function.ops):
            if known is not None and number in known:
                places.append(known[number])
                continue
            moved = dataclasses.replace(op, operands=tuple(places[each] for each in op.operands))
            places.append(write(self, moved) if write is not None else self.add(moved))
        return places[function.results[0]]

    def finish(self, *results: int) -> ElementFunction:
        """Returns the function of some scalars, with what they need."""
        return keep_needed(ElementFunction(tuple(self.ops), results))

    def find_dependents(self, names: Collection[str]) -> set[int]:
        """Returns the scalars that some variables are needed for."""
        found: set[int] = set()
        for number, op in enumerate(self.ops):
            is_one = op.opcode == "variable" and op.detail in names
            if is_one or not found.isdisjoint(op.operands):
                found.add(number)
        return found

    def find_later(self, known_rows: int) -> set[int]:
        """Returns the scalars that row values are needed for which are not known yet."""
        names = {op.detail for op in self.ops if op.detail.startswith("row")}
        return self.find_dependents({name for name in names if int(name[3:]) >= known_rows})


def open_functions(
    functions: Sequence[ElementFunction],
    prefix: str,
    elements: Collection[str] = ("t", *_SUMS),
    fast: Mapping[str, str] = FAST,
) -> ElementLines:
    """Returns what writes functions of the same elements; what they have in common comes once.

    A division takes longer than all else of a softmax: where many elements are divided by a value
    of their row, one is divided by it, and the elements are multiplied. The exponential is nearly
    as dear, so it is the GPU's own.

    Args:
        functions: what is computed, a result for each.
        prefix: of the names, which no other function in the same place has.
        elements: the variables that differ from element to element of a row.
        fast: opcodes that take the place of others.
    """
    terms = Terms()

    def write(terms: Terms, op: ElementOp) -> int:
        if op.opcode in fast:
            return terms.add(dataclasses.replace(op, opcode=fast[op.opcode]))
        varies = terms.find_dependents(elements)
        if op.opcode != "div" or op.operands[0] not in varies or op.operands[1] in varies:
            return terms.add(op)
        if terms.ops[op.operands[1]].opcode == "constant":
            factor = terms.add(ElementOp("div", FLOAT, (terms.add(_ONE), op.operands[1])))
        else:
            factor = terms.add(ElementOp("invert", FLOAT, (op.operands[1],)))
        return terms.add(ElementOp("mul", FLOAT, (op.operands[0], factor)))

    results = [terms.take(each, write) for each in functions]
    return ElementLines(terms.finish(*results), prefix)


def open_function(function: ElementFunction, prefix: str) -> ElementLines:
    """Returns what writes one function, see `open_functions`."""
    return open_functions([function], prefix)


def share_elements(
    functions: Sequence[ElementFunction], most: int, known_rows: int
) -> tuple[list[ElementFunction], list[ElementFunction]]:
    """Returns what several functions have in common, and functions that find it as their sums.

    A score that is scaled and masked is computed once in place of its sum, and so is the
    exponential of what it is above the maximum of its row.

    Args:
        functions: of the same elements.
        most: how many sums there are, so that as many values can be kept; if there are more, or
            nothing but sums, the first list is empty.
        known_rows: how many row values are known.
    """
    terms = Terms()
    results = [terms.take(each) for each in functions]
    of_sums, of_rows = terms.find_dependents(_SUMS), terms.find_later(known_rows)
    found: dict[int, None] = {}
    seen: set[int] = set()
    stack = results[::-1]
    while stack:
        number = stack.pop()
        if number in seen or number not in of_sums:
            continue
        seen.add(number)
        if number in of_rows:
            stack += terms.ops[number].operands[::-1]
        else:
            found[number] = None
    if len(found) > most or all(terms.ops[number].opcode == "variable" for number in found):
        return [], list(functions)
    rest = Terms()
    known = {
        number: rest.add(ElementOp("variable", FLOAT, detail=_SUMS[place]))
        for place, number in enumerate(found)
    }
    shared = [terms.finish(number) for number in found]
    whole = tuple(terms.ops)
    others = [
        rest.finish(rest.take(ElementFunction(whole, (result,)), known=known)) for result in results
    ]
    return shared, others
