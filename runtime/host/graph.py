"""HostGraph: an executable graph whose nodes are XLA:CPU calls and copies in an arena."""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tracegraph.runtime.graph import CallNode, CopyNode, Stage
from tracegraph.runtime.host.buffer import HostBuffer
from tracegraph.runtime.jax_interop import ArrayImpl

_get_pointer = ArrayImpl.unsafe_buffer_pointer


class HostGraph:
    """One stage, bound to the buffers of one arena; `launch` returns when all nodes are done.

    Args:
        stage: nodes in an order that respects its edges.
        buffers: every buffer of the arena, by name.
    """

    def __init__(self, stage: Stage, buffers: Mapping[str, HostBuffer]) -> None:
        self._launches = [
            bind_node(node, buffers, is_captured=stage.is_captured) for node in stage.nodes
        ]

    def launch(self) -> None:
        """Runs every node once, in program order."""
        for launch in self._launches:
            launch()


def bind_node(
    node: CallNode | CopyNode, buffers: Mapping[str, HostBuffer], *, is_captured: bool
) -> Callable[[], None]:
    """Returns a function that runs one node on fixed buffers."""
    arguments = [buffers[name] for name in node.arguments]
    results = [buffers[name] for name in node.results]
    if isinstance(node, CopyNode):
        return _bind_copy(arguments[0], results[0])
    can_alias = all(buffer.alias is not None for buffer in arguments + results)
    if is_captured and can_alias and results:
        return _bind_call(node.executable, arguments, results)
    return _bind_isolated_call(node.executable, arguments, results)


def _bind_copy(source: HostBuffer, target: HostBuffer) -> Callable[[], None]:
    def launch() -> None:
        ctypes.memmove(target.address, source.address, target.nbytes)

    return launch


def _bind_call(
    executable: Callable[..., Any], arguments: list[HostBuffer], results: list[HostBuffer]
) -> Callable[[], None]:
    """Binds a call that reads the arena in place and whose results are copied into it."""
    inputs = [buffer.alias for buffer in arguments]
    addresses = [buffer.address for buffer in results]
    sizes = [buffer.nbytes for buffer in results]
    memmove = ctypes.memmove

    if len(results) == 1:
        address, nbytes = addresses[0], sizes[0]

        def launch_one() -> None:
            (output,) = executable(*inputs)
            output.block_until_ready()
            memmove(address, output.unsafe_buffer_pointer(), nbytes)

        return launch_one

    def launch() -> None:
        outputs = executable(*inputs)
        # The outputs of one XLA:CPU execution share one definition event.
        outputs[0].block_until_ready()
        copies = map(memmove, addresses, map(_get_pointer, outputs), sizes)
        collections.deque(copies, maxlen=0)

    return launch


def _bind_isolated_call(
    executable: Callable[..., Any], arguments: list[HostBuffer], results: list[HostBuffer]
) -> Callable[[], None]:
    """Binds a call on private copies: eager code may keep its arguments or return them."""

    def launch() -> None:
        outputs = executable(*[buffer.to_jax(buffer.snapshot()) for buffer in arguments])
        # All outputs are read before any buffer is written: an output may alias an argument.
        values = [np.asarray(output) for output in outputs]
        for buffer, value in zip(results, values, strict=True):
            np.copyto(buffer.view, value)

    return launch
