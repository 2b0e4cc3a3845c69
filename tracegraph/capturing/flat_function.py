"""FlatFunction: the ops of one region as a function of physical arrays."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tracegraph.ir.graph import Op, Operand, Value
from tracegraph.jax_internals import bind_op, to_logical, to_physical


@dataclasses.dataclass(frozen=True, eq=False)
class FlatFunction:
    """A traceable function that binds ops in order; it is what its fields say, and nothing else.

    Attributes:
        name: as it shows in profiles.
        ops: in program order.
        inputs: the values of the arguments.
        outputs: what it returns.
        marks: by the identity of an op the scope that it is bound in.
        embedded: the array of each constant that the program holds.
    """

    name: str
    ops: Sequence[Op]
    inputs: Sequence[Value]
    outputs: Sequence[Operand]
    marks: Mapping[int, str] = dataclasses.field(default_factory=dict)
    embedded: Mapping[Value, Any] = dataclasses.field(default_factory=dict)

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Returns the physical arrays of the outputs."""
        # Converted here, where it becomes a part of the program and is not computed.
        constants = [(value, to_physical(x, value.aval)) for value, x in self.embedded.items()]
        known = {
            value.number: to_logical(array, value.aval)
            for value, array in (*zip(self.inputs, arrays, strict=True), *constants)
        }

        def read(operand: Operand) -> Any:
            return known[operand.number] if isinstance(operand, Value) else operand.value

        for op in self.ops:
            mark = self.marks.get(id(op))
            with jax.named_scope(mark) if mark else contextlib.nullcontext():
                results = bind_op(op, [read(operand) for operand in op.operands])
            known.update((v.number, r) for v, r in zip(op.results, results, strict=True))
        return tuple(to_physical(read(operand), operand.aval) for operand in self.outputs)


def make_flat_function(
    name: str,
    ops: Sequence[Op],
    inputs: Sequence[Value],
    outputs: Sequence[Operand],
    *,
    marks: Mapping[int, str] | None = None,
    embedded: Mapping[Value, Any] | None = None,
) -> FlatFunction:
    """Returns the function of some ops, with those of the embedded constants that it reads."""
    read_or_made = {value for op in ops for value in op.operands}.union(outputs)
    held = {value: array for value, array in (embedded or {}).items() if value in read_or_made}
    return FlatFunction(name, ops, inputs, outputs, marks or {}, held)
