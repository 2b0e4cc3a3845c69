"""Of which kinds the nodes of a captured graph are, read back from the CUDA driver."""

from __future__ import annotations

from typing import Any

from tracegraph.runtime.cuda.driver.calls import DriverCalls


class NodeKinds(DriverCalls):
    """Calls that read what a library has put into a graph."""

    def list_node_kinds(self, graph: int) -> frozenset[str]:
        """Returns the kinds of a graph's nodes, graphs inside looked into, as ``KERNEL``.

        A copy from or to memory of the host is ``MEMCPY_OF_HOST_MEMORY``.
        """
        _, count = self._call("cuGraphGetNodes", graph, 0)
        nodes, _ = self._call("cuGraphGetNodes", graph, int(count))
        kinds: set[str] = set()
        for node in nodes[: int(count)]:
            kind = self._call("cuGraphNodeGetType", node).name.removeprefix("CU_GRAPH_NODE_TYPE_")
            if kind == "GRAPH":
                kinds |= self.list_node_kinds(
                    int(self._call("cuGraphChildGraphNodeGetGraph", node))
                )
            elif kind == "MEMCPY" and self._uses_host_memory(node):
                kinds.add("MEMCPY_OF_HOST_MEMORY")
            else:
                kinds.add(kind)
        return frozenset(kinds)

    def _uses_host_memory(self, node: Any) -> bool:
        copy, types = self._call("cuGraphMemcpyNodeGetParams", node), self._api.CUmemorytype
        sides = (
            (copy.srcMemoryType, copy.srcDevice, copy.srcHost),
            (copy.dstMemoryType, copy.dstDevice, copy.dstHost),
        )
        for kind, device_address, host_address in sides:
            if kind == types.CU_MEMORYTYPE_HOST:
                return True
            # An address of any memory; the driver knows which, unless it is the host's own.
            address = int(device_address) or int(host_address)
            if kind == types.CU_MEMORYTYPE_UNIFIED and not self._is_device_memory(address):
                return True
        return False

    def _is_device_memory(self, address: int) -> bool:
        attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        result, kind = self._api.cuPointerGetAttribute(attribute, address)
        return not result and int(kind) == int(self._api.CUmemorytype.CU_MEMORYTYPE_DEVICE)
