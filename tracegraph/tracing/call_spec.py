"""CallSpec and ResultSpec: what a replay needs of the call that was captured, as plain values.

A `PreparedCall` has the user's function and options, a `CheckedGraph` the ops; a replay needs
neither. What these records hold can be written to a file.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tracegraph.options import LIVE_OUTPUTS, Options
from tracegraph.probing.collect_probes import ProbeSpec
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import ArgumentSpec, PreparedCall, list_donated
from tracegraph.tracing.signature import Signature
from tracegraph.tracing.spellings import Spellings, read_spellings


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """The calls that one graph takes.

    More than six fields because it is all that is known of the arguments.

    Attributes:
        name: the captured function's name.
        signature: trees and types of the dynamic arguments, and the values of the static ones.
        arguments: the dynamic arguments, in flat order.
        names: one unique name per dynamic leaf.
        statics: static arguments and static leaves, each with its name.
        spellings: the ways to write a call.
        moved: names of the positional arguments that the captured call gave by keyword.
    """

    name: str
    signature: Signature
    arguments: tuple[ArgumentSpec, ...]
    names: tuple[str, ...]
    statics: tuple[tuple[str, Any], ...]
    spellings: Spellings
    moved: tuple[str, ...] = ()

    @functools.cached_property
    def donated(self) -> frozenset[int]:
        """The indices of the donated dynamic leaves."""
        return list_donated(self.arguments)


@dataclasses.dataclass(frozen=True)
class ResultSpec:
    """The results of one graph.

    Attributes:
        tree: structure of what a call returns.
        avals: JAX's abstract value of each flat result, those of probes last.
        aliases: pairs (output index, input index) that share one buffer.
        probes: of the function.
        outputs: how long results live: as the option of `capture`, or live in a recorded block.
    """

    tree: Any
    avals: tuple[Any, ...]
    aliases: tuple[tuple[int, int], ...]
    probes: tuple[ProbeSpec, ...] = ()
    outputs: str = "fresh"

    @property
    def is_live(self) -> bool:
        """True for a recorded block."""
        return self.outputs == LIVE_OUTPUTS


def make_call_spec(prepared: PreparedCall) -> CallSpec:
    """Returns what calls a graph takes; it keeps no value of a dynamic argument.

    Args:
        prepared: the call that it is captured from.
    """
    return CallSpec(
        prepared.options.name,
        prepared.signature,
        prepared.list_arguments(),
        prepared.names,
        tuple(prepared.list_static_values()),
        read_spellings(prepared.function, prepared.options),
        prepared.bound.moved,
    )


def make_result_spec(checked: CheckedGraph, options: Options) -> ResultSpec:
    """Returns what a graph returns.

    Args:
        checked: the traced graph.
        options: how it is captured.
    """
    tree = checked.out_tree
    if options.outputs == LIVE_OUTPUTS:
        # The others are shown by arrays of the block, which are there already.
        tree, _ = tree.children()
    avals = tuple(operand.aval for operand in checked.graph.outputs)
    return ResultSpec(tree, avals, checked.graph.aliases, checked.probes, options.outputs)
