"""The protocol that every device speaks. Lowering and replay know nothing else of a device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.arrays.live_buffers import InputWriter
from tracegraph.runtime.arrays.static_buffer import StaticBuffer
from tracegraph.runtime.definition.code_target import CodeTarget, CompileKernel
from tracegraph.runtime.definition.cudnn_calls import CudnnCall
from tracegraph.runtime.definition.graph import (
    ExecutableGraph,
    GraphDefinition,
    Instance,
    ReplayClock,
)
from tracegraph.runtime.definition.library_calls import LibraryCall
from tracegraph.runtime.definition.library_nodes import MatmulNode
from tracegraph.runtime.definition.nodes import KernelCode
from tracegraph.runtime.ffi.call import FfiCall
from tracegraph.runtime.memory.allocator import Allocator
from tracegraph.runtime.memory.pinned.host_allocator import CachingHostAllocator
from tracegraph.runtime.node_timer import NodeTimer, TimedGraph
from tracegraph.runtime.streams.stream import Stream


@dataclasses.dataclass(frozen=True)
class FloatDifference:
    """How far two arrays of floats are apart.

    Attributes:
        largest: difference where the second array is finite; NaN or infinite where the first is
            not.
        magnitude: the largest finite one of the second array.
        is_alike: True where all that is not finite in the second array is the same in the first.
        is_changed: True where a finite element of the second array has other bits in the first.
    """

    largest: float
    magnitude: float
    is_alike: bool
    is_changed: bool


class MemoryComparison(Protocol):
    """Copies and compares arrays in the memory of a device, without compiling anything for it."""

    def copy_arrays(self, arrays: Sequence[Any], *, is_rotated: bool) -> list[Any]:
        """Returns private copies of plain arrays on the device.

        Args:
            arrays: plain arrays on it.
            is_rotated: exchange the two halves of each: other inputs with the same values in them,
                so that indices stay in range and floats stay finite.
        """
        ...

    def find_unequal(self, pairs: Sequence[tuple[int, int, int]]) -> list[int]:
        """Returns which pairs differ in any bit; the host waits once.

        Args:
            pairs: two addresses and a number of bytes each.
        """
        ...

    def measures(self, dtype: np.dtype[Any]) -> bool:
        """True for the floats that `measure_floats` takes."""
        ...

    def measure_floats(
        self, pairs: Sequence[tuple[int, int, int, np.dtype[Any]]]
    ) -> list[FloatDifference]:
        """Returns how far each pair is apart; the host waits once.

        Args:
            pairs: two addresses, a number of elements, not 0, and their dtype.
        """
        ...

    def read_range(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> np.ndarray[Any, Any]:
        """Returns a copy on the host of an array at an address, after all work so far."""
        ...


class GraphExchange(Protocol):
    """Takes graphs of the driver from other libraries, and gives them graphs of ours."""

    def adopt(self, handle: int, owner: Any) -> ExecutableGraph:
        """Makes a graph that another library has built executable.

        Args:
            handle: the driver's, of a ``CUgraph``.
            owner: holds what the nodes of the graph need; it is held.

        Raises:
            CudaError: the driver refuses the graph.
        """
        ...

    def embed(self, handle: int, graph: int) -> None:
        """Adds a copy of a graph of ours as one node to a graph of another library.

        Args:
            handle: the driver's, of the other library's ``CUgraph``.
            graph: that of ours.

        Raises:
            CudaError: the driver refuses.
        """
        ...


class ReplayDevice(Protocol):
    """What a replay needs of a device, or of several that replay one graph together."""

    @property
    def jax_device(self) -> Any:
        """The JAX device whose arrays live in the same memory; of several a sharding over them."""
        ...

    def bind_buffers(
        self, definition: GraphDefinition, arena: Arena, clock: ReplayClock
    ) -> Mapping[str, StaticBuffer]:
        """Returns every slot of a definition as a buffer, filled with bytes that show when read."""
        ...

    def instantiate(
        self, definition: GraphDefinition, buffers: Mapping[str, Any], fresh: Sequence[str]
    ) -> Instance:
        """Makes a definition executable.

        Args:
            definition: the whole capture.
            buffers: what `bind_buffers` returned for it.
            fresh: results that users get as immutable values; the device may give them memory of
                their own, so that nothing needs to be copied when they are returned.
        """
        ...


class Device(ReplayDevice, Protocol):
    """Memory, buffers and executable graphs of one device."""

    @property
    def name(self) -> str:
        """What users read in reports, as ``host``."""
        ...

    @property
    def allocator(self) -> Allocator:
        """Where the memory of this device comes from, that of graphs and that of users."""
        ...

    @property
    def host_allocator(self) -> CachingHostAllocator:
        """Host memory that the device copies from by itself: page-locked, if it needs that."""
        ...

    @property
    def comparison(self) -> MemoryComparison | None:
        """Compares results where they are; None where the host reads them at once."""
        ...

    @property
    def compile_kernel(self) -> CompileKernel | None:
        """Makes machine code of a source of ours; None where no graph takes kernels."""
        ...

    @property
    def exchange(self) -> GraphExchange | None:
        """Exchanges graphs of the driver with other libraries; None where there is no driver."""
        ...

    @property
    def input_writer(self) -> InputWriter | None:
        """Writes static inputs where they are; None where each write makes another array."""
        ...

    def number_stream(self, stream: Stream) -> int:
        """Returns the allocator's number of a stream; 0 is the one that JAX computes on."""
        ...

    @property
    def takes_kernels(self) -> bool:
        """True when its graphs are made of the kernels inside XLA's programs.

        False when a region stays one compiled call.
        """
        ...

    @property
    def target(self) -> CodeTarget:
        """What code that runs on it is compiled for."""
        ...

    @property
    def updates_in_place(self) -> bool:
        """True when compiled regions may overwrite the memory of resident state."""
        ...

    def cut_arrays(self, arrays: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """Returns the first part of each array, as arrays of their own; no program computes them.

        Args:
            arrays: what a replay returned, or plain arrays on the device.
            shapes: of the parts; one copy takes all rows of each, see `array_parts.py`.
        """
        ...

    def find_call_problem(self, call: FfiCall | CudnnCall) -> str:
        """Returns why a call of a library cannot be in a graph, or an empty text.

        Of a handler of `jax.ffi` the text reads on after its name, of cuDNN after ``it``. Where
        nothing else shows it, a handler is called once, on zeros, so that a function may still be
        cut at it.
        """
        ...

    def plan_library_call(self, call: LibraryCall) -> int:
        """Returns how many bytes of workspace a call of a library of NVIDIA needs.

        Raises:
            UnsupportedError: the library's bindings are missing.
            CudaError: the library cannot do it.
        """
        ...

    def find_workspace_bytes(self, node: MatmulNode) -> int | None:
        """Returns how many bytes of its workspace a matmul needs; None where nothing says it.

        Raises:
            CudaError: cublasLt has no algorithm for it.
        """
        ...

    # What takes long is done while XLA compiles: any thread may call what prepares or preloads, at
    # any time before `instantiate`, which needs none of it.

    def prepare_result(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Prepares the allocation of results of a type."""
        ...

    def prepare_copies(self, types: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        """Prepares the allocation of copies of arguments, of these shapes and dtypes."""
        ...

    def preload_matmuls(self) -> None:
        """Loads the libraries of matmuls that graphs may call."""
        ...

    def preload_convolutions(self) -> None:
        """Opens the library of convolutions that graphs may call."""
        ...

    def preload_comparison(self) -> None:
        """Loads what compares results when a graph is verified."""
        ...

    def preload_kernels(self, codes: Sequence[KernelCode]) -> None:
        """Loads kernels of ours that graphs may launch, and keeps them."""
        ...

    def open_timer(self, graph: TimedGraph) -> contextlib.AbstractContextManager[NodeTimer]:
        """Returns a block in which the nodes of a graph are timed, see `NodeTimer`.

        Args:
            graph: an instance that is there for this only.
        """
        ...
