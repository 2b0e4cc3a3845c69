"""What the passes share: replacing operands, and numbering values in order of definition."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TypeAlias

from tracegraph.ir.graph import Graph, Op, Operand, Value

# Values that are replaced; no other operand is ever a key.
Replacements: TypeAlias = dict[Operand, Operand]


def replace_operands(op: Op, replacements: Replacements) -> Op:
    """Returns the op with operands replaced; the op itself where none of them is."""
    if replacements.keys().isdisjoint(op.operands):
        return op
    operands = tuple([replacements.get(operand, operand) for operand in op.operands])
    return Op(op.results, op.primitive, operands, op.params, op.subgraphs, op.origin)


def find_replacement(operand: Operand, replacements: Replacements) -> Operand:
    """Returns what stands for an operand: its replacement, or itself."""
    return replacements.get(operand, operand)


def renumber_graph(graph: Graph) -> Graph:
    """Returns the graph with values numbered, and constants named, in order of definition."""
    numbers = itertools.count()
    renamed: Replacements = {}

    def define(value: Value) -> Value:
        number = next(numbers)
        if value.number == number:
            return value
        renamed[value] = new = Value(number, value.aval)
        return new

    inputs = tuple(define(value) for value in graph.inputs)
    constants = tuple(
        dataclasses.replace(constant, value=define(constant.value), name=f"c{index}")
        for index, constant in enumerate(graph.constants)
    )
    ops = []
    for op in graph.ops:
        operands = tuple([renamed.get(operand, operand) for operand in op.operands])
        results = tuple([define(value) for value in op.results])
        # Values compare by identity.
        if results != op.results or operands != op.operands:
            op = Op(results, op.primitive, operands, op.params, op.subgraphs, op.origin)
        ops.append(op)
    outputs = tuple(find_replacement(operand, renamed) for operand in graph.outputs)
    return Graph(graph.name, inputs, constants, tuple(ops), outputs, graph.aliases)
