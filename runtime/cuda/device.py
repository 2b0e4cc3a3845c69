"""CudaDevice: the device protocol over one GPU, with the memory and the stream of JAX."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tracegraph.runtime.allocators import MemorySource, open_allocator
from tracegraph.runtime.arena import Arena
from tracegraph.runtime.cuda.buffer import CudaBuffer
from tracegraph.runtime.cuda.comparison import CudaComparison
from tracegraph.runtime.cuda.context import CudaContext
from tracegraph.runtime.cuda.driver.driver import CudaDriver, load_driver
from tracegraph.runtime.cuda.graphs.builder import ErrorPlace, Library, label_node
from tracegraph.runtime.cuda.graphs.foreign_graph import CudaExchange
from tracegraph.runtime.cuda.graphs.graph import CudaGraph
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader
from tracegraph.runtime.cuda.graphs.stages import BlockingStage, CudaStage, EagerStage, NotedStage
from tracegraph.runtime.cuda.jax_order import JaxOrder, find_compute_stream
from tracegraph.runtime.cuda.libraries.cublas import BlasCalls, CuBlas, count_workspace_bytes
from tracegraph.runtime.cuda.libraries.cublaslt import CublasLt
from tracegraph.runtime.cuda.libraries.cudnn import Cudnn, GraphCudnn
from tracegraph.runtime.cuda.libraries.cufft import CuFft, FftCalls
from tracegraph.runtime.cuda.libraries.handler_calls import (
    GraphHandlerCalls,
    HandlerCalls,
    LeasedStream,
)
from tracegraph.runtime.cuda.libraries.nvrtc import compile_source
from tracegraph.runtime.cuda.memory import jax_arrays
from tracegraph.runtime.cuda.memory.driver_providers import CudaAsyncProvider, CudaProvider
from tracegraph.runtime.cuda.memory.events import CudaEvents
from tracegraph.runtime.cuda.memory.host_values import HostValues
from tracegraph.runtime.cuda.memory.jax_provider import JaxProvider
from tracegraph.runtime.cuda.memory.virtual_provider import CudaVirtualProvider
from tracegraph.runtime.cuda.node_timer import CudaTimer
from tracegraph.runtime.cuda.properties import read_target
from tracegraph.runtime.cuda.rebinding import find_patchers, list_rebindable
from tracegraph.runtime.cuda.result_parts import cut_arrays
from tracegraph.runtime.cuda.results import ResultPort, count_stock
from tracegraph.runtime.cuda.streams import CudaStreams
from tracegraph.runtime.definition.code_target import CodeTarget, CompileKernel
from tracegraph.runtime.definition.cudnn_calls import CudnnCall
from tracegraph.runtime.definition.graph import (
    ExecutableGraph,
    GraphDefinition,
    Instance,
    ReplayClock,
)
from tracegraph.runtime.definition.graph_nodes import list_nested
from tracegraph.runtime.definition.library_calls import (
    LibraryCall,
    Scale,
    Transform,
    TriangularSolve,
)
from tracegraph.runtime.definition.library_nodes import (
    CudnnNode,
    FfiCallNode,
    LibraryCallNode,
    MatmulNode,
)
from tracegraph.runtime.definition.nodes import BufferUse, KernelCode, Locate
from tracegraph.runtime.environment import check_dispatch, read_launch_blocking
from tracegraph.runtime.errors import UnsupportedError
from tracegraph.runtime.ffi.call import FfiCall
from tracegraph.runtime.memory.allocator import Allocator
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator
from tracegraph.runtime.node_timer import TimedGraph
from tracegraph.runtime.plan_cache import find_fft_plans
from tracegraph.runtime.streams.stream import Stream

POISON = 0xFF
# Where no memory is, for the nodes of a lent input before the first call.
NOWHERE = 1 << 45


class CudaDevice:
    """One GPU of JAX.

    Args:
        jax_device: one of ``jax.devices("gpu")``.
        driver: the CUDA driver.
        stream: the driver's handle of the stream that XLA computes on.

    Attributes:
        context: what its buffers share.
        streams: those of users.
        comparison: compares results where they are.
        exchange: takes graphs of other libraries, and gives them ours.
    """

    takes_kernels = True
    updates_in_place = True

    def __init__(self, jax_device: Any, driver: CudaDriver, stream: int) -> None:
        self.jax_device = jax_device
        self.name = f"cuda:{jax_device.local_hardware_id}"
        # Retained for as long as the process: JAX does the same.
        primary = driver.retain_primary_context(jax_device.local_hardware_id)
        order = JaxOrder(driver, stream, primary)
        self.context = CudaContext(jax_device, order)
        self.streams = CudaStreams(order)
        self._kernels = KernelLoader(driver, order.primary)
        self._libraries = {MatmulNode.kind: CublasLt()}
        self._cufft = CuFft(order, find_fft_plans(self.name))
        self._cublas = CuBlas(self.context)
        self._memory = _Memory(jax_device, order)
        self._cudnn = Cudnn(order, self._memory.open)
        self._handlers = HandlerCalls(order, jax_device.local_hardware_id, self._memory.open)
        self.comparison = CudaComparison(self.context, self._kernels)
        self.exchange = CudaExchange(order)

    @property
    def allocator(self) -> Allocator:
        """The one allocator of this GPU, opened when it is first needed."""
        return self._memory.open()

    @property
    def host_allocator(self) -> CachingHostAllocator:
        """Page-locked memory, which all GPUs share."""
        return self.context.staging.allocator

    @property
    def input_writer(self) -> CudaContext:
        """Writes static inputs where they are."""
        return self.context

    @property
    def compile_kernel(self) -> CompileKernel:
        """Makes machine code for this GPU, by NVRTC."""
        return functools.partial(compile_source, self.target.architecture)

    @property
    def target(self) -> CodeTarget:
        """The GPU, the compiler of JAX's plugin and the driver."""
        return read_target(self.jax_device, self.context.order.driver)

    def number_stream(self, stream: Stream) -> int:
        """Returns the allocator's number of a stream, and registers the stream."""
        return self.context.number_stream(stream)

    def bind_buffers(
        self, definition: GraphDefinition, arena: Arena, clock: ReplayClock
    ) -> Mapping[str, CudaBuffer]:
        """Returns every slot as a range of memory, filled with NaN, constants apart."""
        in_host_memory = [slot for slot in definition.slots if slot.is_host]
        host = HostValues(self.context.pinned, in_host_memory) if in_host_memory else None
        buffers = {
            slot.name: CudaBuffer(slot, arena, self.context, clock, host if slot.is_host else None)
            for slot in definition.slots
        }
        ranges = [*arena.ranges, *([(host.address, host.nbytes)] if host is not None else [])]
        for address, nbytes in ranges:
            self.context.fill(address, POISON, nbytes)
        for slot in definition.slots:
            if slot.content is not None:
                self.context.load(slot.content, buffers[slot.name].address)
        return buffers

    def instantiate(
        self,
        definition: GraphDefinition,
        buffers: Mapping[str, CudaBuffer],
        fresh: Sequence[str],
        *,
        reached: Collection[str] | None = None,
    ) -> Instance:
        """Builds one executable graph per stage, and uploads it to the GPU.

        Args:
            definition: the whole capture, or what this GPU does of one over several.
            buffers: what `bind_buffers` returned for it.
            fresh: see `Device`.
            reached: of a capture over several GPUs the buffers that others reach, which stay where
                they are. Such a graph can only be waited for when all GPUs are launched.
        """

        offsets = {slot.name: slot.offset for slot in definition.slots}

        def locate(use: BufferUse) -> int:
            # What is lent gets its address before the first launch that reads it.
            start = buffers[use.buffer].address or NOWHERE + offsets[use.buffer]
            return start + use.offset

        driver, order = self.context.driver, self.context.order
        rebindable = list_rebindable(definition, reached or ())
        movable = {*rebindable, *fresh}.difference(reached or ())
        libraries = {**self._libraries, **self._prepare_calls(definition, buffers, locate)}
        # Nodes are pointed at memory of JAX.
        is_mixed = any(buffer.arena.provider.name != "jax" for buffer in buffers.values())
        stages: list[ExecutableGraph] = []
        graphs: dict[int, CudaGraph] = {}
        for index, stage in enumerate(definition.stages):
            if not stage.is_captured:
                stages.append(EagerStage(stage, buffers))
                continue
            build = functools.partial(
                CudaGraph, driver, stage, locate, self._kernels, libraries, definition.name, movable
            )
            graphs[index] = build()
            can_rebind = functools.partial(graphs[index].can_rebind, kernels_only=is_mixed)
            fixed = [n for n in rebindable if buffers[n].is_lent and not can_rebind(n)]
            for name in fixed:
                buffers[name].hold_memory()
            if fixed:
                graphs[index] = build()
        users = [stage.users for stage in definition.stages]
        find_for = functools.partial(find_patchers, users, graphs, is_mixed)
        for name in rebindable:
            buffers[name].patchers = find_for(buffers[name]) or ()
            buffers[name].is_unread = not any(name in each for each in users)
        ports: dict[str, ResultPort] = {}
        for name in (each for each in fresh if each not in (reached or ())):
            # Two results that are one value are two arrays: donating one must not delete the other.
            patchers = find_for(buffers[name]) if fresh.count(name) == 1 else None
            if patchers and name not in definition.inputs:
                ports[name] = ResultPort(buffers[name], patchers)
                ports[name].take_first()
        for index, graph in graphs.items():
            graph.upload(order.stream)
            # Every port is renewed before the first stage, whichever stage writes it.
            renewed = tuple(ports.values()) if index == min(graphs) else ()
            stages.insert(index, CudaStage(graph, renewed, order))
        host = next((each.host_values for each in buffers.values() if each.host_values), None)
        if host is not None:
            stages = [NotedStage(stage, host, order.stream) for stage in stages]
        if read_launch_blocking() and reached is None:
            stages = [BlockingStage(stage, order, definition.name) for stage in stages]
        return Instance(tuple(stages), {name: port.hand_out for name, port in ports.items()})

    def _prepare_calls(
        self, definition: GraphDefinition, buffers: Mapping[str, CudaBuffer], locate: Locate
    ) -> dict[str, Library]:
        """Returns the libraries of the graph's own, by kind of node, ready to be captured."""
        nodes = [
            (index, node)
            for stage in definition.stages
            if stage.is_captured
            for index, outer in enumerate(stage.nodes)
            for node in list_nested([outer])
            if isinstance(node, FfiCallNode | LibraryCallNode | CudnnNode)
        ]
        if not nodes:
            return {}
        # State may be in that of another graph, which its buffers keep alive.
        arena = next(iter(buffers.values())).arena
        libraries: dict[str, Any] = {CudnnNode.kind: GraphCudnn(self._cudnn)}
        if any(isinstance(node, FfiCallNode) for _, node in nodes):
            libraries[FfiCallNode.kind] = GraphHandlerCalls(self._handlers, arena.allocate_beside)
        if any(isinstance(node, LibraryCallNode) for _, node in nodes):
            stream = LeasedStream(self._handlers)
            blas = BlasCalls(self._cublas, stream, arena.allocate_beside)
            libraries[Transform.kind] = FftCalls(self._cufft, stream)
            libraries |= dict.fromkeys((Scale.kind, TriangularSolve.kind), blas)
        with self.context.order.use_context():
            for index, node in nodes:
                with ErrorPlace(label_node(definition.name, index, node)):
                    libraries[node.kind].prepare(node, locate)
        return libraries

    def open_timer(self, graph: TimedGraph) -> contextlib.AbstractContextManager[CudaTimer]:
        """Returns a block in which the nodes of a graph are timed on the GPU."""

        def locate(use: BufferUse) -> int:
            return graph.buffers[use.buffer].address + use.offset

        calls = self._prepare_calls(graph.definition, graph.buffers, locate)
        libraries = {**self._libraries, **calls}
        return CudaTimer(self.context, self._kernels, libraries, graph)

    def cut_arrays(self, arrays: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """Returns the first part of each array, as arrays of their own."""
        return cut_arrays(self.context, arrays, shapes)

    def find_call_problem(self, call: FfiCall | CudnnCall) -> str:
        """Returns why a call of a handler or of cuDNN cannot be in a graph.

        See Note [Calls of handlers] and Note [Calls of cuDNN].
        """
        if isinstance(call, FfiCall):
            return self._handlers.find_problem(call)
        return self._cudnn.find_problem(call)

    def plan_library_call(self, call: LibraryCall) -> int:
        """Returns how many bytes of workspace a call of a library needs; see `Device`."""
        if isinstance(call, Transform):
            return self._cufft.find_plan(call).workspace_bytes
        self._cublas.open()
        # As "9.0".
        capability = getattr(self.jax_device, "compute_capability", "0.0")
        return count_workspace_bytes(call, int(capability.partition(".")[0]))

    def find_workspace_bytes(self, node: MatmulNode) -> int | None:
        """Returns how many bytes of its workspace a matmul needs; see `Device`."""
        # Where bindings are missing, the graph's instantiation says so.
        with contextlib.suppress(UnsupportedError), self.context.order.use_context():
            return self._libraries[MatmulNode.kind].find_workspace_bytes(node)

    def preload_matmuls(self) -> None:
        """Loads what matmuls may need, so that no graph has to wait for it."""
        self._libraries[MatmulNode.kind].preload()

    def preload_convolutions(self) -> None:
        """Opens cuDNN, so that no graph has to wait for it."""
        self._cudnn.preload()

    def preload_comparison(self) -> None:
        """Loads the kernels that compare results, so that no verification has to wait for it."""
        self.comparison.preload()

    def preload_kernels(self, codes: Sequence[KernelCode]) -> None:
        """Loads kernels that graphs may launch, see `KernelLoader.keep`."""
        self._kernels.keep(codes)

    def prepare_result(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Compiles the allocation of results of a type, so that no call has to wait for it."""
        count = count_stock(math.prod(shape) * dtype.itemsize)
        jax_arrays.prepare_together(((shape, dtype),) * count, self.jax_device)

    def prepare_copies(self, types: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        """Compiles the allocation of copies of arguments, for a verification."""
        jax_arrays.prepare_together(tuple(types), self.jax_device)


class _Memory:
    """The allocator of one GPU; apart from the device, which holds others that need it."""

    def __init__(self, jax_device: Any, order: JaxOrder) -> None:
        self._jax_device, self._order = jax_device, order
        self._allocator: Allocator | None = None

    def open(self) -> Allocator:
        with _lock:
            if self._allocator is None:
                self._allocator = _open_allocator(self._jax_device, self._order)
            return self._allocator


def _open_allocator(jax_device: Any, order: JaxOrder) -> Allocator:
    driver, primary, ordinal = order.driver, order.primary, jax_device.local_hardware_id

    def read_memory() -> tuple[int, int]:
        with order.use_context():
            return driver.read_memory()

    source = MemorySource(
        device=ordinal,
        providers={
            "jax": lambda: JaxProvider(jax_device, order),
            "cuda": lambda: CudaProvider(driver, primary),
            "async": lambda: CudaAsyncProvider(driver, primary, ordinal, order.find_handle),
            "expandable": lambda: CudaVirtualProvider(driver, primary, ordinal),
        },
        events=CudaEvents(driver, order.find_handle),
        find_stream=order.find_handle,
        read_memory=read_memory,
    )
    return open_allocator(source)


_devices: dict[Any, CudaDevice] = {}
# Re-entrant: a finaliser may need an allocator.
_lock = threading.RLock()


def find_cuda_device(jax_device: Any) -> CudaDevice:
    """Returns the one CudaDevice of a GPU of JAX.

    Raises:
        CudaError: there is no CUDA driver, or it is too old.
    """
    with _lock:
        if jax_device not in _devices:
            # First, because it refuses a machine without CUDA with an error of ours.
            driver = load_driver()
            check_dispatch()
            stream = find_compute_stream(jax_device)
            _devices[jax_device] = CudaDevice(jax_device, driver, stream)
        return _devices[jax_device]
