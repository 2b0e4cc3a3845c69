"""HostDevice: the device protocol over ordinary memory and XLA:CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.runtime.allocators import MemorySource, open_allocator
from tracegraph.runtime.arena import Arena
from tracegraph.runtime.arrays.array import Array
from tracegraph.runtime.definition.code_target import CodeTarget
from tracegraph.runtime.definition.cudnn_calls import CudnnCall
from tracegraph.runtime.definition.graph import GraphDefinition, Instance, ReplayClock
from tracegraph.runtime.definition.library_calls import LibraryCall
from tracegraph.runtime.definition.library_nodes import MatmulNode
from tracegraph.runtime.definition.nodes import KernelCode
from tracegraph.runtime.environment import read_alloc_conf, read_launch_blocking
from tracegraph.runtime.errors import InternalError
from tracegraph.runtime.ffi.call import FfiCall
from tracegraph.runtime.ffi.checks import find_registration_problem
from tracegraph.runtime.host.blocking import make_blocking
from tracegraph.runtime.host.buffer import HostBuffer
from tracegraph.runtime.host.checking import POISON, CheckingGraph
from tracegraph.runtime.host.graph import (
    HostGraph,
    find_detours,
    find_in_place,
    find_lock_free_call,
    waits_for_inputs,
)
from tracegraph.runtime.host.node_timer import HostTimer
from tracegraph.runtime.host.owned_buffer import OwnedBuffer
from tracegraph.runtime.host.properties import read_target
from tracegraph.runtime.jax_interop import make_aval, to_immutable
from tracegraph.runtime.memory.allocator import Allocator
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator
from tracegraph.runtime.memory.pinned.host_pages import PlainPages
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.memory.providers.host_virtual import HostVirtualProvider
from tracegraph.runtime.memory.providers.provider import NoEvents
from tracegraph.runtime.node_timer import TimedGraph
from tracegraph.runtime.streams.stream import Stream, default_stream


class HostDevice:
    """The embedded default: real streams, pools and graphs without a GPU.

    Args:
        jax_device: one of ``jax.devices("cpu")``.
        is_checking: launch in checking mode, see ``runtime/host/checking.py``.
    """

    name = "host"
    takes_kernels = False
    comparison = None
    compile_kernel = None
    exchange = None
    input_writer = None

    def __init__(self, jax_device: Any, *, is_checking: bool = False) -> None:
        self.jax_device = jax_device
        self._is_checking = is_checking

    @property
    def allocator(self) -> Allocator:
        """The one allocator of this JAX device."""
        return _find_allocator(self.jax_device)

    @property
    def host_allocator(self) -> CachingHostAllocator:
        """Ordinary memory, in the way of a GPU's page-locked memory."""
        return _find_host_allocator()

    def number_stream(self, stream: Stream) -> int:
        """Returns the allocator's number of a stream."""
        return 0 if stream is default_stream() else stream.number

    @property
    def target(self) -> CodeTarget:
        """The CPU."""
        return read_target(self.jax_device)

    @property
    def updates_in_place(self) -> bool:
        """True but in checking mode, where everything goes through the arena."""
        return not self._is_checking

    def cut_arrays(self, arrays: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """Returns the first part of each array, as arrays of their own."""
        return list(map(self._cut_array, arrays, shapes))

    def _cut_array(self, array: Any, shape: tuple[int, ...]) -> jax.Array:
        part = tuple(map(slice, shape))
        if type(array) is Array:
            array.wait()
            with array.lock:
                copy = np.array(np.asarray(array.peek())[part])
        else:
            copy = np.array(np.asarray(array)[part])
        aval = make_aval(shape, array.dtype, weak_type=array.aval.weak_type)
        return to_immutable(copy, aval, self.jax_device)

    def find_call_problem(self, call: FfiCall | CudnnCall) -> str:
        """Returns why a compiled region cannot call a library, or an empty text."""
        if not isinstance(call, FfiCall):
            return "calls cuDNN, which takes a GPU"
        return find_registration_problem(call, "cpu")

    def plan_library_call(self, call: LibraryCall) -> int:
        """Is never called: what XLA calls on the host is inside of the compiled region."""
        raise InternalError(
            f"the host device is asked for the workspace of {call}",
            where="plan_library_call",
            why="only programs for a GPU are taken apart into calls of libraries",
        )

    def find_workspace_bytes(self, node: MatmulNode) -> None:
        """Returns None: there is no cublasLt on the host."""

    def prepare_result(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Has nothing to prepare: XLA's calls bring the memory of their results."""

    def prepare_copies(self, types: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        """Has nothing to prepare: no argument is copied by a program."""

    def preload_matmuls(self) -> None:
        """Has nothing to load: what XLA calls is part of it."""

    def preload_convolutions(self) -> None:
        """Has nothing to load: what XLA calls is part of it."""

    def preload_comparison(self) -> None:
        """Has nothing to load: NumPy compares what the host holds."""

    def preload_kernels(self, codes: Sequence[KernelCode]) -> None:
        """Has nothing to load: its kernels are a part of XLA's executables."""

    def bind_buffers(
        self, definition: GraphDefinition, arena: Arena, clock: ReplayClock
    ) -> Mapping[str, HostBuffer | OwnedBuffer]:
        """Returns every slot as a NumPy view of the arena, resident state apart."""
        slots = {slot.name: slot for slot in definition.slots}
        buffers: dict[str, HostBuffer | OwnedBuffer] = {
            name: HostBuffer(slot, arena, self.jax_device, clock) for name, slot in slots.items()
        }
        if self.updates_in_place:
            for name in find_in_place(definition, buffers):
                buffers[name] = OwnedBuffer(slots[name], arena, self.jax_device, clock)
        for buffer in buffers.values():
            buffer.fill_bytes(POISON)
        return buffers

    def instantiate(
        self,
        definition: GraphDefinition,
        buffers: Mapping[str, HostBuffer | OwnedBuffer],
        fresh: Sequence[str],
    ) -> Instance:
        """Binds every stage to the buffers."""
        if read_launch_blocking():
            definition = make_blocking(definition)
        if self._is_checking:
            indices = range(len(definition.stages))
            return Instance(tuple(CheckingGraph(definition, i, buffers) for i in indices))
        detours = find_detours(definition, buffers, fresh)
        return Instance(
            tuple(HostGraph(stage, buffers, detours) for stage in definition.stages),
            {
                name: buffer.take_result
                for name, buffer in buffers.items()
                if isinstance(buffer, HostBuffer) and name in detours.results
            },
            tuple(buffer for buffer in buffers.values() if isinstance(buffer, OwnedBuffer)),
            find_lock_free_call(definition, buffers, detours),
            waits_for_inputs(definition, buffers, detours),
        )

    def open_timer(self, graph: TimedGraph) -> contextlib.AbstractContextManager[HostTimer]:
        """Returns a block in which the calls of a graph are timed by the host's clock."""
        return contextlib.nullcontext(HostTimer(graph))


@functools.cache
def _find_allocator(jax_device: Any) -> Allocator:
    provider = HostProvider()
    source = MemorySource(
        device=jax_device.id,
        providers={
            "host": lambda: provider,
            # The system's own allocator keeps what is freed, as the driver's pool does.
            "async": lambda: provider,
            "expandable": HostVirtualProvider,
        },
        events=NoEvents(),
        find_stream=int,
        read_memory=lambda: (provider.available_bytes(), provider.total_bytes()),
    )
    return open_allocator(source)


@functools.cache
def _find_host_allocator() -> CachingHostAllocator:
    return CachingHostAllocator(PlainPages(), config=read_alloc_conf())


def find_host_device(*, is_checking: bool) -> HostDevice:
    """Returns the host device: JAX's default device if it is a CPU, else its first CPU."""
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(default, jax.Device) and default.platform == "cpu":
        return HostDevice(default, is_checking=is_checking)
    return HostDevice(jax.local_devices(backend="cpu")[0], is_checking=is_checking)
