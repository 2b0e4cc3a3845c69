"""The check of a function with buckets: no padded element reaches what is kept.

Note [Two traces]. One trace at the bucket's size shows arrays of that size, and where Python has
used the size as a number, nothing shows it: the mean of a padded array is divided by the bucket's
size. So the function is traced at other sizes, too. The two graphs must be the same op by op; what
differs in shape is a padded axis, and a literal or a parameter that differs is refused. An op
without a rule may not touch a padded axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tracegraph.buckets.padded import Padded, Padding, RefusedError, TrueSize, as_scalar
from tracegraph.buckets.rules import ALL_RULES
from tracegraph.buckets.rules.context import Context, read_shapes
from tracegraph.constraints.traces import is_same_param, read_array
from tracegraph.constraints.violation import Violation, locate_op
from tracegraph.ir.graph import Constant, Graph, Literal, Op, Operand, Value

# Parameters that hold extents, which the rules or the shapes of the results account for.
_EXTENTS = frozenset(["shape", "new_sizes", "slice_sizes", "start_indices", "limit_indices"])


@dataclasses.dataclass(frozen=True)
class PaddedResult:
    """Where a flat result is cut.

    Attributes:
        axes: its padded axes, each with the size that it follows and the factor.
    """

    axes: tuple[tuple[int, str, int], ...]


def analyze_padding(
    graph: Graph,
    other: Graph,
    sizes: Mapping[str, tuple[int, int]],
    true_sizes: Mapping[int, str],
) -> tuple[tuple[PaddedResult, ...], tuple[Violation, ...]]:
    """Follows padded axes through a function.

    Args:
        graph: its trace at the bucket's sizes.
        other: its trace at other sizes.
        sizes: of each size by name, in the two traces.
        true_sizes: the index of each input that is a true size.

    Returns:
        Where each result is cut, and every op that would let padding through.
    """
    analysis = _Analysis(graph.name, sizes)
    inputs: list[Padded] = []
    for index, (value, twin) in enumerate(zip(graph.inputs, other.inputs, strict=True)):
        meaning = TrueSize(true_sizes[index]) if index in true_sizes else None
        inputs.append(Padded(read_shapes(value.aval, twin.aval, sizes), meaning=meaning))
    found = analysis.walk(graph, other, inputs)
    results = tuple(PaddedResult(_list_cuts(each.axes)) for each in found)
    return results, tuple(analysis.violations.values())


def _list_cuts(axes: Sequence[Padding | None]) -> tuple[tuple[int, str, int], ...]:
    return tuple((axis, p.size, p.scale) for axis, p in enumerate(axes) if p is not None)


class _Analysis:
    """One walk over two traces; collects violations by the op that makes them."""

    def __init__(self, name: str, sizes: Mapping[str, tuple[int, int]]) -> None:
        self._name, self._sizes = name, sizes
        self.violations: dict[int, Violation] = {}

    def walk(self, graph: Graph, other: Graph, inputs: Sequence[Padded]) -> list[Padded]:
        """Returns what is known of the outputs of a graph."""
        known: dict[Any, Padded] = dict(zip(graph.inputs, inputs, strict=True))

        def read(operand: Operand) -> Padded:
            if isinstance(operand, Value):
                return known[operand]
            uniform = as_scalar(operand.value, operand.aval.dtype)
            return Padded((None,) * len(getattr(operand.aval, "shape", ())), uniform)

        counts = [(len(each.ops), len(each.constants)) for each in (graph, other)]
        if counts[0] != counts[1]:
            self._add_paths(graph, other)
            return self._give_up(graph.outputs, other.outputs)
        for mine, theirs in zip(graph.constants, other.constants, strict=True):
            known[mine.value] = self._read_constant(mine, theirs)
        for op, twin in zip(graph.ops, other.ops, strict=True):
            if _name_form(op) != _name_form(twin):
                self._add_paths(graph, other)
                return self._give_up(graph.outputs, other.outputs)
            operands = tuple(map(read, op.operands))
            found = self._apply(Context(op, twin, operands, self._sizes, self.walk))
            known.update(zip(op.results, found, strict=True))
        self._compare_operands(graph.outputs, other.outputs, None)
        return list(map(read, graph.outputs))

    def _apply(self, context: Context) -> list[Padded]:
        """Applies the rule of an op; one that is refused is noted, and its results are unfilled."""
        op, other = context.op, context.other
        try:
            self._compare_operands(op.operands, other.operands, op)
            touches = any(each.is_padded for each in context.operands)
            changes = any(map(_has_other_shape, op.results, other.results))
            rule = ALL_RULES.get(op.name)
            if op.name in ("scan", "while", "cond") or (op.subgraphs and rule is not None):
                return rule(context) if rule is not None else []
            self._compare_params(op, other, has_rule=rule is not None and (touches or changes))
            if rule is None and not touches and not changes:
                return [Padded((None,) * len(_read_shape(value))) for value in op.results]
            if rule is None:
                raise RefusedError(
                    "takes a padded axis, and no rule says what it does with it",
                    "an op without a rule may mix true elements with padding",
                    "compute this outside of the captured function, or write it with other ops",
                )
            found = rule(context)
            self._check_shapes(context, found)
            return found
        except RefusedError as error:
            self._add(op, error)
            return self._give_up(op.results, other.results)

    def _check_shapes(self, context: Context, found: Sequence[Padded]) -> None:
        """Holds a rule to the shapes: an axis is padded if and only if its extent differs."""
        for index, each in enumerate(found):
            shapes = context.read_result(index)
            mine = [None if p is None else (p.size, p.scale) for p in each.axes]
            theirs = [None if p is None else (p.size, p.scale) for p in shapes]
            if mine != theirs:
                raise RefusedError(
                    "has a result whose padded axes do not follow from those of its operands",
                    f"its shape says {theirs}, its rule {mine}",
                    "compute this outside of the captured function",
                )

    def _compare_operands(
        self, first: Sequence[Operand], second: Sequence[Operand], op: Op | None
    ) -> None:
        for mine, theirs in zip(first, second, strict=True):
            if not isinstance(mine, Literal) or not isinstance(theirs, Literal):
                continue
            if not is_same_param(mine.value, theirs.value):
                error = RefusedError(
                    f"computes with {_print(mine.value)}, which follows from a bucket's size",
                    "a replay would compute with the size of the bucket, not of the argument",
                    "use tg.bucket_size(), which is the argument's own size",
                )
                if op is None:
                    self._add_result(error)
                    continue
                raise error

    def _compare_params(self, op: Op, other: Op, *, has_rule: bool) -> None:
        for name, value in op.params.items():
            if has_rule and name in _EXTENTS:
                continue
            if not is_same_param(value, other.params.get(name)):
                raise RefusedError(
                    f"has {name}={_print(value)}, which follows from a bucket's size",
                    "a replay would compute with the size of the bucket, not of the argument",
                    "use tg.bucket_size(), which is the argument's own size",
                )

    def _read_constant(self, mine: Constant, theirs: Constant) -> Padded:
        axes = read_shapes(mine.value.aval, theirs.value.aval, self._sizes)
        if mine.array is theirs.array:
            return Padded(axes)
        first, second = read_array(mine.array), read_array(theirs.array)
        smaller = tuple(slice(0, min(pair)) for pair in zip(first.shape, second.shape, strict=True))
        one, two = first[smaller], second[smaller]
        if one.dtype != two.dtype or not np.array_equal(one, two, equal_nan=one.dtype.kind in "fc"):
            self._add_result(
                RefusedError(
                    f"closes over the array `{mine.name}`, whose values follow a bucket's size",
                    "a replay would compute with those of the bucket",
                    "compute the array with jnp from tg.bucket_size()",
                )
            )
        return Padded(axes)

    def _add_paths(self, graph: Graph, other: Graph) -> None:
        pairs = zip(graph.ops, other.ops, strict=False)
        op = next((mine for mine, theirs in pairs if mine.name != theirs.name), None)
        error = RefusedError(
            "is traced in another way for other sizes",
            "Python has looked at the size, and a replay would take the way of the bucket's size",
            "write it without a choice by shape, or decide before the captured function",
        )
        self._add_result(error) if op is None else self._add(op, error)

    def _give_up(self, mine: Sequence[Operand], theirs: Sequence[Operand]) -> list[Padded]:
        found = []
        for value, twin in zip(mine, theirs, strict=True):
            try:
                found.append(Padded(read_shapes(value.aval, twin.aval, self._sizes)))
            except (RefusedError, ValueError):
                # It is reported already.
                found.append(Padded((None,) * len(_read_shape(value))))
        return found

    def _add(self, op: Op, error: RefusedError) -> None:
        if error.mask is not None:
            violation = Violation(
                "bucket-mask",
                f"a mask of `{self._name}` lets padding through: `{op.name}` {error.what}",
                f"{locate_op(error.mask)}; used by {locate_op(op)}",
                error.why,
                error.fix,
                op,
            )
        else:
            what = f"`{self._name}` lets padding into its results: `{op.name}` {error.what}"
            violation = Violation("bucket-padding", what, locate_op(op), error.why, error.fix, op)
        self.violations.setdefault(id(op), violation)

    def _add_result(self, error: RefusedError) -> None:
        what = f"`{self._name}` {error.what}"
        violation = Violation("bucket-padding", what, self._name, error.why, error.fix)
        self.violations.setdefault(-1 - len(self.violations), violation)


def _name_form(op: Op) -> tuple[str, int, int]:
    """Returns what an op has in common with itself in a trace of another size."""
    return op.name, len(op.operands), len(op.results)


def _has_other_shape(mine: Value, theirs: Value) -> bool:
    return _read_shape(mine) != _read_shape(theirs)


def _read_shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value.aval, "shape", ()))


def _print(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
