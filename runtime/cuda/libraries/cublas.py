"""cuBLAS: scalings and triangular solves of a graph, through NVIDIA's Python bindings.

Note [Workspaces of cuBLAS]
    A handle of cuBLAS has memory for work of its own. During a capture it cannot be used: replays
    of two graphs could run at the same time, and what cuBLAS allocates in a capture becomes a node
    that no child graph may have. So a call gets a workspace that is a temporary of its graph, of
    the size that the handle's own has (XLA uses that one): the size decides which kernels cuBLAS
    takes. ``CUBLAS_WORKSPACE_CONFIG`` limits both. Setting the stream takes the workspace away
    again, so it is set after that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tracegraph.runtime.cuda.context import CudaContext
from tracegraph.runtime.cuda.libraries.handler_calls import LeasedStream
from tracegraph.runtime.cuda.libraries.library_errors import call_library
from tracegraph.runtime.cuda.libraries.nvidia_bindings import (
    check_one_library,
    load_nvmath,
    read_memory_map,
)
from tracegraph.runtime.definition.library_calls import LibraryCall, Scale, TriangularSolve
from tracegraph.runtime.definition.library_nodes import LibraryCallNode
from tracegraph.runtime.definition.nodes import Locate
from tracegraph.runtime.environment import read_cublas_workspace_bytes
from tracegraph.runtime.errors import CudaError
from tracegraph.runtime.memory.caching.block import Block

# The letter of BLAS for each of JAX's dtypes.
LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
MIB = 1 << 20
# What NVIDIA states for the workspace of a handle, by the GPU's compute capability.
WORKSPACE_BYTES = {9: 32 * MIB, 10: 32 * MIB, 12: 12 * MIB}
OTHER_WORKSPACE_BYTES = 4 * MIB
POINTER_BYTES = 8


def count_workspace_bytes(call: LibraryCall, capability: int) -> int:
    """Returns the bytes of workspace of a call: see Note [Workspaces of cuBLAS].

    Args:
        call: of cuBLAS.
        capability: the first number of the GPU's compute capability.
    """
    if isinstance(call, Scale):
        return 0
    own_bytes = WORKSPACE_BYTES.get(capability, OTHER_WORKSPACE_BYTES)
    permitted_bytes = read_cublas_workspace_bytes()
    return own_bytes if permitted_bytes is None else min(own_bytes, permitted_bytes)


class CuBlas:
    """The one handle of a GPU. May be used from any thread.

    Args:
        context: of the GPU.
        load: returns the module ``nvmath``.
        read_maps: returns the text of ``/proc/self/maps``.

    Attributes:
        lock: is held while the handle's stream and workspace are set for a call.
    """

    def __init__(
        self,
        context: CudaContext,
        load: Callable[[], Any] = load_nvmath,
        read_maps: Callable[[], str] = read_memory_map,
    ) -> None:
        self.context = context
        self._load, self._read_maps = load, read_maps
        self.lock = threading.RLock()
        self.handle = 0

    @property
    def bindings(self) -> Any:
        """The module ``nvmath.bindings.cublas``."""
        return self._load().bindings.cublas

    def open(self) -> None:
        """Makes the handle, which takes memory of the device, if there is none yet.

        Raises:
            UnsupportedError: the bindings are missing.
            CudaError: cuBLAS cannot be loaded, or is not the library that XLA has loaded.
        """
        with self.lock, self.context.order.use_context():
            if self.handle:
                return
            bindings = self.bindings
            handle = self.call("cublasCreate", "the first call of cuBLAS", bindings.create)
            try:
                check_one_library("libcublas", self._read_maps())
            except CudaError:
                bindings.destroy(handle)
                raise
            self.handle = handle

    def call(self, call: str, place: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the bindings; see `call_library`."""
        return call_library(self.bindings.cuBLASError, call, place, function, *arguments)


class BlasCalls:
    """The calls of cuBLAS of one graph; lives as long as the graph.

    Args:
        cublas: of the GPU.
        stream: to be captured; the handle keeps it until its next call, so it outlives the graph.
        allocate: returns a block that lives as long as the graph's memory.
    """

    def __init__(
        self, cublas: CuBlas, stream: LeasedStream, allocate: Callable[[int], Block]
    ) -> None:
        self._cublas, self._stream, self._allocate = cublas, stream, allocate
        # The address of a table with those of every A, then of every B.
        self._tables: dict[LibraryCallNode, int] = {}

    @property
    def stream(self) -> int:
        """The stream that the calls are captured on."""
        return self._stream.handle

    def prepare(self, node: LibraryCallNode, locate: Locate) -> None:
        """Makes the handle, and writes the addresses of the matrices of a batch."""
        self._cublas.open()
        call = node.call
        if not isinstance(call, TriangularSolve) or call.batch_count == 1:
            return
        addresses = {role: locate(use) for role, use in node.operands}
        item_bytes = np.dtype(call.dtype).itemsize
        strides = {"a": call.order**2 * item_bytes, "b": call.rows * call.columns * item_bytes}
        steps = np.arange(call.batch_count, dtype=np.uint64)
        table = np.concatenate(
            [np.uint64(addresses[role]) + steps * np.uint64(strides[role]) for role in ("a", "b")]
        )
        block = self._allocate(table.nbytes)
        self._cublas.context.load(table.tobytes(), block.address)
        self._tables[node] = block.address

    def enqueue(self, node: LibraryCallNode, locate: Locate, stream: int) -> None:
        """Adds a call to the graph that a stream is capturing.

        Raises:
            CudaError: cuBLAS refuses the call.
        """
        addresses = {role: locate(use) for role, use in node.operands}
        nbytes = sum(use.nbytes for role, use in node.operands if role == "workspace")
        cublas, bindings = self._cublas, self._cublas.bindings
        with cublas.lock:
            cublas.call("cublasSetStream", node.name, bindings.set_stream, cublas.handle, stream)
            if nbytes:
                cublas.call(
                    "cublasSetWorkspace",
                    node.name,
                    bindings.set_workspace,
                    cublas.handle,
                    addresses["workspace"],
                    nbytes,
                )
            if isinstance(node.call, Scale):
                self._scale(node, node.call, addresses["target"])
            if isinstance(node.call, TriangularSolve):
                self._solve(node, node.call, addresses)

    def _scale(self, node: LibraryCallNode, scale: Scale, target: int) -> None:
        factor = np.array([scale.factor], scale.dtype)
        name = f"{LETTERS[scale.dtype]}scal"
        self._call(name, node, scale.count, factor.ctypes.data, target, 1)

    def _solve(
        self, node: LibraryCallNode, solve: TriangularSolve, addresses: dict[str, int]
    ) -> None:
        bindings = self._cublas.bindings
        one = np.array([1], solve.dtype)
        a, b, count = addresses["a"], addresses["b"], ()
        name = f"{LETTERS[solve.dtype]}trsm"
        if solve.batch_count > 1:
            table, name = self._tables[node], f"{name}_batched"
            a, b, count = table, table + POINTER_BYTES * solve.batch_count, (solve.batch_count,)
        self._call(
            name,
            node,
            int(bindings.SideMode.LEFT if solve.is_left else bindings.SideMode.RIGHT),
            int(bindings.FillMode.LOWER if solve.is_lower else bindings.FillMode.UPPER),
            int(bindings.Operation[solve.transpose]),
            int(bindings.DiagType.UNIT if solve.is_unit else bindings.DiagType.NON_UNIT),
            solve.rows,
            solve.columns,
            one.ctypes.data,
            a,
            solve.order,
            b,
            solve.rows,
            *count,
        )

    def _call(self, name: str, node: LibraryCallNode, *arguments: int) -> None:
        function = getattr(self._cublas.bindings, name)
        words = "".join(word.capitalize() for word in name.split("_"))
        self._cublas.call(f"cublas{words}", node.name, function, self._cublas.handle, *arguments)
