"""CudaDriver: what each method asks of the driver, and what its failures say."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import pickle
import types
from typing import Any

import pytest

from tests import error_lines
from tests.runtime.fake_bindings import NOT_READY, FakeBindings
from tests.runtime.fake_driver import FakeDriver
from tracegraph.runtime.cuda import driver as driver_module
from tracegraph.runtime.cuda.driver import CudaDriver, import_bindings, load_driver, open_driver
from tracegraph.runtime.cuda.driver_calls import CopyRange, FillRange, KernelLaunch
from tracegraph.runtime.cuda.parameters import PackedParameters
from tracegraph.runtime.errors import CudaError, OutOfMemoryError
from tracegraph.runtime.nodes import BufferUse, LaunchShape, Swizzle, TensorMap

SHAPE = LaunchShape((4, 3, 2), (128, 2, 1), shared_bytes=1024)
LAUNCH = KernelLaunch(0xF00, SHAPE, (b"12345678", b"\x07\0\0\0", b"m" * 128))
MAP = TensorMap(
    BufferUse("x", 0, 64), 2, (8, 4), (16,), (8, 4), (1, 1), 0, Swizzle.BYTES_64, 2, True
)


def import_real() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None


@pytest.fixture(params=["plain", "bindings"])
def api(request: pytest.FixtureRequest) -> FakeBindings:
    if request.param == "plain":
        return FakeBindings()
    real = import_real()
    if real is None:
        pytest.skip("the records of cuda.bindings are compared only where it is installed")
    return FakeBindings(real)


def read_methods(kind: type) -> dict[str, str]:
    return {
        name: str(inspect.signature(value))
        for name, value in inspect.getmembers(kind, callable)
        if not name.startswith("_")
    }


def test_the_fake_has_the_methods_of_the_driver() -> None:
    fake = read_methods(FakeDriver)
    for name in FakeDriver.EXTRAS:
        del fake[name]
    assert fake == read_methods(CudaDriver)


def test_every_method_says_what_it_does() -> None:
    for name, method in inspect.getmembers(CudaDriver, callable):
        assert name.startswith("_") or method.__doc__, name


@pytest.mark.parametrize(
    ("method", "arguments", "function", "results", "expected", "value"),
    [
        ("read_version", (), "cuDriverGetVersion", (12_090,), (), 12_090),
        ("count_devices", (), "cuDeviceGetCount", (3,), (), 3),
        ("set_current", (0xC0,), "cuCtxSetCurrent", (), (0xC0,), None),
        ("get_current", (), "cuCtxGetCurrent", (0xC0,), (), 0xC0),
        ("synchronize_context", (), "cuCtxSynchronize", (), (), None),
        ("create_stream", (-5,), "cuStreamCreateWithPriority", (7,), (1, -5), 7),
        ("destroy_stream", (7,), "cuStreamDestroy", (), (7,), None),
        ("query_stream", (7,), "cuStreamQuery", (), (7,), True),
        ("synchronize_stream", (7,), "cuStreamSynchronize", (), (7,), None),
        ("wait_event", (7, 9), "cuStreamWaitEvent", (), (7, 9, 0), None),
        ("read_priority_range", (), "cuCtxGetStreamPriorityRange", (0, -5), (), (0, -5)),
        ("record_event", (9, 7), "cuEventRecord", (), (9, 7), None),
        ("query_event", (9,), "cuEventQuery", (), (9,), True),
        ("synchronize_event", (9,), "cuEventSynchronize", (), (9,), None),
        ("elapsed_ms", (8, 9), "cuEventElapsedTime", (1.5,), (8, 9), 1.5),
        ("destroy_event", (9,), "cuEventDestroy", (), (9,), None),
        ("mem_get_info", (), "cuMemGetInfo", (10, 20), (), (10, 20)),
        ("allocate_memory", (64,), "cuMemAlloc", (0x700,), (64,), 0x700),
        ("free_memory", (0x700,), "cuMemFree", (), (0x700,), None),
        ("allocate_host", (64,), "cuMemHostAlloc", (0x700,), (64, 1), 0x700),
        ("free_host", (0x700,), "cuMemFreeHost", (), (0x700,), None),
        ("copy_async", (1, 2, 3, 7), "cuMemcpyAsync", (), (1, 2, 3, 7), None),
        ("copy_to_device_async", (1, 2, 3, 7), "cuMemcpyHtoDAsync", (), (1, 2, 3, 7), None),
        ("copy_to_host_async", (1, 2, 3, 7), "cuMemcpyDtoHAsync", (), (1, 2, 3, 7), None),
        ("fill_async", (1, 5, 1, 3, 7), "cuMemsetD8Async", (), (1, 5, 3, 7), None),
        ("fill_async", (2, 5, 2, 3, 7), "cuMemsetD16Async", (), (2, 5, 3, 7), None),
        ("fill_async", (4, 5, 4, 3, 7), "cuMemsetD32Async", (), (4, 5, 3, 7), None),
        ("load_library", (b"i",), "cuLibraryLoadData", (5,), (b"i", [], [], 0, [], [], 0), 5),
        ("create_graph", (), "cuGraphCreate", (0x61,), (0,), 0x61),
        ("destroy_graph", (0x61,), "cuGraphDestroy", (), (0x61,), None),
        ("count_nodes", (0x61,), "cuGraphGetNodes", ([], 3), (0x61, 0), 3),
        ("upload", (0x62, 7), "cuGraphUpload", (), (0x62, 7), None),
        ("write_dot", (0x61, "a.dot"), "cuGraphDebugDotPrint", (), (0x61, b"a.dot", 1), None),
        ("begin_capture", (7,), "cuStreamBeginCapture", (), (7, 1), None),
        ("end_capture", (7,), "cuStreamEndCapture", (0x61,), (7,), 0x61),
    ],
)
def test_a_method_is_one_call(
    api: FakeBindings,
    method: str,
    arguments: tuple[Any, ...],
    function: str,
    results: tuple[Any, ...],
    expected: tuple[Any, ...],
    value: object,
) -> None:
    api.results[function] = results
    assert getattr(CudaDriver(api), method)(*arguments) == value
    assert api.calls == [(function, expected)]
    api.errors[function] = 1
    with pytest.raises(CudaError, match=f"cuGetErrorName from {function}"):
        getattr(CudaDriver(api), method)(*arguments)


@pytest.mark.parametrize(
    ("method", "function"),
    [("unload_library", "cuLibraryUnload"), ("destroy_executable", "cuGraphExecDestroy")],
)
def test_old_graphs_can_go_while_a_thread_captures(
    api: FakeBindings, method: str, function: str
) -> None:
    api.results["cuThreadExchangeStreamCaptureMode"] = (1,)
    getattr(CudaDriver(api), method)(0x62)
    exchange = "cuThreadExchangeStreamCaptureMode"
    expected = [(exchange, (2,)), (function, (0x62,)), (exchange, (1,))]
    assert api.calls == expected
    api.errors[function] = 1
    with pytest.raises(CudaError, match=f"from {function}"):
        getattr(CudaDriver(api), method)(0x62)
    assert api.calls[3:] == expected


@pytest.mark.parametrize(
    ("timing", "blocking", "flags"),
    [(False, False, 2), (True, False, 0), (False, True, 3), (True, True, 1)],
)
def test_events_have_flags(api: FakeBindings, timing: bool, blocking: bool, flags: int) -> None:
    api.results["cuEventCreate"] = (9,)
    assert CudaDriver(api).create_event(timing=timing, blocking=blocking) == 9
    assert api.calls == [("cuEventCreate", (flags,))]


@pytest.mark.parametrize(
    ("method", "function"), [("query_stream", "cuStreamQuery"), ("query_event", "cuEventQuery")]
)
def test_pending_work_is_no_error(api: FakeBindings, method: str, function: str) -> None:
    api.errors[function] = NOT_READY
    assert getattr(CudaDriver(api), method)(7) is False


def test_properties_of_a_device(api: FakeBindings) -> None:
    api.results |= {
        "cuDeviceGet": (1,),
        "cuDeviceGetName": (b"NVIDIA H200\0\0",),
        "cuDeviceGetAttribute": (9,),
        "cuDeviceTotalMem": (139 << 30,),
        "cuDeviceCanAccessPeer": (1,),
        "cuDevicePrimaryCtxRetain": (0xC0,),
    }
    driver = CudaDriver(api)
    properties = driver.read_properties(1)
    assert (properties.ordinal, properties.name, properties.capability) == (
        1,
        "NVIDIA H200",
        (9, 9),
    )
    assert (properties.total_bytes, properties.multiprocessor_count) == (139 << 30, 9)
    assert driver.can_access_peer(0, 1) is True
    assert driver.retain_primary_context(1) == 0xC0
    driver.release_primary_context(1)
    assert api.calls[-1] == ("cuDevicePrimaryCtxRelease", (1,))


def test_a_context_is_used_for_a_while(api: FakeBindings) -> None:
    api.results["cuCtxGetCurrent"] = (3,)
    driver = CudaDriver(api)
    with pytest.raises(KeyError), driver.use_context(4):
        raise KeyError
    with driver.use_context(3):
        api.calls.append(("inside", ()))
    assert [call for call in api.calls if call[0] != "cuCtxGetCurrent"] == [
        ("cuCtxSetCurrent", (4,)),
        ("cuCtxSetCurrent", (3,)),
        ("inside", ()),
    ]


def test_functions_and_their_attributes(api: FakeBindings) -> None:
    api.results |= {"cuLibraryGetKernel": (0x51,), "cuKernelGetFunction": (0x52,)}
    driver = CudaDriver(api)
    assert driver.get_function(5, "add") == 0x52
    driver.set_shared_bytes(0x52, 100_000)
    driver.allow_large_clusters(0x52)
    assert api.calls == [
        ("cuLibraryGetKernel", (5, b"add")),
        ("cuKernelGetFunction", (0x51,)),
        ("cuFuncSetAttribute", (0x52, 8, 100_000)),
        ("cuFuncSetCacheConfig", (0x52, 1)),
        ("cuFuncSetAttribute", (0x52, 14, 1)),
    ]


def test_a_kernel_node_has_parameters_and_edges(api: FakeBindings) -> None:
    seen: list[Any] = []
    api.results["cuGraphAddKernelNode"] = (0x71,)
    driver = CudaDriver(api)
    original = api._record

    def record(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuGraphAddKernelNode":
            seen.extend(read_parameters(arguments[3]))
        return original(name, arguments)

    api._record = record
    assert driver.add_kernel_node(0x61, [(0x40, False), (0x41, True), (0x42, True)], LAUNCH) == 0x71
    assert [name for name, _ in api.calls] == ["cuGraphAddKernelNode", "cuGraphAddDependencies"]
    (_, (graph, before, count, parameters)), (_, edges) = api.calls
    assert (graph, [int(node) for node in before], count) == (0x61, [0x40], 1)
    assert seen == [b"12345678", b"\x07\0\0\0", b"m" * 128]
    assert int(parameters.func) == 0xF00
    grid = (parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ)
    block = (parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ)
    assert (grid, block, parameters.sharedMemBytes) == ((4, 3, 2), (128, 2, 1), 1024)
    assert edges[0] == 0x61
    assert [[int(node) for node in nodes] for nodes in edges[1:3]] == [[0x41, 0x42], [0x71, 0x71]]
    assert [(edge.from_port, int(edge.type)) for edge in edges[3]] == [(1, 1), (1, 1)]
    assert edges[4] == 2


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
    api.results["cuGraphAddKernelNode"] = (0x71,)
    CudaDriver(api).add_kernel_node(0x61, [(0x40, True)], LAUNCH)
    assert api.calls[-1][0] == "cuGraphAddDependencies_v2"


def test_a_cluster_is_an_attribute_of_the_node(api: FakeBindings) -> None:
    api.results["cuGraphAddKernelNode"] = (0x71,)
    shape = LaunchShape((4, 1, 1), (128, 1, 1), (2, 1, 1))
    CudaDriver(api).add_kernel_node(0x61, [], KernelLaunch(1, shape, ()))
    node, attribute, value = api.take_call("cuGraphKernelNodeSetAttribute")
    cluster = (value.clusterDim.x, value.clusterDim.y, value.clusterDim.z)
    assert (node, int(attribute), cluster) == (0x71, 4, (2, 1, 1))


def test_copy_fill_child_and_empty_nodes(api: FakeBindings) -> None:
    functions = ["Memcpy", "Memset", "ChildGraph", "Empty"]
    api.results |= {f"cuGraphAdd{name}Node": (0x71,) for name in functions}
    driver = CudaDriver(api)
    driver.add_copy_node(0x61, [(0x40, False)], CopyRange(0x100, 0x200, 64), 0xC0)
    graph, before, count, copy, context = api.take_call("cuGraphAddMemcpyNode")
    assert (graph, [int(node) for node in before], count, context) == (0x61, [0x40], 1, 0xC0)
    assert (int(copy.srcDevice), int(copy.dstDevice)) == (0x200, 0x100)
    assert (copy.WidthInBytes, copy.Height, copy.Depth) == (64, 1, 1)
    assert (int(copy.srcMemoryType), int(copy.dstMemoryType)) == (2, 2)
    driver.add_fill_node(0x61, [], FillRange(0x100, 5, 4, 16), 0xC0)
    _, _, count, fill, context = api.take_call("cuGraphAddMemsetNode")
    assert (count, context, int(fill.dst), fill.value) == (0, 0xC0, 0x100, 5)
    assert (fill.elementSize, fill.width, fill.height) == (4, 16, 1)
    driver.add_child_node(0x61, [], 0x62)
    assert api.take_call("cuGraphAddChildGraphNode") == (0x61, [], 0, 0x62)
    driver.add_empty_node(0x61, [])
    assert api.take_call("cuGraphAddEmptyNode") == (0x61, [], 0)


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


@pytest.mark.parametrize(
    ("name", "kind", "fix"),
    [
        (b"CUDA_ERROR_INVALID_VALUE", CudaError, "internal error in tracegraph"),
        (b"CUDA_ERROR_ILLEGAL_ADDRESS", CudaError, "restart the process"),
        (b"CUDA_ERROR_NO_BINARY_FOR_GPU", CudaError, "capture again on this GPU"),
        (b"CUDA_ERROR_NO_DEVICE", CudaError, "run on a machine with an NVIDIA GPU"),
        (b"CUDA_ERROR_OUT_OF_MEMORY", OutOfMemoryError, "capture fewer or smaller graphs"),
    ],
)
def test_a_failed_call_has_four_lines(
    api: FakeBindings, name: bytes, kind: type[CudaError], fix: str
) -> None:
    api.errors["cuMemcpyAsync"] = 1
    api.results |= {"cuGetErrorName": (0, name), "cuGetErrorString": (0, b"what CUDA says")}
    with pytest.raises(kind) as caught:
        CudaDriver(api).copy_async(0x7000, 0x8000, 3, 0x9000)
    where = "cuMemcpyAsync(0x7000, 0x8000, 3, 0x9000)"
    error_lines.match(
        caught.value, f"{name.decode()} from cuMemcpyAsync", where, "what CUDA says", fix
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_error_without_a_name_has_a_number(api: FakeBindings) -> None:
    api.errors["cuMemFree"] = 4242
    api.results |= {"cuGetErrorName": (1, None), "cuGetErrorString": (1, None)}
    with pytest.raises(CudaError, match="error 4242 from cuMemFree"):
        CudaDriver(api).free_memory(1)


def test_an_image_is_shown_by_its_size(api: FakeBindings) -> None:
    api.errors["cuLibraryLoadData"] = 209
    with pytest.raises(CudaError, match=r"cuLibraryLoadData\(5000 bytes, \[\], \[\], 0"):
        CudaDriver(api).load_library(b"x" * 5000)


def test_missing_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "BINDINGS", "cuda.bindings.absent")
    with pytest.raises(CudaError) as caught:
        import_bindings()
    error_lines.match(
        caught.value,
        "the CUDA bindings for Python are not installed",
        "import cuda.bindings.absent: ",
        "graphs on a GPU are built through the CUDA driver",
        'pip install "tracegraph[cuda13]"',
    )
    load_driver.cache_clear()
    with pytest.raises(CudaError, match="are not installed"):
        load_driver()


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_a_machine_without_a_driver_is_told_so(
    api: FakeBindings, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(*_: Any) -> None:
        raise kind("libcuda is not here\nat all")

    monkeypatch.setattr(api, "_record", fail)
    with pytest.raises(CudaError) as caught:
        open_driver(api)
    error_lines.match(
        caught.value,
        "this machine has no CUDA driver",
        "cuInit(0): libcuda is not here",
        "libcuda comes with the NVIDIA driver",
        "install an NVIDIA driver of CUDA 12.4 or later",
    )


def test_an_old_driver_is_refused(api: FakeBindings) -> None:
    api.results["cuDriverGetVersion"] = (12_030,)
    with pytest.raises(CudaError) as caught:
        open_driver(api)
    error_lines.match(
        caught.value,
        "the CUDA driver is too old: CUDA 12.3",
        "cuDriverGetVersion()",
        "graphs need CUDA 12.4 or later",
        "install a newer NVIDIA driver",
    )
    api.results["cuDriverGetVersion"] = (12_040,)
    assert open_driver(api).read_version() == 12_040


def test_no_gpu_is_an_error_of_the_first_call(api: FakeBindings) -> None:
    api.errors["cuInit"] = 100
    api.results["cuGetErrorName"] = (0, b"CUDA_ERROR_NO_DEVICE")
    with pytest.raises(CudaError, match="CUDA_ERROR_NO_DEVICE from cuInit"):
        open_driver(api)


def test_parameters_are_aligned_and_can_be_rewritten() -> None:
    parameters = [b"a" * size for size in (1, 8, 63, 64, 65, 128, 200)]
    packed = PackedParameters(parameters)
    pointers = (ctypes.c_void_p * len(parameters)).from_address(packed.address)
    assert all(pointer is not None and pointer % 64 == 0 for pointer in pointers)
    assert packed.read() == tuple(parameters)
    packed.write([b"b" * len(each) for each in parameters])
    assert packed.read() == tuple(b"b" * len(each) for each in parameters)
    for pointer, each in zip(pointers, parameters, strict=True):
        assert pointer is not None
        assert ctypes.string_at(pointer, len(each)) == b"b" * len(each)
    with pytest.raises(ValueError, match="different"):
        packed.write([b"c", *parameters[1:-1], b"longer" * 100])
    assert PackedParameters(()).read() == ()


EDGES = [(0x40, False), (0x41, True)]
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "add_child_node": (1, EDGES, 2),
    "add_copy_node": (1, EDGES, CopyRange(1, 2, 3), 4),
    "add_empty_node": (1, EDGES),
    "add_fill_node": (1, EDGES, FillRange(1, 2, 4, 3), 4),
    "add_kernel_node": (1, EDGES, LAUNCH),
    "encode_tensor_map": (MAP, 0x1000),
    "fill_async": (1, 5, 4, 3, 7),
    "get_function": (5, "add"),
    "instantiate": (1, {}),
    "load_library": (b"image",),
    "patch_kernel_node": (1, 2, LAUNCH),
    "set_copy_node": (1, 2, CopyRange(1, 2, 3), 4),
    "set_fill_node": (1, 2, FillRange(1, 2, 4, 3), 4),
    "set_kernel_node": (1, 2, LAUNCH),
    "write_dot": (1, "a.dot"),
}


@pytest.mark.parametrize("name", sorted(read_methods(CudaDriver)))
def test_the_real_bindings_take_the_arguments(name: str) -> None:
    api = import_real()
    if api is None:
        pytest.skip("needs cuda.bindings")
    try:
        api.cuDriverGetVersion()
    except RuntimeError:
        method = getattr(CudaDriver(api), name)
        count = len(
            [
                each
                for each in inspect.signature(method).parameters.values()
                if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
            ]
        )
        # The bindings convert the arguments before they look for the driver.
        with pytest.raises(RuntimeError, match=r"driver|libcuda"):
            start(name, method(*ARGUMENTS.get(name, range(1, count + 1))))
    else:
        pytest.skip("made-up handles would crash where there is a driver")


def start(name: str, result: Any) -> None:
    """Goes on where the driver is called only by what a method returns."""
    if name == "make_launcher":
        result()
    if name == "patch_kernel_node":
        result.send()
    if name == "use_context":
        result.__enter__()
