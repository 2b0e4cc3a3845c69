"""Functions of elements: the order in which XLA names things makes no difference."""

from __future__ import annotations

import itertools
import random

from tracegraph.lowering.element_loops import (
    ElementOperand,
    LoopFunction,
    LoopOp,
    normalize_loop,
)

EACH, SINGLE = (ElementOperand("F32", is_single=flag) for flag in (False, True))
# a - b * c, and b * c, with an operand that is not used.
OPERANDS = (EACH, EACH, SINGLE, ElementOperand("S32", is_single=False))


def shuffle(order: tuple[int, ...]) -> LoopFunction:
    """Returns the function with its operands in another order."""
    place = {operand: index for index, operand in enumerate(order)}
    ops = (
        LoopOp("multiply", "F32", (place[1], place[2])),
        LoopOp("subtract", "F32", (place[0], 4)),
    )
    return LoopFunction(tuple(OPERANDS[operand] for operand in order), ops, (5, 4))


def test_the_order_of_operands_makes_no_difference() -> None:
    wanted = normalize_loop(shuffle((0, 1, 2, 3)), 8)
    assert wanted.arguments == (0, 1, 2, 3, 4, 5)
    for order in itertools.permutations(range(4)):
        loop = normalize_loop(shuffle(order), 8)
        assert loop.function == wanted.function
        # Where the kernel has them.
        assert [order[place] for place in loop.arguments[:4]] == [0, 1, 2, 3]
        assert loop.arguments[4:] == (4, 5)


def test_the_order_of_operations_makes_no_difference() -> None:
    ops = [LoopOp("negate", "F32", (index % 2,)) for index in range(4)]
    ops[2], ops[3] = LoopOp("abs", "F32", (0,)), LoopOp("abs", "F32", (1,))
    wanted = None
    for seed in range(5):
        order = list(range(4))
        random.Random(seed).shuffle(order)
        place = {op: 2 + index for index, op in enumerate(order)}
        function = LoopFunction(
            (EACH, EACH), tuple(ops[op] for op in order), tuple(place[op] for op in range(4))
        )
        loop = normalize_loop(function, 8)
        wanted = wanted or loop
        assert loop == wanted


def test_what_no_result_needs_goes_and_other_functions_differ() -> None:
    ops = (LoopOp("negate", "F32", (0,)), LoopOp("exponential", "F32", (0,)))
    negated = normalize_loop(LoopFunction((EACH,), ops, (1,)), 8)
    assert [op.opcode for op in negated.function.ops] == ["negate"]
    raised = normalize_loop(LoopFunction((EACH,), ops, (2,)), 8)
    assert negated.function != raised.function
    assert negated != normalize_loop(LoopFunction((EACH,), ops, (1,)), 9)


def test_a_result_may_be_an_operand() -> None:
    loop = normalize_loop(LoopFunction((EACH, EACH), (), (1, 0)), 8)
    assert loop.function.results == (0, 1)
    assert loop.arguments == (1, 0, 2, 3)
