"""CudaDriver: nodes, edges, executable graphs, launches and captures."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest

from tests.fakes.cuda_stages import LAUNCH, MAP
from tests.fakes.fake_bindings import FakeBindings
from tests.oracles import error_lines
from tracegraph.runtime.cuda.driver.calls import (
    Condition,
    CopyRange,
    FillRange,
    KernelLaunch,
    Port,
)
from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.driver.edge_calls import make_edge
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.nodes import LaunchShape
from tracegraph.runtime.errors import CudaError


def test_a_kernel_node_has_parameters(api: FakeBindings) -> None:
    seen: list[Any] = []
    api.results["cuGraphAddKernelNode"] = (0x71,)
    driver = CudaDriver(api)
    original = api._record

    def record(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuGraphAddKernelNode":
            seen.extend(read_parameters(arguments[3]))
        return original(name, arguments)

    api._record = record
    assert driver.add_kernel_node(0x61, LAUNCH) == 0x71
    graph, before, count, parameters = api.take_call("cuGraphAddKernelNode")
    assert (graph, before, count) == (0x61, [], 0)
    assert seen == [b"12345678", b"\x07\0\0\0", b"m" * 128]
    assert int(parameters.func) == 0xF00
    grid = (parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ)
    block = (parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ)
    assert (grid, block, parameters.sharedMemBytes) == ((4, 3, 2), (128, 2, 1), 1024)


def test_edges_of_a_port_are_added_in_one_call(api: FakeBindings) -> None:
    ports = [Port.LAUNCH_ORDER, Port.COMPLETE, Port.PROGRAMMATIC, Port.LAUNCH_ORDER]
    edges = [make_edge(0x40 + index, 0x71 + index, port) for index, port in enumerate(ports)]
    driver = CudaDriver(api)
    driver.add_edges(0x61, edges)
    found = []
    for name, (graph, firsts, seconds, data, count) in api.calls:
        assert (name, graph, count) == ("cuGraphAddDependencies", 0x61, len(firsts))
        kinds = [(each.from_port, int(each.type)) for each in data] if data else [(0, 0)] * count
        found.append([*zip(map(int, firsts), map(int, seconds), kinds, strict=True)])
    assert found == [
        [(0x41, 0x72, (0, 0))],
        [(0x42, 0x73, (1, 1))],
        [(0x40, 0x71, (2, 1)), (0x43, 0x74, (2, 1))],
    ]
    api.calls.clear()
    driver.add_edges(0x61, [])
    assert api.calls == []


def test_edges_are_read_back(api: FakeBindings) -> None:
    """A driver that gives all edges of one call the data of the first cannot confuse them."""
    held: list[tuple[Any, Any, Any]] = []
    original = api._record

    def record(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuGraphAddDependencies":
            _, firsts, seconds, data, _ = arguments
            held.extend((one, two, data[0]) for one, two in zip(firsts, seconds, strict=True))
        if name == "cuGraphGetEdges":
            room = arguments[1]
            padded = [*held, *[(0, 0, held[0][2])] * room][:room]
            return (0, *map(list, zip(*padded, strict=True)), len(held))
        return original(name, arguments)

    api._record = record
    driver, early, late = CudaDriver(api), Port.LAUNCH_ORDER, Port.PROGRAMMATIC
    edges = [
        make_edge(0x41, 0x71, early),
        make_edge(0x42, 0x71, late),
        make_edge(0x43, 0x71, early),
    ]
    driver.add_edges(0x61, edges)
    expected = {(0x41, 0x71, 2, True), (0x42, 0x71, 1, True), (0x43, 0x71, 2, True)}
    assert driver.list_edges(0x61, 9) == expected
    assert len(driver.list_edges(0x61, 2)) == 2
    # The planted fault: two ports in one call.
    held.clear()
    data = [driver._make_data(port) for port in (early, late)]
    driver._call("cuGraphAddDependencies", 0x61, [0x41, 0x42], [0x71, 0x71], data, 2)
    assert {edge.port for edge in driver.list_edges(0x61, 9)} == {int(early)}


def read_parameters(parameters: Any) -> list[bytes]:
    pointers = (ctypes.c_void_p * 3).from_address(int(parameters.kernelParams))
    assert all(pointer % 64 == 0 for pointer in pointers if pointer is not None)
    sizes = [len(parameter) for parameter in LAUNCH.parameters]
    return [
        ctypes.string_at(pointer, size)
        for pointer, size in zip(pointers, sizes, strict=True)
        if pointer is not None
    ]


def test_cuda_12_has_edges_with_data_under_another_name(api: FakeBindings) -> None:
    api.absent.clear()
    CudaDriver(api).add_edges(0x61, [make_edge(0x40, 0x71, Port.PROGRAMMATIC)])
    assert api.calls[-1][0] == "cuGraphAddDependencies_v2"
    api.results["cuGraphGetEdges_v2"] = ([], [], [], 0)
    assert CudaDriver(api).list_edges(0x61, 1) == frozenset()


def test_a_kernel_is_launched_outside_of_a_graph(api: FakeBindings) -> None:
    seen: list[bytes] = []

    def record(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        assert name == "cuLaunchKernel"
        assert arguments[:8] == (0xF00, 4, 3, 2, 128, 2, 1, 1024)
        assert (arguments[8], arguments[10]) == (0x51, 0)
        seen.extend(read_parameters(types.SimpleNamespace(kernelParams=arguments[9])))
        return (0,)

    api._record = record
    CudaDriver(api).launch_kernel(LAUNCH, 0x51)
    assert seen == [b"12345678", b"\x07\0\0\0", b"m" * 128]


def test_a_cluster_is_an_attribute_of_the_node(api: FakeBindings) -> None:
    api.results["cuGraphAddKernelNode"] = (0x71,)
    shape = LaunchShape((4, 1, 1), (128, 1, 1), (2, 1, 1))
    CudaDriver(api).add_kernel_node(0x61, KernelLaunch(1, shape, ()))
    node, attribute, value = api.take_call("cuGraphKernelNodeSetAttribute")
    cluster = (value.clusterDim.x, value.clusterDim.y, value.clusterDim.z)
    assert (node, int(attribute), cluster) == (0x71, 4, (2, 1, 1))


def test_copy_fill_child_event_and_empty_nodes(api: FakeBindings) -> None:
    functions = ["Memcpy", "Memset", "ChildGraph", "Empty", "EventRecord", "EventWait"]
    api.results |= {f"cuGraphAdd{name}Node": (0x71,) for name in functions}
    driver = CudaDriver(api)
    driver.add_copy_node(0x61, CopyRange(0x100, 0x200, 64), 0xC0)
    graph, before, count, copy, context = api.take_call("cuGraphAddMemcpyNode")
    assert (graph, before, count, context) == (0x61, [], 0, 0xC0)
    assert (int(copy.srcDevice), int(copy.dstDevice)) == (0x200, 0x100)
    assert (copy.WidthInBytes, copy.Height, copy.Depth) == (64, 1, 1)
    assert (int(copy.srcMemoryType), int(copy.dstMemoryType)) == (2, 2)
    driver.add_fill_node(0x61, FillRange(0x100, 5, 4, 16), 0xC0)
    _, _, count, fill, context = api.take_call("cuGraphAddMemsetNode")
    assert (count, context, int(fill.dst), fill.value) == (0, 0xC0, 0x100, 5)
    assert (fill.elementSize, fill.width, fill.height) == (4, 16, 1)
    driver.add_child_node(0x61, 0x62)
    assert api.take_call("cuGraphAddChildGraphNode") == (0x61, [], 0, 0x62)
    driver.add_event_record_node(0x61, 0x51)
    assert api.take_call("cuGraphAddEventRecordNode") == (0x61, [], 0, 0x51)
    driver.add_event_wait_node(0x61, 0x51)
    assert api.take_call("cuGraphAddEventWaitNode") == (0x61, [], 0, 0x51)
    driver.add_empty_node(0x61)
    assert api.take_call("cuGraphAddEmptyNode") == (0x61, [], 0)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_conditional_node_and_its_handle(api: FakeBindings, is_old: bool) -> None:
    # CUDA 12 has another function that takes the data of edges.
    api.absent -= {"cuGraphAddNode_v2"} if is_old else set()
    api.results |= {"cuGraphConditionalHandleCreate": (0x55,), "cuGraphAddNode": (0x71,)}
    driver = CudaDriver(api)
    assert driver.create_condition(0x61, 0xC0) == 0x55
    assert api.take_call("cuGraphConditionalHandleCreate") == (0x61, 0xC0, 0, 0)
    condition = Condition(0x55, Construct.SWITCH, 2)
    added = driver.add_conditional_node(0x61, condition, 0xC0)
    assert added == (0x71, (0x88, 0x89))
    graph, before, *counted, parameters = api.take_call("cuGraphAddNode")
    assert (graph, before) == (0x61, [])
    assert counted == ([0] if is_old else [None, 0])
    conditional = parameters.conditional
    assert (int(parameters.type), int(conditional.type), conditional.size) == (13, 2, 2)
    assert (int(conditional.handle), int(conditional.ctx)) == (0x55, 0xC0)


def test_nodes_of_an_executable_graph_are_changed(api: FakeBindings) -> None:
    driver = CudaDriver(api)
    driver.set_kernel_node(0x62, 0x71, LAUNCH)
    executable, node, kernel = api.take_call("cuGraphExecKernelNodeSetParams")
    assert (executable, node, kernel.gridDimX) == (0x62, 0x71, 4)
    driver.set_copy_node(0x62, 0x71, CopyRange(0x100, 0x200, 64), 0xC0)
    executable, node, copy, context = api.take_call("cuGraphExecMemcpyNodeSetParams")
    assert (executable, node, copy.WidthInBytes, context) == (0x62, 0x71, 64, 0xC0)
    driver.set_fill_node(0x62, 0x71, FillRange(0x100, 5, 4, 16), 0xC0)
    executable, node, fill, context = api.take_call("cuGraphExecMemsetNodeSetParams")
    assert (executable, node, fill.width, context) == (0x62, 0x71, 16, 0xC0)


def test_a_patch_sends_what_was_written(api: FakeBindings) -> None:
    patch = CudaDriver(api).patch_kernel_node(0x62, 0x71, LAUNCH)
    patch.packed.words[patch.packed.starts[0]] = 0x4242
    patch.send()
    executable, node, parameters = api.take_call("cuGraphExecKernelNodeSetParams")
    assert (int(executable), int(node)) == (0x62, 0x71)
    changed = read_parameters(parameters)
    assert changed == [(0x4242).to_bytes(8, "little"), b"\x07\0\0\0", b"m" * 128]
    api.errors["cuGraphExecKernelNodeSetParams"] = 1
    with pytest.raises(CudaError, match="from cuGraphExecKernelNodeSetParams"):
        patch.send()


def test_instantiation_names_the_node_at_fault(api: FakeBindings) -> None:
    api.results["cuGraphInstantiateWithParams"] = (0x62,)
    driver = CudaDriver(api)
    assert driver.instantiate(0x61, {}) == 0x62
    api.errors["cuGraphInstantiateWithParams"] = 1
    with pytest.raises(CudaError) as caught:
        driver.instantiate(0x61, {0x77: "node 3 of graph `f`, kernel add"})
    error_lines.match(
        caught.value,
        "cuGetErrorName from cuGraphInstantiateWithParams",
        "cuGraphInstantiateWithParams(graph=0x61, at node 3 of graph `f`, kernel add, "
        "result=INVALID_STRUCTURE)",
        "cuGetErrorString",
        "internal error in tracegraph",
    )


def test_a_launcher_is_one_call(api: FakeBindings) -> None:
    owner = object()
    launch = CudaDriver(api).make_launcher(0x62, 7, 0xC0, owner)
    launch()
    executable, stream = api.take_call("cuGraphLaunch")
    assert (int(executable), int(stream)) == (0x62, 7)
    assert launch.__dict__["owner"] is owner


def test_a_launcher_makes_the_context_current_where_a_thread_has_none(api: FakeBindings) -> None:
    outcomes = [201, 201, 0]

    def record(name: str, arguments: tuple[Any, ...]) -> tuple[int]:
        api.calls.append((name, arguments))
        return (outcomes.pop(0) if name == "cuGraphLaunch" else 0,)

    api._record = record
    CudaDriver(api).make_launcher(0x62, 7, 0xC0)()
    names = [name for name, _ in api.calls]
    assert names == ["cuGraphLaunch", "cuGraphLaunch", "cuCtxSetCurrent", "cuGraphLaunch"]
    assert not outcomes


@pytest.mark.parametrize("context", [0, 0xC0])
def test_a_failed_launch_is_an_error(api: FakeBindings, context: int) -> None:
    api.errors["cuGraphLaunch"] = 201
    launch = CudaDriver(api).make_launcher(0x1062, 0x2007, context)
    with pytest.raises(CudaError, match=r"where: cuGraphLaunch\(0x1062, 0x2007\)"):
        launch()


def test_a_capture_that_gives_no_graph_is_an_error(api: FakeBindings) -> None:
    api.results["cuStreamEndCapture"] = (0,)
    with pytest.raises(CudaError, match="the capture was made invalid"):
        CudaDriver(api).end_capture(7)


def test_an_aborted_capture_never_fails_and_drops_its_graph(api: FakeBindings) -> None:
    api.results["cuStreamEndCapture"] = (0x61,)
    CudaDriver(api).abort_capture(7)
    assert api.calls == [("cuStreamEndCapture", (7,)), ("cuGraphDestroy", (0x61,))]
    api.calls.clear()
    api.errors["cuStreamEndCapture"] = 901
    CudaDriver(api).abort_capture(7)
    assert api.calls == [("cuStreamEndCapture", (7,))]


def test_a_tensor_map_is_encoded_field_by_field(api: FakeBindings) -> None:
    memory = ctypes.create_string_buffer(b"t" * 128, 128)
    encoded = types.SimpleNamespace(getPtr=lambda: ctypes.addressof(memory))
    api.results["cuTensorMapEncodeTiled"] = (encoded,)
    assert CudaDriver(api).encode_tensor_map(MAP, 0x1000) == b"t" * 128
    dtype, rank, address, dims, strides, box, steps, *rest = api.take_call("cuTensorMapEncodeTiled")
    assert (int(dtype), rank, address) == (1, 2, 0x1000)
    lists = [[int(each) for each in numbers] for numbers in (dims, strides, box, steps)]
    assert lists == [[8, 4], [16], [8, 4], [1, 1]]
    assert [int(each) for each in rest] == [0, 2, 2, 1]


def test_the_kinds_of_captured_nodes_are_read(api: FakeBindings) -> None:
    """A graph inside is looked into, and copies of memory of the host are told apart."""
    kinds = {1: "KERNEL", 2: "GRAPH", 3: "MEMCPY", 4: "HOST", 5: "MEMCPY"}
    graphs = {0x61: [1, 2], 0x62: [3, 4, 5]}
    kind_of = api.CUmemorytype
    device, unified = kind_of.CU_MEMORYTYPE_DEVICE, kind_of.CU_MEMORYTYPE_UNIFIED
    copies = {3: (device, 0x1000), 5: (unified, 0x2000)}
    memory = {0x2000: int(device)}

    def record(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuGraphGetNodes":
            nodes = graphs[arguments[0]]
            return (0, nodes, len(nodes))
        if name == "cuGraphNodeGetType":
            return (0, types.SimpleNamespace(name=f"CU_GRAPH_NODE_TYPE_{kinds[arguments[0]]}"))
        if name == "cuGraphChildGraphNodeGetGraph":
            return (0, 0x62)
        if name == "cuPointerGetAttribute":
            found = memory.get(arguments[1])
            return (0, found) if found is not None else (1, None)
        assert name == "cuGraphMemcpyNodeGetParams"
        kind, address = copies[arguments[0]]
        sides = dict.fromkeys(("srcDevice", "dstDevice"), address)
        sides |= {"srcMemoryType": kind, "dstMemoryType": device, "srcHost": 0, "dstHost": 0}
        return (0, types.SimpleNamespace(**sides))

    api._record = record
    driver = CudaDriver(api)
    assert driver.list_node_kinds(0x61) == {"KERNEL", "MEMCPY", "HOST"}
    memory.clear()
    assert "MEMCPY_OF_HOST_MEMORY" in driver.list_node_kinds(0x61)
    copies[5] = (kind_of.CU_MEMORYTYPE_HOST, 0)
    assert "MEMCPY_OF_HOST_MEMORY" in driver.list_node_kinds(0x61)
