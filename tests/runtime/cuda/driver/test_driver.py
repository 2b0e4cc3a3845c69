"""CudaDriver: what each method asks of the driver."""

from __future__ import annotations

import ctypes
import inspect
from typing import Any

import pytest

from tests.fakes.cuda_stages import LAUNCH, MAP
from tests.fakes.fake_bindings import NOT_READY, FakeBindings, import_real
from tests.fakes.fake_driver import FakeDriver
from tracegraph.runtime.cuda.driver.calls import (
    Condition,
    CopyRange,
    CopyRows,
    FillRange,
    Port,
)
from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.driver.edge_calls import make_edge
from tracegraph.runtime.cuda.driver.parameters import PackedParameters
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.errors import CudaError

CUBIN = b"\x7fELF"


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
        ("set_current", (0xC0,), "cuCtxSetCurrent", (), (0xC0,), None),
        ("get_current", (), "cuCtxGetCurrent", (0xC0,), (), 0xC0),
        ("synchronize_context", (), "cuCtxSynchronize", (), (), None),
        ("create_stream", (-5,), "cuStreamCreateWithPriority", (7,), (1, -5), 7),
        ("destroy_stream", (7,), "cuStreamDestroy", (), (7,), None),
        ("find_context", (7,), "cuStreamGetCtx", (0xC0,), (7,), 0xC0),
        ("query_stream", (7,), "cuStreamQuery", (), (7,), True),
        ("synchronize_stream", (7,), "cuStreamSynchronize", (), (7,), None),
        ("wait_event", (7, 9), "cuStreamWaitEvent", (), (7, 9, 0), None),
        ("read_priority_range", (), "cuCtxGetStreamPriorityRange", (0, -5), (), (0, -5)),
        ("record_event", (9, 7), "cuEventRecord", (), (9, 7), None),
        ("query_event", (9,), "cuEventQuery", (), (9,), True),
        ("synchronize_event", (9,), "cuEventSynchronize", (), (9,), None),
        ("elapsed_ms", (8, 9), "cuEventElapsedTime", (1.5,), (8, 9), 1.5),
        ("destroy_event", (9,), "cuEventDestroy", (), (9,), None),
        ("copy_async", (1, 2, 3, 7), "cuMemcpyAsync", (), (1, 2, 3, 7), None),
        ("fill_async", (1, 5, 1, 3, 7), "cuMemsetD8Async", (), (1, 5, 3, 7), None),
        ("fill_async", (2, 5, 2, 3, 7), "cuMemsetD16Async", (), (2, 5, 3, 7), None),
        ("fill_async", (4, 5, 4, 3, 7), "cuMemsetD32Async", (), (4, 5, 3, 7), None),
        ("load_library", (CUBIN,), "cuLibraryLoadData", (5,), (CUBIN, [], [], 0, [], [], 0), 5),
        ("create_graph", (), "cuGraphCreate", (0x61,), (0,), 0x61),
        ("destroy_graph", (0x61,), "cuGraphDestroy", (), (0x61,), None),
        ("count_nodes", (0x61,), "cuGraphGetNodes", ([], 3), (0x61, 0), 3),
        ("upload", (0x62, 7), "cuGraphUpload", (), (0x62, 7), None),
        ("write_dot", (0x61, "a.dot"), "cuGraphDebugDotPrint", (), (0x61, b"a.dot", 1), None),
        ("begin_capture", (7,), "cuStreamBeginCapture", (), (7, 1), None),
        ("end_capture", (7,), "cuStreamEndCapture", (0x61,), (7,), 0x61),
        ("read_memory", (), "cuMemGetInfo", (3, 8), (), (3, 8)),
        ("allocate_async", (64, 7), "cuMemAllocAsync", (0x700,), (64, 7), 0x700),
        ("free_async", (0x700, 7), "cuMemFreeAsync", (), (0x700, 7), None),
        ("trim_memory_pool", (5, 64), "cuMemPoolTrimTo", (), (5, 64), None),
        ("reserve_addresses", (64,), "cuMemAddressReserve", (0x700,), (64, 0, 0, 0), 0x700),
        ("release_addresses", (0x700, 64), "cuMemAddressFree", (), (0x700, 64), None),
        ("release_memory", (9,), "cuMemRelease", (), (9,), None),
        ("map_memory", (0x700, 64, 9), "cuMemMap", (), (0x700, 64, 0, 9, 0), None),
        ("unmap_memory", (0x700, 64), "cuMemUnmap", (), (0x700, 64), None),
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


def test_rows_are_copied_by_one_call(api: FakeBindings) -> None:
    driver, rows = CudaDriver(api), CopyRows(0x10000, 20, 0x20000, 8, 8, 3)
    driver.copy_rows_async(rows, 7)
    copy, stream = api.take_call("cuMemcpy2DAsync")
    assert (int(copy.dstDevice), copy.dstPitch) == (0x10000, 20)
    assert (int(copy.srcDevice), copy.srcPitch) == (0x20000, 8)
    assert (copy.WidthInBytes, copy.Height, stream) == (8, 3, 7)
    assert (int(copy.srcMemoryType), int(copy.dstMemoryType)) == (2, 2)
    api.errors["cuMemcpy2DAsync"] = 1
    with pytest.raises(CudaError, match="source_pitch=8"):
        driver.copy_rows_async(rows, 7)


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


def test_the_primary_context_of_a_device(api: FakeBindings) -> None:
    api.results |= {"cuDeviceGet": (1,), "cuDevicePrimaryCtxRetain": (0xC0,)}
    driver = CudaDriver(api)
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
    api.results["cuOccupancyMaxActiveBlocksPerMultiprocessor"] = (3,)
    assert driver.count_resident_blocks(0x52, 256, 100_000) == 3
    assert api.calls == [
        ("cuLibraryGetKernel", (5, b"add")),
        ("cuKernelGetFunction", (0x51,)),
        ("cuFuncSetAttribute", (0x52, 8, 100_000)),
        ("cuFuncSetCacheConfig", (0x52, 1)),
        ("cuFuncSetAttribute", (0x52, 14, 1)),
        ("cuOccupancyMaxActiveBlocksPerMultiprocessor", (0x52, 256, 100_000)),
    ]


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


EDGES = [make_edge(0x40, 0x42), make_edge(0x41, 0x42, Port.LAUNCH_ORDER)]
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "read_attribute": (0, "WARP_SIZE"),
    "add_child_node": (1, 2),
    "add_conditional_node": (1, Condition(3, Construct.SWITCH, 2), 4),
    "add_copy_node": (1, CopyRange(1, 2, 3), 4),
    "add_edges": (1, EDGES),
    "add_empty_node": (1,),
    "add_event_record_node": (1, 2),
    "add_event_wait_node": (1, 2),
    "add_fill_node": (1, FillRange(1, 2, 4, 3), 4),
    "add_kernel_node": (1, LAUNCH),
    "copy_rows_async": (CopyRows(1, 8, 2, 4, 4, 3), 7),
    "encode_tensor_map": (MAP, 0x1000),
    "fill_async": (1, 5, 4, 3, 7),
    "get_function": (5, "add"),
    "instantiate": (1, {}),
    "launch_kernel": (LAUNCH, 7),
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
