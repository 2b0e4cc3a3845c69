"""Calls that return when their work is done: `TRACEGRAPH_LAUNCH_BLOCKING=1` on the host device.

XLA:CPU may return the arrays of a call before they are computed; what fails then is raised where
they are read. A call that waits raises it itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.graph_nodes import Node
from tracegraph.runtime.definition.nodes import CallNode
from tracegraph.runtime.jax_interop import get_quick_call


def make_blocking(definition: GraphDefinition) -> GraphDefinition:
    """Returns a definition with the same nodes, whose calls wait for their results."""
    stages = tuple(
        dataclasses.replace(stage, nodes=tuple(map(_make_blocking_node, stage.nodes)))
        for stage in definition.stages
    )
    return dataclasses.replace(definition, stages=stages)


def _make_blocking_node(node: Node) -> Node:
    if not isinstance(node, CallNode):
        return node
    call = get_quick_call(node.executable)
    return dataclasses.replace(node, executable=functools.partial(_call_and_wait, call))


def _call_and_wait(call: Callable[..., Any], *arguments: Any) -> Any:
    return jax.block_until_ready(call(*arguments))
