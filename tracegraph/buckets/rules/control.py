"""Branches, loops and calls: what is known is followed through their sub-graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tracegraph.buckets.padded import Padded, Padding, RefusedError
from tracegraph.buckets.rules.context import Context, merge_axis
from tracegraph.jax_internals import measure_scan


def apply_call(context: Context) -> list[Padded]:
    """Follows a call."""
    ((_, graph),), ((_, other),) = context.op.subgraphs, context.other.subgraphs
    return context.walk(graph, other, context.operands)


def apply_cond(context: Context) -> list[Padded]:
    """Follows all branches."""
    if context.operands[0].is_padded:
        raise RefusedError(
            "takes a branch by a padded array", "a branch is one for all", "use jnp.where"
        )
    joined: list[Padded] | None = None
    pairs = zip(context.op.subgraphs, context.other.subgraphs, strict=True)
    for (_, graph), (_, other) in pairs:
        found = context.walk(graph, other, context.operands[1:])
        joined = found if joined is None else join_all(joined, found)
    return joined or []


def apply_while(context: Context) -> list[Padded]:
    """Follows a loop until nothing more is forgotten."""
    params = context.op.params
    graphs, others = dict(context.op.subgraphs), dict(context.other.subgraphs)
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    operands = context.operands
    carry = list(operands[second:])
    while True:
        condition = [*operands[:first], *carry]
        (goes_on,) = context.walk(graphs["cond_jaxpr"], others["cond_jaxpr"], condition)
        if goes_on.is_padded:
            raise RefusedError(
                "loops until a padded array is done",
                "the padding would decide how long the loop runs",
                "reduce the condition over a mask",
            )
        body = [*operands[first:second], *carry]
        after = join_all(carry, context.walk(graphs["body_jaxpr"], others["body_jaxpr"], body))
        if after == carry:
            return carry
        carry = after


def apply_scan(context: Context) -> list[Padded]:
    """Follows a scan over a fixed axis."""
    ((_, graph),), ((_, other),) = context.op.subgraphs, context.other.subgraphs
    params = context.op.params
    constants, carried = measure_scan(params)
    operands = context.operands
    if params["length"] != context.other.params["length"]:
        raise RefusedError(
            "scans over a padded axis",
            "the steps over the padding would change what is carried",
            "scan over a fixed axis, or give that axis no buckets",
        )
    carry = list(operands[constants : constants + carried])
    rows = [_drop_first(each) for each in operands[constants + carried :]]
    while True:
        found = context.walk(graph, other, [*operands[:constants], *carry, *rows])
        after = join_all(carry, found[:carried])
        if after == carry:
            break
        carry = after
    return [*carry, *(Padded((None, *each.axes), leak=each.leak) for each in found[carried:])]


def _drop_first(sequence: Padded) -> Padded:
    return Padded(sequence.axes[1:], sequence.uniform, leak=sequence.leak)


def join_all(first: Sequence[Padded], second: Sequence[Padded]) -> list[Padded]:
    """Returns what holds for either of two values, pair by pair."""
    return [_join(*pair) for pair in zip(first, second, strict=True)]


def _join(first: Padded, second: Padded) -> Padded:
    axes: list[Padding | None] = []
    for axis, (one, other) in enumerate(zip(first.axes, second.axes, strict=True)):
        padding = merge_axis([one, other], axis)
        fills = first.find_fill(axis), second.find_fill(axis)
        if padding is not None and fills[0] is not None and fills[0] == fills[1]:
            padding = dataclasses.replace(padding, fill=fills[0])
        axes.append(padding)
    is_same = first.uniform is not None and first.uniform == second.uniform
    return Padded(
        tuple(axes),
        first.uniform if is_same else None,
        first.meaning if first.meaning == second.meaning else None,
        first.leak or second.leak,
    )


_CALLS = """
    jit pjit closed_call core_closed_call core_call call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr remat remat2 checkpoint
"""
RULES = {
    **dict.fromkeys(_CALLS.split(), apply_call),
    "cond": apply_cond,
    "while": apply_while,
    "scan": apply_scan,
}
