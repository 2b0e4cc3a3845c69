"""Which values of a graph depend on data: on an argument, on state, or on the host.

A forward walk, made on first use: most graphs hold no op that needs it. A value depends
on data when an operand of its op does; literals and constants do not. Loops are walked until their
carried values no longer change, so that a counter that starts from a literal does not depend on
data even where another carry of the loop does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from tracegraph.ir.graph import Graph, Op, Operand, Value
from tracegraph.ir.kernel_calls import KERNEL_CALLS

# Their results change at every replay, whatever their operands are.
_CHANGING = frozenset({"pure_callback", "io_callback", "rng_uniform", "infeed"})
_OUR_PLATFORMS = frozenset({"cpu", "cuda", "gpu", "rocm"})


class Dependence:
    """The values of one graph and of its subgraphs that depend on data.

    Args:
        graph: the whole graph.
        inputs: which of its inputs count as data; by default all.
    """

    def __init__(self, graph: Graph, inputs: Sequence[bool] | None = None) -> None:
        self._graph = graph
        self._inputs = [True] * len(graph.inputs) if inputs is None else inputs

    def depends(self, operand: Operand) -> bool:
        """True when the operand's value can differ from one replay to the next."""
        return self._walked.depends(operand)

    def has_dependent_predicate(self, op: Op) -> bool:
        """True for a ``cond`` or a ``while`` whose path through the graph depends on data."""
        if op.name == "cond":
            return self.depends(op.operands[0])
        if op.name == "while":
            return self.depends(_get_subgraph(op, "cond_jaxpr").outputs[0])
        return False

    @functools.cached_property
    def _walked(self) -> _Walk:
        return _Walk(self._graph, self._inputs)


class _Walk:
    """One walk over a graph and its subgraphs."""

    def __init__(self, graph: Graph, inputs: Sequence[bool]) -> None:
        self._is_dependent: dict[int, bool] = {}
        self._walk(graph, inputs)

    def depends(self, operand: Operand) -> bool:
        """True when the operand's value can differ from one replay to the next."""
        return isinstance(operand, Value) and self._is_dependent.get(id(operand), True)

    def _walk(self, graph: Graph, inputs: Sequence[bool]) -> list[bool]:
        for value, is_dependent in zip(graph.inputs, inputs, strict=True):
            self._mark(value, is_dependent)
        for constant in graph.constants:
            self._mark(constant.value, False)
        for op in graph.ops:
            for value, is_dependent in zip(op.results, self._transfer(op), strict=True):
                self._mark(value, is_dependent)
        return [self.depends(output) for output in graph.outputs]

    def _mark(self, value: Value, is_dependent: bool) -> None:
        before = self._is_dependent.get(id(value), False)
        self._is_dependent[id(value)] = before or is_dependent or _is_reference(value)

    def _transfer(self, op: Op) -> list[bool]:
        operands = [self.depends(operand) for operand in op.operands]
        if op.name in _CHANGING:
            return [True] * len(op.results)
        if op.name == "while":
            return self._transfer_while(op, operands)
        if op.name == "scan":
            return self._transfer_scan(op, operands)
        if op.name == "cond":
            return self._transfer_cond(op, operands)
        return self._transfer_call(op, operands)

    def _transfer_while(self, op: Op, operands: list[bool]) -> list[bool]:
        condition_end = op.params["cond_nconsts"]
        body_end = condition_end + op.params["body_nconsts"]
        condition_constants = operands[:condition_end]
        body_constants, carry = operands[condition_end:body_end], operands[body_end:]
        body, condition = _get_subgraph(op, "body_jaxpr"), _get_subgraph(op, "cond_jaxpr")
        while True:
            after = _merge(carry, self._walk(body, body_constants + carry))
            if after == carry:
                break
            carry = after
        (is_predicate_dependent,) = self._walk(condition, condition_constants + carry)
        return [is_predicate_dependent or value for value in carry]

    def _transfer_scan(self, op: Op, operands: list[bool]) -> list[bool]:
        body = _get_subgraph(op, "jaxpr")
        # The parameters that say so were renamed in jax 0.11; the ranks say it on every version.
        sliced = _count_stacked(op.operands, body.inputs)
        carried = len(op.results) - _count_stacked(op.results, body.outputs)
        begin = len(operands) - sliced - carried
        constants, carry = operands[:begin], operands[begin : begin + carried]
        slices = operands[begin + carried :]
        while True:
            outputs = self._walk(body, constants + carry + slices)
            after = _merge(carry, outputs[:carried])
            if after == carry:
                return outputs
            carry = after

    def _transfer_cond(self, op: Op, operands: list[bool]) -> list[bool]:
        results = [operands[0]] * len(op.results)
        for _, branch in op.subgraphs:
            results = _merge(results, self._walk(branch, operands[1:]))
        return results

    def _transfer_call(self, op: Op, operands: list[bool]) -> list[bool]:
        is_any_dependent = any(operands)
        if op.name in KERNEL_CALLS or not op.subgraphs:
            return [is_any_dependent] * len(op.results)
        if len(op.subgraphs) == 1 and _is_plain_call(op, op.subgraphs[0][1]):
            return self._walk(op.subgraphs[0][1], operands)
        for _, graph in op.subgraphs:
            self._walk(graph, [is_any_dependent] * len(graph.inputs))
        return [is_any_dependent] * len(op.results)


def iterate_ops(graph: Graph) -> Iterator[Op]:
    """Yields every op in program order, those of subgraphs after the op that holds them.

    Kernels written in a language of their own, and branches for platforms that are not ours, are
    not entered: nothing in them runs as an op of the graph.
    """
    for op in graph.ops:
        yield op
        if op.subgraphs:
            for subgraph in list_subgraphs(op):
                yield from iterate_ops(subgraph)


def list_subgraphs(op: Op) -> list[Graph]:
    """Returns the subgraphs of an op that can run in a capture."""
    if op.name in KERNEL_CALLS:
        return []
    subgraphs = [graph for _, graph in op.subgraphs]
    platforms = op.params.get("branches_platforms")
    if op.name != "cond" or platforms is None:
        return subgraphs
    return [
        graph
        for graph, names in zip(subgraphs, platforms, strict=True)
        if names is None or _OUR_PLATFORMS.intersection(names)
    ]


def _get_subgraph(op: Op, name: str) -> Graph:
    return next(graph for key, graph in op.subgraphs if key == name)


def _is_plain_call(op: Op, graph: Graph) -> bool:
    return len(graph.inputs) == len(op.operands) and len(graph.outputs) == len(op.results)


def _is_reference(value: Value) -> bool:
    # A mutable reference holds what was last written to it, which no operand shows.
    return "Ref" in type(value.aval).__name__


def _count_stacked(outside: Sequence[Operand], inside: Sequence[Operand]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(len(stacked.aval.shape) > len(one.aval.shape) for stacked, one in pairs)


def _merge(first: list[bool], second: list[bool]) -> list[bool]:
    return [a or b for a, b in zip(first, second, strict=True)]
