"""FakeBindings: the module ``cuda.bindings.driver`` with calls that are recorded, not made.

Where the real bindings are installed, their records and enumerations are used, so that a field or a
member that they do not have is found. Elsewhere plain objects replace them.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

NOT_READY = 600
_MEMBERS = {
    "CU_STREAM_NON_BLOCKING": 1,
    "CU_EVENT_DISABLE_TIMING": 2,
    "CU_JIT_ERROR_LOG_BUFFER": 5,
    "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES": 6,
    "CU_EVENT_BLOCKING_SYNC": 1,
    "CUDA_ERROR_NOT_READY": NOT_READY,
    "CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC": 1,
    "CU_GRAPH_NODE_TYPE_CONDITIONAL": 13,
    "CU_GRAPH_COND_TYPE_IF": 0,
    "CU_GRAPH_COND_TYPE_WHILE": 1,
    "CU_GRAPH_COND_TYPE_SWITCH": 2,
    "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": 1,
    "CU_STREAM_CAPTURE_MODE_RELAXED": 2,
    "CU_MEMORYTYPE_HOST": 1,
    "CU_MEMORYTYPE_DEVICE": 2,
    "CU_MEMORYTYPE_UNIFIED": 4,
    "CU_POINTER_ATTRIBUTE_MEMORY_TYPE": 2,
    "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8,
    "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 14,
    "CU_FUNC_CACHE_PREFER_SHARED": 1,
    "CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE": 1,
    "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": 4,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 75,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 76,
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 16,
    "CU_DEVICE_ATTRIBUTE_WARP_SIZE": 10,
    "CU_MEMPOOL_ATTR_RELEASE_THRESHOLD": 4,
    "CU_MEM_ALLOC_GRANULARITY_MINIMUM": 0,
    "CU_MEM_ALLOCATION_TYPE_PINNED": 1,
    "CU_MEM_LOCATION_TYPE_DEVICE": 1,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": 3,
    "CU_TENSOR_MAP_DATA_TYPE_UINT8": 0,
    "CU_TENSOR_MAP_DATA_TYPE_UINT16": 1,
    "CU_TENSOR_MAP_DATA_TYPE_UINT32": 2,
    "CU_TENSOR_MAP_DATA_TYPE_UINT64": 4,
    "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE": 0,
    "CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA": 1,
}


class _Member(int):
    @property
    def value(self) -> int:
        return int(self)


class _Enumeration:
    def __getattr__(self, name: str) -> _Member:
        return _Member(_MEMBERS[name])

    def __call__(self, value: int) -> int:
        return value


def _make_attribute_value() -> types.SimpleNamespace:
    return types.SimpleNamespace(clusterDim=types.SimpleNamespace(x=0, y=0, z=0))


_PLAIN: dict[str, Any] = {
    "CUgraphEdgeData": types.SimpleNamespace,
    "CUDA_KERNEL_NODE_PARAMS": types.SimpleNamespace,
    "CUDA_MEMCPY2D": types.SimpleNamespace,
    "CUDA_MEMCPY3D": types.SimpleNamespace,
    "CUDA_MEMSET_NODE_PARAMS": types.SimpleNamespace,
    "CUmemAccessDesc": types.SimpleNamespace,
    "CUmemAllocationProp": types.SimpleNamespace,
    "CUmemLocation": types.SimpleNamespace,
    "CUkernelNodeAttrValue": _make_attribute_value,
}
_NUMBERS = (
    "CUgraphConditionalHandle",
    "CUgraphNode",
    "CUgraphExec",
    "CUstream",
    "CUcontext",
    "cuuint32_t",
    "cuuint64_t",
)


class FakeBindings:
    """Records the calls of the driver's functions.

    Args:
        real: the real bindings for their records, or None.

    Attributes:
        calls: name and arguments of every call.
        results: what a function returns besides its error, by name.
        errors: error numbers of functions that fail, by name.
        absent: functions that this version does not have.
    """

    def __init__(self, real: Any = None) -> None:
        self.real = real
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.results: dict[str, tuple[Any, ...]] = {"cuDriverGetVersion": (13_000,)}
        self.errors: dict[str, int] = {}
        self.absent = {f"cuGraph{name}_v2" for name in ("AddDependencies", "AddNode", "GetEdges")}

    def __getattr__(self, name: str) -> Any:
        if name in self.absent:
            raise AttributeError(name)
        if name.startswith("cu") and name not in _NUMBERS:
            return lambda *arguments: self._record(name, arguments)
        if name == "CUDA_GRAPH_INSTANTIATE_PARAMS":
            # The driver writes into this one.
            return lambda: types.SimpleNamespace(hErrNode_out=0x77, result_out="INVALID_STRUCTURE")
        if name == "CUgraphNodeParams":
            # And into this one.
            conditional = types.SimpleNamespace(phGraph_out=(0x88, 0x89))
            return lambda: types.SimpleNamespace(conditional=conditional)
        if self.real is not None:
            return getattr(self.real, name)
        if name in _NUMBERS:
            return int
        return _PLAIN.get(name) or _Enumeration()

    def take_call(self, name: str) -> tuple[Any, ...]:
        """Returns the arguments of the one call of a function, and forgets all calls."""
        (arguments,) = [arguments for called, arguments in self.calls if called == name]
        self.calls.clear()
        return arguments

    def _record(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in ("cuGetErrorName", "cuGetErrorString"):
            return self.results.get(name, (0, name.encode()))
        self.calls.append((name, arguments))
        if name in self.errors:
            return (self.errors[name], *[0 for _ in self.results.get(name, ())])
        return (0, *self.results.get(name, ()))


def import_real() -> Any:
    """Returns the real bindings, None where they are not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
