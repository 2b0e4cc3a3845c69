"""Kernel code, tensor maps, graphs and stream captures of the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tracegraph.runtime.cuda.driver.calls import (
    Condition,
    CopyRange,
    FillRange,
    KernelLaunch,
    make_call_error,
    make_fork_error,
)
from tracegraph.runtime.cuda.driver.edge_calls import EdgeCalls
from tracegraph.runtime.cuda.driver.parameters import KernelPatch, PackedParameters
from tracegraph.runtime.definition.nodes import TensorMap

TENSOR_MAP_BYTES = 128
PORTABLE_CLUSTER_SIZE = 8
_INVALID_CONTEXT = 201
_ELF = b"\x7fELF"
_LOG_BYTES = 8192


class GraphCalls(EdgeCalls):
    """Calls on kernel code, tensor maps, graphs and stream captures."""

    def load_library(self, image: bytes) -> int:
        """Returns a library handle of a kernel image; the driver keeps its own copy of it.

        An error about a text of PTX has what the driver's compiler says of it.

        Args:
            image: a cubin, or PTX that ends in a zero byte.
        """
        if image.startswith(_ELF):
            return int(self._call("cuLibraryLoadData", image, [], [], 0, [], [], 0))
        names, log = self._api.CUjit_option, bytearray(_LOG_BYTES)
        options = [names.CU_JIT_ERROR_LOG_BUFFER, names.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        arguments = (image, options, [log, len(log)], len(options), [], [], 0)
        result, library = self._api.cuLibraryLoadData(*arguments)
        if result:
            said = log.partition(b"\0")[0].decode(errors="replace").strip()
            shown = f"{len(image)} bytes of PTX; its compiler says: {said or 'nothing'}"
            self._raise_call_error(result, "cuLibraryLoadData", shown)
        return int(library)

    def unload_library(self, library: int) -> None:
        """Unloads a library; its functions must not be launched any more."""
        with self._allow_during_capture():
            self._call("cuLibraryUnload", library)

    def get_function(self, library: int, symbol: str) -> int:
        """Returns the handle of a kernel in the current context, loaded and ready."""
        kernel = self._call("cuLibraryGetKernel", library, symbol.encode())
        return int(self._call("cuKernelGetFunction", kernel))

    def set_shared_bytes(self, function: int, nbytes: int) -> None:
        """Allows a kernel that much dynamic shared memory, and prefers shared memory over cache."""
        attribute = self._api.CUfunction_attribute
        name = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function, name, nbytes)
        preference = self._api.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED
        self._call("cuFuncSetCacheConfig", function, preference)

    def allow_large_clusters(self, function: int) -> None:
        """Allows a kernel clusters of more than 8 blocks, which not every GPU can run."""
        attribute = self._api.CUfunction_attribute
        name = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        self._call("cuFuncSetAttribute", function, name, 1)

    def launch_kernel(self, launch: KernelLaunch, stream: int) -> None:
        """Enqueues one launch of a kernel without clusters, outside of a graph."""
        packed, shape = PackedParameters(launch.parameters), launch.shape
        self._call(
            "cuLaunchKernel",
            launch.function,
            *shape.grid,
            *shape.block,
            shape.shared_bytes,
            stream,
            packed.address,
            0,
            shown=launch,
        )

    def encode_tensor_map(self, tensor_map: TensorMap, address: int) -> bytes:
        """Returns the 128 bytes that describe an array at an address to the bulk copy engine."""
        api = self._api
        bits = 8 * tensor_map.element_bytes
        fill = "NAN_REQUEST_ZERO_FMA" if tensor_map.fills_nan else "NONE"
        encoded = self._call(
            "cuTensorMapEncodeTiled",
            getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_UINT{bits}"),
            len(tensor_map.dims),
            address,
            [api.cuuint64_t(each) for each in tensor_map.dims],
            # Never read for one dimension, but the driver refuses a null pointer.
            [api.cuuint64_t(each) for each in tensor_map.strides or (16,)],
            [api.cuuint32_t(each) for each in tensor_map.box],
            [api.cuuint32_t(each) for each in tensor_map.element_strides],
            api.CUtensorMapInterleave(tensor_map.interleave),
            api.CUtensorMapSwizzle(int(tensor_map.swizzle)),
            api.CUtensorMapL2promotion(tensor_map.l2_promotion),
            getattr(api.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"),
            shown=f"address={address:#x}, {tensor_map}",
        )
        return ctypes.string_at(int(encoded.getPtr()), TENSOR_MAP_BYTES)

    def create_graph(self) -> int:
        """Returns a new graph without nodes."""
        return int(self._call("cuGraphCreate", 0))

    def destroy_graph(self, graph: int) -> None:
        """Destroys a graph; executable graphs made from it live on."""
        self._call("cuGraphDestroy", graph)

    def add_kernel_node(self, graph: int, launch: KernelLaunch) -> int:
        """Returns a new node that launches a kernel."""
        packed = PackedParameters(launch.parameters)
        parameters = self._make_kernel_parameters(launch, packed)
        node = self._add("cuGraphAddKernelNode", graph, parameters, shown=launch)
        if launch.shape.cluster != (1, 1, 1):
            self._set_cluster(node, launch.shape.cluster)
        return node

    def add_copy_node(self, graph: int, copy: CopyRange, context: int) -> int:
        """Returns a new node that copies within device memory."""
        parameters = self._make_copy_parameters(copy)
        return self._add("cuGraphAddMemcpyNode", graph, parameters, context, shown=copy)

    def add_fill_node(self, graph: int, fill: FillRange, context: int) -> int:
        """Returns a new node that sets device memory to a value."""
        parameters = self._make_fill_parameters(fill)
        return self._add("cuGraphAddMemsetNode", graph, parameters, context, shown=fill)

    def add_child_node(self, graph: int, child: int) -> int:
        """Returns a new node that holds a copy of another graph."""
        return self._add("cuGraphAddChildGraphNode", graph, child)

    def add_event_record_node(self, graph: int, event: int) -> int:
        """Returns a new node that records an event at each launch."""
        return self._add("cuGraphAddEventRecordNode", graph, event)

    def add_event_wait_node(self, graph: int, event: int) -> int:
        """Returns a new node that waits for what was recorded last when the graph is launched."""
        return self._add("cuGraphAddEventWaitNode", graph, event)

    def add_empty_node(self, graph: int) -> int:
        """Returns a new node that does nothing but keep others in order."""
        return self._add("cuGraphAddEmptyNode", graph)

    def create_condition(self, graph: int, context: int) -> int:
        """Returns the handle of a condition, for one conditional node of a graph.

        Kernels set its value: those before the node, and those inside of it.
        """
        return int(self._call("cuGraphConditionalHandleCreate", graph, context, 0, 0))

    def add_conditional_node(
        self, graph: int, condition: Condition, context: int
    ) -> tuple[int, tuple[int, ...]]:
        """Returns a new conditional node and the empty graphs inside of it, which it owns."""
        api = self._api
        parameters = api.CUgraphNodeParams()
        parameters.type = api.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        construct = f"CU_GRAPH_COND_TYPE_{condition.construct.name}"
        parameters.conditional.handle = api.CUgraphConditionalHandle(condition.handle)
        parameters.conditional.type = getattr(api.CUgraphConditionalNodeType, construct)
        parameters.conditional.size = condition.body_count
        parameters.conditional.ctx = api.CUcontext(context)
        # CUDA 12 has edges with data under a name of their own.
        takes_data = not hasattr(api, "cuGraphAddNode_v2")
        counted = (None, 0) if takes_data else (0,)
        shown = f"graph={graph:#x}, {condition}"
        node = int(self._call("cuGraphAddNode", graph, [], *counted, parameters, shown=shown))
        return node, tuple(int(body) for body in parameters.conditional.phGraph_out)

    def count_nodes(self, graph: int) -> int:
        """Returns the number of nodes of a graph; a child graph is one."""
        _, count = self._call("cuGraphGetNodes", graph, 0)
        return int(count)

    def instantiate(self, graph: int, node_names: Mapping[int, str]) -> int:
        """Returns an executable graph.

        Args:
            graph: the graph; later changes to it do not matter.
            node_names: how an error names the node that the driver refuses.
        """
        parameters = self._api.CUDA_GRAPH_INSTANTIATE_PARAMS()
        result, executable = self._api.cuGraphInstantiateWithParams(graph, parameters)
        if result:
            self._raise_instantiation_error(result, graph, parameters, node_names)
        return int(executable)

    def destroy_executable(self, executable: int) -> None:
        """Destroys an executable graph; one that is running finishes first, without blocking."""
        with self._allow_during_capture():
            self._call("cuGraphExecDestroy", executable)

    def upload(self, executable: int, stream: int) -> None:
        """Enqueues placing an executable graph on the device, so that no launch has to."""
        self._call("cuGraphUpload", executable, stream)

    def make_launcher(
        self, executable: int, stream: int, context: int = 0, owner: object = None
    ) -> Callable[[], None]:
        """Returns a function that launches an executable graph on a stream.

        Args:
            executable: the executable graph.
            stream: must outlive the function.
            context: made current in a thread that launches and has none.
            owner: of the executable graph; lives as long as the function.
        """
        call = self._api.cuGraphLaunch
        executable_handle = self._api.CUgraphExec(executable)
        stream_handle = self._api.CUstream(stream)
        forks = self._forks

        def launch() -> None:
            if forks or call(executable_handle, stream_handle)[0]:
                retry()

        def retry() -> None:
            if forks:
                raise make_fork_error(f"cuGraphLaunch({executable:#x}, {stream:#x})")
            # Errors are sticky or repeat themselves, so a second call shows the first one's error,
            # unless all that was missing was the thread's context.
            (result,) = call(executable_handle, stream_handle)
            if result == _INVALID_CONTEXT and context:
                self._call("cuCtxSetCurrent", context)
                (result,) = call(executable_handle, stream_handle)
            if result:
                self._raise_call_error(result, "cuGraphLaunch", (executable, stream))

        launch.__dict__["owner"] = owner
        return launch

    def set_kernel_node(self, executable: int, node: int, launch: KernelLaunch) -> None:
        """Changes what a kernel node of an executable graph launches from now on."""
        packed = PackedParameters(launch.parameters)
        parameters = self._make_kernel_parameters(launch, packed)
        self._call("cuGraphExecKernelNodeSetParams", executable, node, parameters, shown=launch)

    def patch_kernel_node(self, executable: int, node: int, launch: KernelLaunch) -> KernelPatch:
        """Returns the fast way to change the parameters of a kernel node, again and again.

        Args:
            executable: must live as long as the patch is sent.
            node: of the graph that it was made from.
            launch: what the node launches now.
        """
        packed = PackedParameters(launch.parameters)
        parameters = self._make_kernel_parameters(launch, packed)
        name = "cuGraphExecKernelNodeSetParams"
        # No Python frame around it: each call goes through it.
        attempt = functools.partial(
            getattr(self._api, name),
            self._api.CUgraphExec(executable),
            self._api.CUgraphNode(node),
            parameters,
        )

        def report() -> None:
            # Wrong parameters fail again.
            (result,) = attempt()
            if result:
                self._raise_call_error(result, name, (executable, node, *packed.read()))

        return KernelPatch(packed, attempt, report)

    def set_copy_node(self, executable: int, node: int, copy: CopyRange, context: int) -> None:
        """Changes what a memcpy node of an executable graph copies from now on."""
        parameters = self._make_copy_parameters(copy)
        name = "cuGraphExecMemcpyNodeSetParams"
        self._call(name, executable, node, parameters, context, shown=copy)

    def set_fill_node(self, executable: int, node: int, fill: FillRange, context: int) -> None:
        """Changes what a memset node of an executable graph sets from now on."""
        parameters = self._make_fill_parameters(fill)
        name = "cuGraphExecMemsetNodeSetParams"
        self._call(name, executable, node, parameters, context, shown=fill)

    def write_dot(self, graph: int, path: str | os.PathLike[str]) -> None:
        """Writes a graph as DOT text, with the parameters of its nodes."""
        flags = self._api.CUgraphDebugDot_flags.CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE.value
        self._call("cuGraphDebugDotPrint", graph, os.fsencode(path), flags)

    def begin_capture(self, stream: int) -> None:
        """Starts to capture what this thread enqueues on a stream, instead of running it."""
        mode = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        """Returns the graph of what a stream has captured; the caller destroys it."""
        graph = int(self._call("cuStreamEndCapture", stream))
        if not graph:
            name = "cuStreamEndCapture"
            where = f"{name}({stream:#x})"
            raise make_call_error("no graph", name, where, "the capture was made invalid")
        return graph

    def abort_capture(self, stream: int) -> None:
        """Ends a capture and drops its graph, whatever state it is in."""
        result, graph = self._api.cuStreamEndCapture(stream)
        if not result and int(graph):
            self.destroy_graph(int(graph))

    def _add(self, name: str, graph: int, *arguments: Any, shown: object = None) -> int:
        """Returns a new node; its edges are added later, those of all nodes at once."""

        def show() -> str:
            return f"graph={graph:#x}, {shown or arguments}"

        return int(self._call(name, graph, [], 0, *arguments, shown=show))

    def _set_cluster(self, node: int, cluster: tuple[int, int, int]) -> None:
        value = self._api.CUkernelNodeAttrValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster
        attribute = self._api.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shown = f"node={node:#x}, cluster={cluster}"
        self._call("cuGraphKernelNodeSetAttribute", node, attribute, value, shown=shown)

    def _raise_instantiation_error(
        self, result: Any, graph: int, parameters: Any, node_names: Mapping[int, str]
    ) -> NoReturn:
        node = int(parameters.hErrNode_out)
        reason = getattr(parameters.result_out, "name", str(parameters.result_out))
        at_fault = f", at {node_names.get(node, hex(node))}" if node else ""
        shown = f"graph={graph:#x}{at_fault}, result={reason}"
        self._raise_call_error(result, "cuGraphInstantiateWithParams", shown)

    def _make_kernel_parameters(self, launch: KernelLaunch, packed: PackedParameters) -> Any:
        """Returns the driver's record, which points into ``packed``."""
        parameters = self._api.CUDA_KERNEL_NODE_PARAMS()
        parameters.func = launch.function
        grid, block = launch.shape.grid, launch.shape.block
        parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = grid
        parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = block
        parameters.sharedMemBytes = launch.shape.shared_bytes
        parameters.kernelParams = packed.address
        return parameters

    def _make_copy_parameters(self, copy: CopyRange) -> Any:
        parameters = self._api.CUDA_MEMCPY3D()
        kind = self._api.CUmemorytype.CU_MEMORYTYPE_DEVICE
        parameters.srcMemoryType = parameters.dstMemoryType = kind
        parameters.srcDevice = copy.source_address
        parameters.dstDevice = copy.target_address
        parameters.WidthInBytes = copy.nbytes
        parameters.Height = parameters.Depth = 1
        return parameters

    def _make_fill_parameters(self, fill: FillRange) -> Any:
        parameters = self._api.CUDA_MEMSET_NODE_PARAMS()
        parameters.dst = fill.target_address
        parameters.value = fill.value
        parameters.elementSize = fill.element_bytes
        parameters.width = fill.count
        parameters.height = 1
        return parameters
