"""What the passes share: replacing operands, and numbering values in order of definition."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from tracegraph.ir import Graph, Op, Operand, Value


def replace_operands(op: Op, replacements: Mapping[Value, Operand]) -> Op:
    """Returns the op with operands replaced; the op itself where none of them is."""
    operands = tuple(find_replacement(operand, replacements) for operand in op.operands)
    if all(new is old for new, old in zip(operands, op.operands, strict=True)):
        return op
    return dataclasses.replace(op, operands=operands)


def find_replacement(operand: Operand, replacements: Mapping[Value, Operand]) -> Operand:
    """Returns what stands for an operand: its replacement, or itself."""
    return replacements.get(operand, operand) if isinstance(operand, Value) else operand


def renumber_graph(graph: Graph) -> Graph:
    """Returns the graph with values numbered, and constants named, in order of definition."""
    numbers = itertools.count()
    renamed: dict[Value, Operand] = {}

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
        op = replace_operands(op, renamed)
        results = tuple(define(value) for value in op.results)
        is_same = all(new is old for new, old in zip(results, op.results, strict=True))
        ops.append(op if is_same else dataclasses.replace(op, results=results))
    outputs = tuple(find_replacement(operand, renamed) for operand in graph.outputs)
    return Graph(graph.name, inputs, constants, tuple(ops), outputs, graph.aliases)
