"""What a library has put into a graph: its kernels with their parameters, and its memsets."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

from tracegraph.runtime.cuda.driver.calls import DriverCalls, FillRange, KernelLaunch
from tracegraph.runtime.definition.nodes import LaunchShape


@dataclasses.dataclass(frozen=True)
class CapturedNode:
    """A node that this code has not added itself.

    Attributes:
        handle: of the node.
        kind: as ``KERNEL``.
        action: of a kernel or a memset of one row what it does; None for any other.
    """

    handle: int
    kind: str
    action: KernelLaunch | FillRange | None


class CapturedNodes(DriverCalls):
    """Calls that read the nodes of a library's graph."""

    def find_child(self, node: int) -> int:
        """Returns the graph inside of a child node, whose nodes an executable graph can change."""
        return int(self._call("cuGraphChildGraphNodeGetGraph", node))

    def list_captured(self, graph: int) -> list[CapturedNode]:
        """Returns the nodes of a graph, in the order that the driver has them in."""
        _, count = self._call("cuGraphGetNodes", graph, 0)
        nodes, _ = self._call("cuGraphGetNodes", graph, int(count))
        return [self._read_node(node) for node in nodes[: int(count)]]

    def _read_node(self, node: Any) -> CapturedNode:
        kind = self._call("cuGraphNodeGetType", node).name.removeprefix("CU_GRAPH_NODE_TYPE_")
        action: KernelLaunch | FillRange | None = None
        if kind == "KERNEL":
            action = self._read_launch(node)
        elif kind == "MEMSET":
            action = self._read_fill(node)
        return CapturedNode(int(node), kind, action)

    def _read_launch(self, node: Any) -> KernelLaunch | None:
        """Returns what a kernel node launches; None where its parameters have no table."""
        found = self._call("cuGraphKernelNodeGetParams", node)
        if not int(found.kernelParams or 0):
            return None
        function = int(found.func or 0)
        if not function:
            function = int(self._call("cuKernelGetFunction", found.kern))
        sizes = self._read_parameter_sizes(function)
        table = (ctypes.c_void_p * len(sizes)).from_address(int(found.kernelParams))
        parameters = [
            ctypes.string_at(start, size) for start, size in zip(table, sizes, strict=True)
        ]
        shape = LaunchShape(
            (found.gridDimX, found.gridDimY, found.gridDimZ),
            (found.blockDimX, found.blockDimY, found.blockDimZ),
            shared_bytes=found.sharedMemBytes,
        )
        return KernelLaunch(function, shape, tuple(parameters))

    def _read_parameter_sizes(self, function: int) -> list[int]:
        """Returns the bytes of each parameter of a kernel: the driver says when there is none."""
        sizes: list[int] = []
        while True:
            result, _, nbytes = self._api.cuFuncGetParamInfo(function, len(sizes))
            if result == self._api.CUresult.CUDA_ERROR_INVALID_VALUE:
                return sizes
            if result:
                self._raise_call_error(result, "cuFuncGetParamInfo", (function, len(sizes)))
            sizes.append(int(nbytes))

    def _read_fill(self, node: Any) -> FillRange | None:
        found = self._call("cuGraphMemsetNodeGetParams", node)
        if found.height != 1:
            return None
        return FillRange(int(found.dst), found.value, found.elementSize, found.width)
