"""Index: the place of an element along an axis, as a sum of variables times constants.

Reshapes, slices and broadcasts of an array are arithmetic on the places of its elements. Here it is
done without running anything, so far simplified that it can be seen how far apart in memory two
elements are: ``(4 * group + head) / 4`` is ``group`` if there are 4 heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias


@dataclasses.dataclass(frozen=True)
class Variable:
    """What goes from 0 to a size, without it."""

    name: str
    size: int

    @property
    def low(self) -> int:
        """Smallest value."""
        return 0

    @property
    def high(self) -> int:
        """Largest value."""
        return self.size - 1


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A number that a kernel computes.

    Attributes:
        number: of the value.
        low: its smallest value.
        high: its largest value.
    """

    number: int
    low: int
    high: int


@dataclasses.dataclass(frozen=True)
class Quotient:
    """An index that is never negative, divided and rounded down."""

    index: Index
    divisor: int

    @property
    def low(self) -> int:
        """Smallest value."""
        return self.index.low // self.divisor

    @property
    def high(self) -> int:
        """Largest value."""
        return self.index.high // self.divisor


@dataclasses.dataclass(frozen=True)
class Remainder:
    """What a division of an index that is never negative leaves."""

    index: Index
    divisor: int

    @property
    def low(self) -> int:
        """Smallest value."""
        return 0

    @property
    def high(self) -> int:
        """Largest value."""
        return self.divisor - 1


Atom: TypeAlias = Variable | Scalar | Quotient | Remainder


@dataclasses.dataclass(frozen=True)
class Index:
    """A sum of atoms times constants, and a constant.

    Attributes:
        terms: pairs of an atom and its factor, which is not zero.
        constant: what is added.
    """

    terms: frozenset[tuple[Atom, int]] = frozenset()
    constant: int = 0

    @property
    def low(self) -> int:
        """Nothing is smaller."""
        return self.constant + sum(
            factor * (atom.low if factor > 0 else atom.high) for atom, factor in self.terms
        )

    @property
    def high(self) -> int:
        """Nothing is larger."""
        return self.constant + sum(
            factor * (atom.high if factor > 0 else atom.low) for atom, factor in self.terms
        )

    def add(self, other: Index | int) -> Index:
        """Returns the sum."""
        if isinstance(other, int):
            return Index(self.terms, self.constant + other)
        factors = dict(self.terms)
        for atom, factor in other.terms:
            factors[atom] = factors.get(atom, 0) + factor
        terms = frozenset((atom, factor) for atom, factor in factors.items() if factor)
        return Index(terms, self.constant + other.constant)

    def times(self, factor: int) -> Index:
        """Returns the product."""
        if not factor:
            return Index()
        terms = frozenset((atom, each * factor) for atom, each in self.terms)
        return Index(terms, self.constant * factor)

    def divide(self, divisor: int) -> tuple[Index, Index]:
        """Returns quotient and remainder of an index that is never negative."""
        exact, rest = self._split(divisor)
        if rest.low >= 0 and rest.high < divisor:
            return exact.times_inverse(divisor), rest
        if rest.low < 0:
            exact, rest = Index(), self
        # What is less than a common unit of the divisor and the others makes no difference.
        units = {math.gcd(factor, divisor) for _, factor in rest.terms}
        for unit in sorted(units, reverse=True):
            coarse, fine = rest._split(unit)
            if unit > 1 and fine.low >= 0 and fine.high < unit and coarse.low >= 0:
                steps = _divide(coarse.times_inverse(unit), divisor // unit)
                return exact.times_inverse(divisor).add(steps[0]), steps[1].times(unit).add(fine)
        quotient, remainder = _divide(rest, divisor)
        return exact.times_inverse(divisor).add(quotient), remainder

    def times_inverse(self, divisor: int) -> Index:
        """Returns the quotient by what divides all factors and the constant."""
        terms = frozenset((atom, factor // divisor) for atom, factor in self.terms)
        return Index(terms, self.constant // divisor)

    def _split(self, unit: int) -> tuple[Index, Index]:
        """Returns the part that is a multiple of a number, and the rest."""
        terms = frozenset(term for term in self.terms if not term[1] % unit)
        rest = self.constant % unit
        return Index(terms, self.constant - rest), Index(self.terms - terms, rest)

    def find_factor(self, name: str) -> int | None:
        """Returns what a variable is multiplied by; None where it is in a quotient or remainder."""
        found = 0
        for atom, factor in self.terms:
            if isinstance(atom, Variable):
                found += factor if atom.name == name else 0
            elif name in list_variables(Index(frozenset([(atom, 1)]))):
                return None
        return found

    def drop(self, name: str) -> Index:
        """Returns what is left without a variable that is in no quotient or remainder."""
        return Index(
            frozenset(t for t in self.terms if not _is_variable(t[0], name)), self.constant
        )


def _divide(index: Index, divisor: int) -> tuple[Index, Index]:
    if divisor == 1:
        return index, Index()
    quotient, remainder = Quotient(index, divisor), Remainder(index, divisor)
    return Index(frozenset([(quotient, 1)])), Index(frozenset([(remainder, 1)]))


def _is_variable(atom: Atom, name: str) -> bool:
    return isinstance(atom, Variable) and atom.name == name


def make_variable(name: str, size: int) -> Index:
    """Returns a variable, or zero where its size leaves nothing else."""
    return Index(frozenset([(Variable(name, size), 1)])) if size > 1 else Index()


def make_scalar(number: int, low: int, high: int) -> Index:
    """Returns a number that a kernel computes, within bounds."""
    return Index(frozenset([(Scalar(number, low, high), 1)])) if low < high else Index(constant=low)


def list_variables(index: Index) -> set[str]:
    """Returns the names of the variables in an index; numbers of scalars as ``#12``."""
    names: set[str] = set()
    for atom, _ in index.terms:
        if isinstance(atom, Variable):
            names.add(atom.name)
        elif isinstance(atom, Scalar):
            names.add(f"#{atom.number}")
        else:
            names |= list_variables(atom.index)
    return names


def list_quotients(index: Index) -> set[tuple[str, int]]:
    """Returns pairs of a variable that is divided by itself alone, and the divisor."""
    found: set[tuple[str, int]] = set()
    for atom, _ in index.terms:
        if not isinstance(atom, Quotient):
            continue
        inner = [each for each, factor in atom.index.terms if factor == 1]
        is_alone = len(inner) == len(atom.index.terms) == 1 and not atom.index.constant
        if is_alone and isinstance(inner[0], Variable):
            found.add((inner[0].name, atom.divisor))
    return found


def flatten_index(index: Sequence[Index], shape: Sequence[int]) -> Index:
    """Returns the place of an element in an array, the last axis of which is contiguous."""
    flat = Index()
    for place, size in zip(index, shape, strict=True):
        flat = flat.times(size).add(place)
    return _join_parts(flat)


def _join_parts(index: Index) -> Index:
    """Returns an index without pairs of a quotient and a remainder that make up what was divided.

    A reshape takes a place apart, the next one puts it together again.
    """
    factors = dict(index.terms)
    for atom, factor in index.terms:
        if not isinstance(atom, Remainder):
            continue
        quotient = Quotient(atom.index, atom.divisor)
        if factors.get(quotient) == factor * atom.divisor:
            del factors[atom], factors[quotient]
            rest = Index(frozenset(factors.items()), index.constant)
            return _join_parts(rest.add(atom.index.times(factor)))
    return index


def unflatten_index(flat: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """Returns the places along all axes of an element of an array of this shape."""
    places = []
    for axis, size in enumerate(shape):
        if size == 1:
            places.append(Index())
            continue
        quotient, flat = flat.divide(math.prod(shape[axis + 1 :]))
        places.append(quotient)
    return tuple(places)
