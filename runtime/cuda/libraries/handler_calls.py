"""Handlers of `jax.ffi` as parts of graphs: tried out once, then captured with each graph.

Note [Calls of handlers]
    A handler enqueues what it likes on a stream. In a graph stands what it has enqueued once, for
    one set of addresses, while its stream was captured. That is the same in every replay only if
    the handler neither reads results on the host nor lets the GPU read memory of the host, and
    few handlers say so: none of jaxlib's for cuSOLVER does. So each call is tried out while the
    function is lowered, where a function can still be cut at it:

    1. Its stages run once without a capture, on zeros, so that libraries make their handles, load
       their kernels and find their workspaces; none of that is allowed during a capture. Zeros are
       legal as indices, and no loop of a solver is long on them.
    2. It runs again, captured. What waits for the device breaks the capture; the status may name
       no cause, so the message says when it failed. Handles that the libraries keep for that
       stream may be unusable then, so the stream is not used again. Solvers that are known to wait
       are not tried, see Note [Waiting solvers] in `runtime/ffi/waiting_solvers.py`.
    3. What was captured may be kernels, memsets and copies within the device. Calls of the host,
       copies from or to its memory (they would be read again, when the handler's buffer is gone)
       and allocations are refused.

    Verification then compares a replay on other values with XLA's own program.

    Libraries keep handles with workspaces for each stream (cuSOLVER's are jaxlib's, one per stream
    that is in use). Two calls that were captured on one stream use the same workspace, so they
    must not run side by side. So the calls of one graph follow one another, see `GraphBuilder`,
    and a graph keeps the stream that it was captured on until it is gone: no other graph, which
    may run at the same time on another stream of the user, has the same handles. Streams are used
    again by later graphs, with all that is warm on them.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.cuda.libraries.mosaic import TARGET, find_mosaic
from tracegraph.runtime.definition.library_nodes import FfiCallNode
from tracegraph.runtime.definition.nodes import Locate
from tracegraph.runtime.errors import CudaError
from tracegraph.runtime.ffi.c_api import ExecutionStage
from tracegraph.runtime.ffi.call import FfiCall
from tracegraph.runtime.ffi.checks import find_callable
from tracegraph.runtime.ffi.context import CallContext, HandlerScratch, InterfaceError
from tracegraph.runtime.ffi.frames import Frame
from tracegraph.runtime.ffi.states import States
from tracegraph.runtime.ffi.waiting_solvers import find_wait
from tracegraph.runtime.memory.allocator import Allocator
from tracegraph.runtime.memory.caching.block import Block

PLATFORM = "CUDA"
# What may stand in a graph; a graph inside is looked into.
CAPTURABLE = frozenset(("KERNEL", "MEMCPY", "MEMSET", "EMPTY"))


class AnyHandler(Protocol):
    """What is called stage by stage: a `Handler`, or a `MosaicHandler`."""

    def has(self, stage: ExecutionStage) -> bool:
        """True when it does something in a stage."""
        ...

    def run(self, stage: ExecutionStage, frame: Frame, context: CallContext) -> None:
        """Does what it does in a stage."""
        ...


class WarmStream:
    """A stream to capture on.

    Args:
        handle: the driver's.

    Attributes:
        calls: those that have run on it, so that libraries need nothing new for them.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.calls: set[FfiCall] = set()


@dataclasses.dataclass(frozen=True)
class PreparedHandlerCall:
    """A call between its first stages and its last one.

    Attributes:
        handler: of the call.
        states: what the first stages have left.
    """

    handler: AnyHandler
    states: States


class BlockScratch:
    """Scratch from blocks of an allocator, which `close` frees.

    A block that a handler has freed is used again by the calls after it.

    Args:
        allocate: returns a block.
    """

    def __init__(self, allocate: Callable[[int], Block]) -> None:
        self._allocate = allocate
        self._free: list[Block] = []
        self._used: dict[int, Block] = {}

    def allocate(self, nbytes: int) -> int:
        """Returns the address of a block; blocks are aligned to at least 256 bytes."""
        fitting = [block for block in self._free if block.nbytes >= nbytes]
        block = min(fitting, key=lambda each: each.nbytes, default=None)
        if block is None:
            block = self._allocate(max(nbytes, 1))
        else:
            self._free.remove(block)
        self._used[block.address] = block
        return block.address

    def free(self, address: int) -> None:
        """Lets later calls use a block."""
        block = self._used.pop(address, None)
        if block is not None:
            self._free.append(block)

    def take_blocks(self) -> list[Block]:
        """Returns all blocks, and forgets them."""
        blocks = [*self._free, *self._used.values()]
        self._free, self._used = [], {}
        return blocks


class HandlerCalls:
    """The calls of handlers on one GPU. May be used from any thread.

    Args:
        order: of JAX's work on it and ours.
        ordinal: its number.
        open_allocator: returns its allocator, when it is first needed.
    """

    def __init__(
        self, order: JaxOrder, ordinal: int, open_allocator: Callable[[], Allocator]
    ) -> None:
        self._order, self.ordinal = order, ordinal
        self._open_allocator = open_allocator
        self._lock = threading.Lock()
        self._streams: list[WarmStream] = []
        self._problems: dict[tuple[AnyHandler, FfiCall], str] = {}

    def find_problem(self, call: FfiCall) -> str:
        """Returns why a call cannot be in a graph, or an empty text; see Note [Calls of handlers].

        Raises:
            OutOfMemoryError: there is no memory to try it out.
        """
        handler = self.find(call)
        if isinstance(handler, str):
            return handler
        key = handler, call
        if key not in self._problems:
            self._problems[key] = find_wait(call) or self._try(handler, call)
        return self._problems[key]

    def find(self, call: FfiCall) -> AnyHandler | str:
        """Returns what a call calls, or why it cannot be called; reads on after its name."""
        if call.target == TARGET:
            return find_mosaic(call, self._order.primary)
        return find_callable(call, PLATFORM)

    def take_stream(self) -> WarmStream:
        """Returns a stream that no other graph has; `give_back` takes it."""
        with self._lock:
            if self._streams:
                return self._streams.pop()
        with self._order.use_context():
            return WarmStream(self._order.driver.create_stream())

    def give_back(self, stream: WarmStream) -> None:
        """Keeps a stream for the next graph."""
        # No lock: a finaliser may run while this thread holds it.
        self._streams.append(stream)

    def warm(self, handler: AnyHandler, call: FfiCall, stream: WarmStream) -> None:
        """Runs a call once on zeros, if it has not run on the stream yet.

        Raises:
            InterfaceError: the handler returns an error.
        """
        if call in stream.calls:
            return
        self._rehearse(handler, call, stream, is_captured=False)
        stream.calls.add(call)

    def _try(self, handler: AnyHandler, call: FfiCall) -> str:
        stream = self.take_stream()
        failed = "failed when it was tried out on zeros"
        is_broken = False
        try:
            self.warm(handler, call, stream)
            failed = "failed while its stream was captured, as one does that waits for the GPU"
            is_broken = True
            kinds = self._rehearse(handler, call, stream, is_captured=True)
            is_broken = False
        except InterfaceError as error:
            return f"whose handler {failed}: {error.message}"
        except CudaError as error:
            return f"which breaks the capture of its stream: {error.what}"
        finally:
            if not is_broken:
                self.give_back(stream)
        foreign = sorted(kinds - CAPTURABLE)
        if foreign:
            return f"which enqueues what no graph can repeat: {', '.join(foreign).lower()}"
        return ""

    def _rehearse(
        self, handler: AnyHandler, call: FfiCall, stream: WarmStream, *, is_captured: bool
    ) -> frozenset[str]:
        """Runs all stages on zeros; returns the kinds of nodes of the last one, if captured."""
        allocator, driver = self._open_allocator(), self._order.driver
        scratch = BlockScratch(allocator.allocate)
        kinds: frozenset[str] = frozenset()
        with self._order.use_context():
            try:
                operands, results = _allocate_zeros(call, scratch, self._order)
                frame = Frame(call, operands, results)
                states = self.begin(handler, frame, stream, scratch)
                context = CallContext(states, stream.handle, scratch, self.ordinal)
                if is_captured:
                    kinds = self._capture(handler, frame, context, stream)
                else:
                    handler.run(ExecutionStage.EXECUTE, frame, context)
            finally:
                # The memory may be in use until then.
                driver.synchronize_stream(stream.handle)
                for block in scratch.take_blocks():
                    allocator.free(block)
        return kinds

    def begin(
        self, handler: AnyHandler, frame: Frame, stream: WarmStream, scratch: HandlerScratch
    ) -> States:
        """Runs the stages before the last one, and waits for what they enqueue."""
        states = States()
        handler.run(ExecutionStage.INSTANTIATE, frame, CallContext(states))
        handler.run(ExecutionStage.PREPARE, frame, CallContext(states, ordinal=self.ordinal))
        context = CallContext(states, stream.handle, scratch, self.ordinal)
        handler.run(ExecutionStage.INITIALIZE, frame, context)
        if handler.has(ExecutionStage.INITIALIZE):
            self._order.driver.synchronize_stream(stream.handle)
        return states

    def _capture(
        self, handler: AnyHandler, frame: Frame, context: CallContext, stream: WarmStream
    ) -> frozenset[str]:
        driver = self._order.driver
        driver.begin_capture(stream.handle)
        try:
            handler.run(ExecutionStage.EXECUTE, frame, context)
        except BaseException:
            driver.abort_capture(stream.handle)
            raise
        graph = driver.end_capture(stream.handle)
        try:
            return driver.list_node_kinds(graph)
        finally:
            driver.destroy_graph(graph)


class LeasedStream:
    """A stream that one graph has for as long as it lives; it outlives the graph.

    Args:
        calls: of the GPU.
    """

    def __init__(self, calls: HandlerCalls) -> None:
        stream = calls.take_stream()
        self.handle = stream.handle
        weakref.finalize(self, calls.give_back, stream).atexit = False


class GraphHandlerCalls:
    """The calls of handlers in one graph: lives as long as the graph.

    Args:
        calls: of the GPU.
        allocate: returns a block that lives as long as the graph's memory.
    """

    def __init__(self, calls: HandlerCalls, allocate: Callable[[int], Block]) -> None:
        self._calls = calls
        self._stream = calls.take_stream()
        # Calls of one graph follow one another, so they share it.
        self._scratch = BlockScratch(allocate)
        self._prepared: dict[FfiCallNode, PreparedHandlerCall] = {}
        weakref.finalize(self, calls.give_back, self._stream).atexit = False

    @property
    def stream(self) -> int:
        """The stream that the calls have to be captured on."""
        return self._stream.handle

    def prepare(self, node: FfiCallNode, locate: Locate) -> None:
        """Does all of a call that cannot be captured.

        The GPU's context must be current.

        Raises:
            CudaError: the handler is gone, or returns an error.
        """
        handler = self._calls.find(node.call)
        if isinstance(handler, str):
            raise make_call_error(node, handler)
        frame = _make_frame(node, locate)
        try:
            self._calls.warm(handler, node.call, self._stream)
            states = self._calls.begin(handler, frame, self._stream, self._scratch)
        except InterfaceError as error:
            raise make_call_error(node, f"whose handler returned {error}") from error
        self._prepared[node] = PreparedHandlerCall(handler, states)

    def enqueue(self, node: FfiCallNode, locate: Locate, stream: int) -> None:
        """Lets the handler enqueue its work on the stream that is being captured.

        Raises:
            CudaError: the handler returns an error.
        """
        prepared = self._prepared[node]
        context = CallContext(prepared.states, stream, self._scratch, self._calls.ordinal)
        try:
            prepared.handler.run(ExecutionStage.EXECUTE, _make_frame(node, locate), context)
        except InterfaceError as error:
            raise make_call_error(node, f"whose handler returned {error}") from error


def _make_frame(node: FfiCallNode, locate: Locate) -> Frame:
    operands, results = (
        [0 if use is None else locate(use) for use in uses]
        for uses in (node.operands, node.outputs)
    )
    return Frame(node.call, operands, results)


def make_call_error(node: FfiCallNode, reason: str) -> CudaError:
    """Returns the error of a call that could not be captured."""
    return CudaError(
        f"`{node.name}` calls {node.call.target}, {reason}",
        where=f"{node.call.target}({', '.join(map(str, node.call.operands))})",
        why="a handler of jax.ffi becomes part of a CUDA graph by being called while it is built",
        fix='use mode="partial", or jax.jit for this function',
        anchor="ffi-call",
    )


def _allocate_zeros(
    call: FfiCall, scratch: HandlerScratch, order: JaxOrder
) -> tuple[list[int], list[int]]:
    """Returns the address of zeros for each operand and each result."""
    driver = order.driver
    addresses: Sequence[list[int]] = ([], [])
    for types, found in zip((call.operands, call.results), addresses, strict=True):
        for each in types:
            address = scratch.allocate(max(each.nbytes, 1))
            driver.fill_async(address, 0, 1, max(each.nbytes, 1), order.stream)
            found.append(address)
    # The memory may be in use by earlier work there, and the stream of a capture waits for none.
    driver.synchronize_stream(order.stream)
    return addresses[0], addresses[1]
