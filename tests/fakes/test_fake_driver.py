"""FakeDriver finds misuse: for each check a fault that it must find."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest

from tests.fakes.fake_driver import FakeDriver
from tests.fakes.fake_state import MisuseError
from tracegraph.runtime.cuda.driver.calls import CopyRange, FillRange, KernelLaunch, Port
from tracegraph.runtime.cuda.driver.edge_calls import make_edge
from tracegraph.runtime.definition.nodes import BufferUse, LaunchShape, TensorMap
from tracegraph.runtime.errors import CudaError, OutOfMemoryError

STREAM = 0x5555
COPY = CopyRange(0x100, 0x200, 4)
FILL = FillRange(0x100, 0, 4, 1)


class Session:
    """A driver with one of everything."""

    def __init__(self) -> None:
        self.driver = driver = FakeDriver()
        self.context = driver.retain_primary_context(0)
        driver.set_current(self.context)
        self.stream, self.event = driver.create_stream(), driver.create_event()
        self.library = driver.load_library(b"image")
        self.function = driver.get_function(self.library, "add")
        self.graph = driver.create_graph()
        self.kernel = driver.add_kernel_node(self.graph, self.launch())
        self.copy = driver.add_copy_node(self.graph, COPY, self.context)
        self.join(self.kernel, self.copy, Port.COMPLETE)
        self.executable = driver.instantiate(self.graph, {})

    def launch(
        self,
        grid: tuple[int, int, int] = (4, 1, 1),
        block: tuple[int, int, int] = (32, 1, 1),
        cluster: tuple[int, int, int] = (1, 1, 1),
        shared_bytes: int = 0,
        parameters: tuple[bytes, ...] = (b"12345678",),
    ) -> KernelLaunch:
        shape = LaunchShape(grid, block, cluster, shared_bytes)
        return KernelLaunch(self.function, shape, parameters)

    def add(self, launch: KernelLaunch) -> None:
        self.driver.add_kernel_node(self.graph, launch)

    def fill(self, fill: FillRange) -> None:
        self.driver.add_fill_node(self.graph, fill, self.context)

    def twice(self, name: str, handle: int) -> None:
        getattr(self.driver, name)(handle)
        getattr(self.driver, name)(handle)

    def launch_destroyed(self) -> None:
        launch = self.driver.make_launcher(self.executable, STREAM)
        launch()
        self.driver.destroy_executable(self.executable)
        launch()

    def launch_on_destroyed_stream(self) -> None:
        launch = self.driver.make_launcher(self.executable, self.stream)
        self.driver.destroy_stream(self.stream)
        launch()

    def set_after_graph(self) -> None:
        self.driver.destroy_graph(self.graph)
        self.driver.set_copy_node(self.executable, self.copy, COPY, self.context)

    def unload_unused(self) -> None:
        self.driver.destroy_executable(self.executable)
        self.driver.unload_library(self.library)
        self.add(self.launch())

    def capture_twice(self) -> None:
        self.driver.begin_capture(self.stream)
        self.driver.begin_capture(self.stream)

    def use_while_captured(self) -> None:
        self.driver.begin_capture(self.stream)
        self.driver.record_event(self.event, self.stream)

    def destroy_while_captured(self) -> None:
        self.driver.begin_capture(self.stream)
        self.driver.destroy_stream(self.stream)

    def synchronize_while_captured(self) -> None:
        self.driver.begin_capture(self.stream)
        self.driver.synchronize_context()

    def depend_on(self, node: int, *, programmatic: bool = False) -> None:
        port = Port.PROGRAMMATIC if programmatic else Port.COMPLETE
        self.join(node, self.driver.add_kernel_node(self.graph, self.launch()), port)

    def join(self, first: int, second: int, *ports: Port) -> None:
        self.driver.add_edges(self.graph, [make_edge(first, second, port) for port in ports])


FAULTS: dict[str, tuple[Callable[[Session], object], str]] = {
    "stream twice": (lambda s: s.twice("destroy_stream", s.stream), "is destroyed"),
    "event twice": (lambda s: s.twice("destroy_event", s.event), "is destroyed"),
    "graph twice": (lambda s: s.twice("destroy_graph", s.graph), "is destroyed"),
    "executable twice": (lambda s: s.twice("destroy_executable", s.executable), "is destroyed"),
    "unknown stream": (lambda s: s.driver.destroy_stream(5), "is unknown"),
    "wrong kind": (lambda s: s.driver.destroy_graph(s.stream), "is unknown"),
    "unknown memory": (lambda s: s.driver.free_memory(64), "is unknown"),
    "host memory": (lambda s: s.driver.free_host(s.driver.allocate_memory(8)), "is unknown"),
    "no bytes": (lambda s: s.driver.allocate_memory(0), "of 0 bytes"),
    "context": (lambda s: s.driver.set_current(77), "context 0x4d is unknown"),
    "released context": (
        lambda s: [s.driver.release_primary_context(0) for _ in "ab"],
        "too often",
    ),
    "default stream": (lambda s: s.driver.record_event(s.event, 0), "default stream"),
    "thread default": (lambda s: s.driver.fill_async(0, 0, 1, 1, 2), "default stream"),
    "event of stream": (lambda s: s.driver.record_event(s.stream, STREAM), "is unknown"),
    "stream of event": (lambda s: s.driver.query_stream(s.event), "is no live stream"),
    "launch destroyed": (lambda s: s.launch_destroyed(), "executable .* is destroyed"),
    "launch on destroyed": (lambda s: s.launch_on_destroyed_stream(), "no live stream"),
    "loaded library": (lambda s: s.driver.unload_library(s.library), "can still launch"),
    "unloaded library": (lambda s: s.unload_unused(), "library .* is destroyed"),
    "unknown kernel": (
        lambda s: s.add(KernelLaunch(5, LaunchShape((1, 1, 1), (1, 1, 1)), ())),
        "is no kernel",
    ),
    "no threads": (lambda s: s.add(s.launch(block=(0, 1, 1))), "a size of zero"),
    "no blocks": (lambda s: s.add(s.launch(grid=(1, 0, 1))), "a size of zero"),
    "too many threads": (lambda s: s.add(s.launch(block=(32, 33, 1))), "too many threads"),
    "shared memory": (lambda s: s.add(s.launch(shared_bytes=49_153)), "more shared memory"),
    "shared limit": (lambda s: s.driver.set_shared_bytes(s.function, 1 << 20), "shared memory"),
    "cluster": (lambda s: s.add(s.launch((16, 1, 1), cluster=(16, 1, 1))), "larger cluster"),
    "cluster grid": (lambda s: s.add(s.launch((5, 1, 1), cluster=(2, 1, 1))), "no multiple"),
    "empty parameter": (lambda s: s.add(s.launch(parameters=(b"",))), "of no bytes"),
    "element size": (lambda s: s.fill(FillRange(0, 0, 8, 1)), "elements of 8 bytes"),
    "value": (lambda s: s.fill(FillRange(0, 256, 1, 1)), "value 256"),
    "nothing to fill": (lambda s: s.fill(FillRange(0, 0, 1, 0)), "no elements"),
    "misaligned": (lambda s: s.fill(FillRange(2, 0, 4, 1)), "misaligned"),
    "empty copy": (
        lambda s: s.driver.add_copy_node(s.graph, CopyRange(1, 2, 0), s.context),
        "of no bytes",
    ),
    "copy context": (lambda s: s.driver.add_copy_node(s.graph, COPY, 9), "context 0x9"),
    "unknown node": (lambda s: s.depend_on(s.executable), "no node of the graph"),
    "other graph": (
        lambda s: s.depend_on(s.driver.add_empty_node(s.driver.create_graph())),
        "no node of the graph",
    ),
    "programmatic": (
        lambda s: s.depend_on(s.copy, programmatic=True),
        "a programmatic edge from a copy to a kernel",
    ),
    "programmatic to fill": (
        lambda s: s.join(
            s.kernel, s.driver.add_fill_node(s.graph, FILL, s.context), Port.LAUNCH_ORDER
        ),
        "a programmatic edge from a kernel to a fill",
    ),
    "two edges": (
        lambda s: s.join(
            s.kernel,
            s.driver.add_kernel_node(s.graph, s.launch()),
            Port.COMPLETE,
            Port.PROGRAMMATIC,
        ),
        "two edges",
    ),
    "same edge": (
        lambda s: s.join(s.kernel, s.copy, Port.COMPLETE),
        "two edges",
    ),
    "edge backwards": (
        lambda s: s.join(s.copy, s.kernel, Port.COMPLETE),
        "an edge to an earlier node",
    ),
    "kind of node": (
        lambda s: s.driver.set_copy_node(s.executable, s.kernel, COPY, s.context),
        "a kernel node cannot become a copy node",
    ),
    "node set": (
        lambda s: s.driver.set_fill_node(s.executable, 9, FILL, s.context),
        "is no node of this executable graph",
    ),
    "graph gone": (lambda s: s.set_after_graph(), "graph .* is destroyed"),
    "capture": (lambda s: s.driver.end_capture(s.stream), "is not captured"),
    "capture twice": (lambda s: s.capture_twice(), "begin_capture of a stream"),
    "used while captured": (lambda s: s.use_while_captured(), "is being captured"),
    "destroyed while captured": (lambda s: s.destroy_while_captured(), "destroy_stream of"),
    "waited while captured": (lambda s: s.synchronize_while_captured(), "while a stream"),
    "captured work": (lambda s: s.driver.add_captured(s.stream, "dot"), "not captured"),
    "tensor map": (
        lambda s: s.driver.encode_tensor_map(
            TensorMap(BufferUse("x", 0, 4), 4, (1,), (), (1,), (1,)), 8
        ),
        "not a multiple of 16",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    fault, message = FAULTS[name]
    with pytest.raises(MisuseError, match=message):
        fault(Session())


def test_a_thread_without_a_context_is_found() -> None:
    driver = Session().driver
    found: list[BaseException] = []

    def create() -> None:
        try:
            driver.create_stream()
        except MisuseError as error:
            found.append(error)

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    assert [str(error) for error in found] == ["create_stream without a current context"]
    FakeDriver(checks_context=False).create_stream()


def test_a_launcher_brings_its_context_to_a_thread() -> None:
    session = Session()
    driver = session.driver
    launch = driver.make_launcher(session.executable, STREAM, session.context)
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert driver.executables[session.executable].launches == [STREAM]


def test_failures_are_those_of_the_driver() -> None:
    driver = FakeDriver(fail_at=2, error="CUDA_ERROR_OUT_OF_MEMORY")
    driver.read_version()
    with pytest.raises(OutOfMemoryError, match=r"CUDA_ERROR_OUT_OF_MEMORY from create_graph"):
        driver.create_graph()
    assert driver.live_handles() == {}
    graph = driver.create_graph()
    driver.fail_on, driver.error = "destroy_graph", "CUDA_ERROR_UNKNOWN"
    with pytest.raises(CudaError, match="CUDA_ERROR_UNKNOWN from destroy_graph"):
        driver.destroy_graph(graph)
    # What a failing call was to free is freed all the same.
    assert driver.live_handles() == {}


def test_bytes_move_only_if_asked_for() -> None:
    for moves_bytes in (False, True):
        driver = FakeDriver(moves_bytes=moves_bytes)
        driver.set_current(driver.retain_primary_context(0))
        address, host = driver.allocate_memory(64), driver.allocate_host(64)
        assert address % 256 == host % 256 == 0
        driver.fill_async(address, 0xABCD, 2, 32, STREAM)
        driver.copy_async(host, address, 64, STREAM)
        expected = b"\xcd\xab" * 32 if moves_bytes else bytes(64)
        assert driver.read_bytes(host, 64) == expected


def test_kernels_run_where_bytes_move() -> None:
    session = Session()
    driver = session.driver
    seen: list[tuple[bytes, ...]] = []
    driver.moves_bytes = True
    driver.kernels["add"] = seen.append
    # Of the same origin as what the node copied before: none of the driver's.
    memory = ctypes.create_string_buffer(8)
    address = ctypes.addressof(memory)
    copy = CopyRange(address, address, 8)
    driver.upload(session.executable, STREAM)
    driver.set_copy_node(session.executable, session.copy, copy, session.context)
    patch = driver.patch_kernel_node(session.executable, session.kernel, session.launch())
    driver.make_launcher(session.executable, STREAM)()
    patch.packed.words[0] = 1
    driver.make_launcher(session.executable, STREAM)()
    patch.send()
    driver.make_launcher(session.executable, STREAM)()
    assert seen == [(b"12345678",)] * 2 + [(b"\x01" + bytes(7),)]
