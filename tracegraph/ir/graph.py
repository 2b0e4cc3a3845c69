"""The Graph: the dataflow of one function, with static shapes.

Grammar::

    Graph    ::= name, inputs, constants, ops, outputs, aliases
    Constant ::= Value = array, with a name
    Op       ::= results = primitive[params](operands) { subgraphs }   @ origin
    operand  ::= Value | Literal
    Origin   ::= the user's source line, JAX's name stack, the stream

Single assignment: a Value is an input, a constant or the result of exactly one op, and is used
only after that. Records compare by identity; two graphs are equal when their texts are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

# Ops that compute nothing: each replay records an event of the user's, or waits for one.
EXTERNAL_MARKS = frozenset(["tg_external_record", "tg_external_wait"])
# The same inside of the capture: they record an event on a stream, or make a stream wait for one.
STREAM_MARKS = frozenset(["tg_record", "tg_wait"]) | EXTERNAL_MARKS
# How JAX's name stack shows a backward pass.
BACKWARD_SCOPE = "transpose("


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """One array of the dataflow: a number, unique in its graph, and JAX's abstract value."""

    number: int
    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Static shape."""
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        """NumPy dtype, or JAX's extended dtype for typed PRNG keys."""
        return self.aval.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Literal:
    """A scalar written into an op."""

    value: Any
    aval: Any


Operand: TypeAlias = Value | Literal


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an op comes from.

    Attributes:
        source: the user's line, as ``file.py:12 in step``.
        scope: JAX's name stack, as ``transpose(jvp(layer))``.
        stream: number of the stream that the op was traced on; 0 is the capturing stream.
        backward_on: number of the stream that called the backward pass of the op; None for an op
            of no backward pass.
        equation_context: JAX's settings when the equation was traced (opaque, bound again with it).
    """

    source: str
    scope: str = ""
    stream: int = 0
    equation_context: Any = dataclasses.field(default=None, compare=False, repr=False)
    backward_on: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One primitive applied to operands.

    Attributes:
        results: what it defines.
        primitive: JAX's primitive.
        operands: what it reads.
        params: the primitive's parameters, as JAX binds them.
        subgraphs: the functions among the parameters as Graphs, by name (``branches[0]``).
        origin: source line, scope and stream.
    """

    results: tuple[Value, ...]
    primitive: Any
    operands: tuple[Operand, ...]
    params: Mapping[str, Any]
    subgraphs: tuple[tuple[str, Graph], ...]
    origin: Origin

    @property
    def name(self) -> str:
        """The primitive's name, as ``dot_general``."""
        return self.primitive.name


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An array that the function closes over.

    Attributes:
        value: the Value that stands for it in the graph.
        name: ``c0``, ``c1``, ... in order of first use.
        array: the concrete array.
    """

    value: Value
    name: str
    array: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The dataflow of one function.

    Attributes:
        name: the function's name.
        inputs: one Value per flat dynamic argument.
        constants: closed-over arrays.
        ops: in program order.
        outputs: one operand per flat result.
        aliases: pairs (output index, input index) that share one buffer (donation granted).
    """

    name: str
    inputs: tuple[Value, ...]
    constants: tuple[Constant, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Operand, ...]
    aliases: tuple[tuple[int, int], ...] = ()

    @property
    def has_streams(self) -> bool:
        """True when an op is on a stream other than the capturing one, or orders streams."""
        return any(op.origin.stream or op.name in STREAM_MARKS for op in self.ops)

    @property
    def next_number(self) -> int:
        """The number behind those of all values: a new value can have it."""
        values = [*self.inputs, *(constant.value for constant in self.constants)]
        values += [result for op in self.ops for result in op.results]
        return 1 + max((value.number for value in values), default=-1)
