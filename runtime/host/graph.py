"""HostGraph: an executable graph whose nodes are XLA:CPU calls and copies in an arena."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tracegraph.runtime.definition.event_nodes import HostEvent
from tracegraph.runtime.definition.graph import GraphDefinition, Stage
from tracegraph.runtime.definition.graph_nodes import Node
from tracegraph.runtime.definition.nodes import CallNode, CopyNode
from tracegraph.runtime.host.buffer import HostBuffer
from tracegraph.runtime.host.owned_buffer import OwnedBuffer
from tracegraph.runtime.jax_interop import ArrayImpl, get_quick_call

_get_pointer = ArrayImpl.unsafe_buffer_pointer
_is_deleted = ArrayImpl.is_deleted
# `memmove` without a result: `ctypes.memmove` makes an int of the address that it returns.
_copy_bytes = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.pythonapi)
)


class HostGraph:
    """One stage, bound to the buffers of one arena.

    When `launch` returns, everything that goes into the arena is written, and nothing reads it any
    more. Results of calls that read no arena may still be on their way, as those of `jax.jit`.

    Args:
        stage: nodes in an order that respects its edges.
        buffers: every buffer of the arena, by name.
        detours: what does not go through the arena.
    """

    handles = None

    def __init__(self, stage: Stage, buffers: Mapping[str, Any], detours: Detours) -> None:
        launches = bind_stage(stage, buffers, detours)
        self.launch = launches[0] if len(launches) == 1 else _chain(launches)


@dataclasses.dataclass(frozen=True)
class Detours:
    """Names of the buffers whose values do not go through the arena, see Note [Rebinding].

    Attributes:
        inputs: that only quick calls read: these are pointed at the caller's arrays.
        results: that leave the graph as XLA made them.
    """

    inputs: frozenset[str] = frozenset()
    results: frozenset[str] = frozenset()


def bind_stage(
    stage: Stage, buffers: Mapping[str, Any], detours: Detours
) -> list[Callable[[], None]]:
    """Returns one function per node that runs it on fixed buffers, but for detours."""
    return [_bind_node(node, buffers, detours, stage.is_captured) for node in stage.nodes]


def find_lock_free_call(
    definition: GraphDefinition, buffers: Mapping[str, Any], detours: Detours
) -> Callable[..., Any] | None:
    """Returns the one call of a capture, if it takes the inputs and gives the results."""
    nodes = [node for stage in definition.stages for node in stage.nodes]
    node = nodes[0] if len(nodes) == 1 else None
    if not isinstance(node, CallNode) or node.in_place:
        return None
    if not is_quick(node, buffers, is_captured=definition.stages[0].is_captured):
        return None
    if (node.arguments, node.results) != (definition.inputs, definition.outputs):
        return None
    if not (detours.inputs >= {*node.arguments} and detours.results >= {*node.results}):
        return None
    return get_quick_call(node.executable)


def waits_for_inputs(
    definition: GraphDefinition, buffers: Mapping[str, Any], detours: Detours
) -> bool:
    """True when a launch waits for a call, and so for the rebound inputs of it."""
    if not detours.inputs:
        return False
    for stage in definition.stages:
        for node in stage.nodes:
            if not is_quick(node, buffers, is_captured=stage.is_captured):
                return True
            assert isinstance(node, CallNode)
            kept = [name for name in node.results[node.in_place :] if name not in detours.results]
            read = [buffers[name] for name in node.arguments if name not in detours.inputs]
            if kept or not all(isinstance(buffer, OwnedBuffer) for buffer in read):
                return True
    return False


def find_detours(
    definition: GraphDefinition, buffers: Mapping[str, Any], fresh: Sequence[str]
) -> Detours:
    """Returns what need not go through the arena.

    Args:
        definition: the whole capture.
        buffers: every buffer of the arena, by name.
        fresh: results that users get as immutable values.
    """
    quick: list[Node] = []
    slow: list[Node] = []
    for stage in definition.stages:
        for node in stage.nodes:
            is_slow = not is_quick(node, buffers, is_captured=stage.is_captured)
            (slow if is_slow else quick).append(node)
    read = {name for node in (*quick, *slow) for name in node.arguments}
    made = {name for node in quick for name in node.results}
    # Two results that are one value are two arrays: donating one must not delete the other.
    single = {name for name in fresh if fresh.count(name) == 1}
    kept = {name for node in slow for name in node.arguments} | set(definition.outputs)
    kept |= {slot.name for slot in definition.slots if slot.is_resident}
    inputs = (name for name in definition.inputs if name in read and name not in kept)
    return Detours(frozenset(inputs), frozenset(single & (made - read)))


def find_in_place(definition: GraphDefinition, buffers: Mapping[str, Any]) -> list[str]:
    """Returns the resident values that are donated to a quick call, see Note [In place]."""
    return [
        name
        for stage in definition.stages
        for node in stage.nodes
        if isinstance(node, CallNode) and is_quick(node, buffers, is_captured=stage.is_captured)
        for name in node.arguments[: node.in_place]
    ]


def is_quick(node: Node, buffers: Mapping[str, Any], *, is_captured: bool) -> bool:
    """True for a call that XLA can serve from the arena's own bytes."""
    names = (*node.arguments, *node.results)
    can_alias = all(buffers[name].alias is not None for name in names)
    return isinstance(node, CallNode) and is_captured and can_alias and bool(node.results)


def _chain(launches: list[Callable[[], None]]) -> Callable[[], None]:
    def launch() -> None:
        for each in launches:
            each()

    return launch


def _bind_node(
    node: Node, buffers: Mapping[str, Any], detours: Detours, is_captured: bool
) -> Callable[[], None]:
    """Returns what runs one node."""
    arguments = [buffers[name] for name in node.arguments]
    results = [buffers[name] for name in node.results]
    if isinstance(node, CopyNode):
        return _bind_copy(node, arguments[0], results[0])
    # The other kinds of node are a GPU's.
    assert isinstance(node, CallNode)
    if isinstance(node.executable, HostEvent):
        return _bind_event(node.executable, arguments)
    if is_quick(node, buffers, is_captured=is_captured):
        return _bind_call(node, arguments, results, detours)
    return _bind_isolated_call(node.executable, arguments, results)


def _bind_event(event: HostEvent, before: list[Any]) -> Callable[[], None]:
    """Binds an event behind the calls that wrote some buffers."""
    # Calls have waited for what is in the arena: a call that is not quick reads it.
    owned = [buffer for buffer in before if isinstance(buffer, OwnedBuffer)]

    def launch() -> None:
        for buffer in owned:
            buffer.wait()
        event()

    return launch


def _bind_copy(node: CopyNode, source: HostBuffer, target: HostBuffer) -> Callable[[], None]:
    def launch() -> None:
        _copy_bytes(
            target.address + node.target.offset,
            source.address + node.source.offset,
            node.source.nbytes,
        )

    return launch


def _bind_call(
    node: CallNode, arguments: list[Any], results: list[Any], detours: Detours
) -> Callable[[], None]:
    """Binds a call that reads the arena in place."""
    call = get_quick_call(node.executable)
    inputs = [buffer.alias for buffer in arguments]
    for index, buffer in enumerate(arguments):
        if isinstance(buffer, OwnedBuffer):
            buffer.bind(inputs, index)
        elif buffer.name in detours.inputs:
            buffer.sites.append((inputs, index))
    is_handed_out = [name in detours.results for name in node.results]
    if is_handed_out == [True]:
        return _bind_single_result(call, inputs, arguments, results[0])
    clock = results[0].clock
    reads_arena = _reads_arena(arguments)
    in_place = node.in_place
    is_single = len(results) == 1
    handed_out = [(buffer, i) for i, buffer in enumerate(results) if is_handed_out[i]]
    kept = [i for i in range(in_place, len(results)) if not is_handed_out[i]]
    copy_kept = _bind_result_copies(results, kept) if kept else None

    def launch() -> None:
        try:
            outputs = call(*inputs)
        except ValueError as error:
            outputs = _call_on_copies(call, inputs, arguments, error)
        if is_single:
            outputs = (outputs,)
        if in_place:
            inputs[:in_place] = outputs[:in_place]
        for buffer, index in handed_out:
            buffer.result = outputs[index]
        if reads_arena or kept or clock.has_copied:
            # The outputs of one XLA:CPU execution share one definition event.
            outputs[0].block_until_ready()
            clock.has_copied = False
        if copy_kept is not None:
            copy_kept(outputs)

    if in_place:
        # State can outlive the graph, and must not hold the arrays of the last call.
        weakref.finalize(launch, inputs.__delitem__, slice(in_place, None)).atexit = False
    return launch


def _bind_single_result(
    call: Callable[..., Any], inputs: list[Any], arguments: list[Any], result: HostBuffer
) -> Callable[[], None]:
    """Binds the call of the smallest graphs, where each step counts."""
    clock = result.clock
    reads_arena = _reads_arena(arguments)

    def launch() -> None:
        try:
            result.result = output = call(*inputs)
        except ValueError as error:
            result.result = output = _call_on_copies(call, inputs, arguments, error)
        if reads_arena or clock.has_copied:
            output.block_until_ready()
            clock.has_copied = False

    return launch


def _reads_arena(arguments: list[Any]) -> bool:
    return not all(isinstance(buffer, OwnedBuffer) or buffer.sites for buffer in arguments)


def _call_on_copies(
    call: Callable[..., Any], inputs: list[Any], arguments: list[Any], error: ValueError
) -> Any:
    """Calls again with rebound arrays copied in: XLA refuses those of another memory layout.

    Only XLA can tell, and a check before each call would cost more than most calls. An array that
    the user committed to another device is not copied: the call raises again.

    Raises:
        ValueError: the error of the first call, where XLA had accepted the arguments: it has used
            up what is donated, and what it ran has failed.
    """
    if any(map(_is_deleted, inputs)):
        raise error
    for index, buffer in enumerate(arguments):
        value = inputs[index]
        is_elsewhere = value.committed and value.devices() != {buffer.jax_device}
        if value is not buffer.alias and not is_elsewhere:
            buffer.write(value)
    return call(*inputs)


def _bind_result_copies(results: list[Any], kept: list[int]) -> Callable[[Sequence[Any]], None]:
    """Returns a function that copies some of a call's outputs into their buffers."""
    addresses = [results[index].address for index in kept]
    sizes = [results[index].nbytes for index in kept]
    # With one index `itemgetter` returns the item itself, so the first is requested twice.
    select = operator.itemgetter(*kept, kept[0])

    def copy_kept(outputs: Sequence[Any]) -> None:
        pointers = map(_get_pointer, select(outputs))
        collections.deque(map(_copy_bytes, addresses, pointers, sizes), maxlen=0)

    return copy_kept


def _bind_isolated_call(
    executable: Callable[..., Any], arguments: list[Any], results: list[Any]
) -> Callable[[], None]:
    """Binds a call on private copies: eager code may keep its arguments or return them."""

    def launch() -> None:
        outputs = executable(*[buffer.to_jax(buffer.snapshot()) for buffer in arguments])
        outputs = outputs if len(results) != 1 else (outputs,)
        # All outputs are read before any buffer is written: an output may alias an argument.
        values = [np.asarray(output) for output in outputs]
        for buffer, value in zip(results, values, strict=True):
            np.copyto(buffer.view, value)

    return launch
