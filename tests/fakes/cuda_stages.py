"""A stage of each kind of node, at made-up addresses, for tests of CudaGraph."""

from __future__ import annotations

from collections.abc import Callable

from tests.fakes.fake_driver import FakeDriver
from tracegraph.runtime.cuda.driver.calls import KernelLaunch
from tracegraph.runtime.cuda.graphs.graph import CudaGraph
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader
from tracegraph.runtime.definition.graph import Stage
from tracegraph.runtime.definition.library_nodes import Matmul, MatmulNode, MatrixLayout
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    CopyNode,
    FillNode,
    KernelCode,
    KernelNode,
    LaunchShape,
    Swizzle,
    TensorMap,
)

ADDRESSES = {"x": 0x10000, "y": 0x20000, "z": 0x30000, "w": 0x40000}
SHAPE = LaunchShape((4, 1, 1), (128, 1, 1))
STREAM = 0x5555  # JAX's


def use(buffer: str, offset: int = 0, nbytes: int = 64) -> BufferUse:
    return BufferUse(buffer, offset, nbytes)


def locate(each: BufferUse) -> int:
    return ADDRESSES[each.buffer] + each.offset


def moved(**addresses: int) -> Callable[[BufferUse], int]:
    return lambda each: (ADDRESSES | addresses)[each.buffer] + each.offset


def word(address: int) -> bytes:
    return address.to_bytes(8, "little")


def kernel(name: str, source: str, target: str, shape: LaunchShape = SHAPE) -> KernelNode:
    parameters = (use(source), use(target, 64), b"\x07\0\0\0")
    code = KernelCode(name, b"image of " + name.encode())
    return KernelNode(name, code, shape, parameters, (False, True, False), begins_with_wait=True)


def tensor_map(buffer: str) -> TensorMap:
    return TensorMap(use(buffer, 256), 4, (8, 8), (32,), (8, 8), (1, 1))


LAYOUT = MatrixLayout("float32", 4, 4, 4)
MATMUL = MatmulNode(
    "dot",
    Matmul(LAYOUT, LAYOUT, LAYOUT, LAYOUT, 1.0, 0.0, "32F", "float32"),
    (("a", use("x")), ("b", use("y")), ("c", use("z")), ("d", use("z"))),
)


class FakeLibrary:
    """Enqueues one piece of work per matmul, or fails."""

    stream = 0

    def __init__(self, driver: FakeDriver, error: Exception | None = None) -> None:
        self.driver, self.error = driver, error

    def enqueue(self, node: MatmulNode, locate: Callable[[BufferUse], int], stream: int) -> None:
        self.driver.add_captured(stream, node.name)
        if self.error:
            raise self.error


# Five nodes of five kinds; two edges are programmatic.
FIVE = Stage(
    nodes=(
        FillNode("zero", use("y", 0, 128)),
        kernel("one", "x", "y"),
        kernel("two", "y", "z"),
        MATMUL,
        CopyNode("out", use("z"), use("w")),
    ),
    edges=((0, 1), (1, 2), (2, 3), (3, 4)),
    programmatic=frozenset({(1, 2)}),
)


def build(
    driver: FakeDriver, stage: Stage, library: FakeLibrary | None = None, name: str = "f"
) -> CudaGraph:
    context = driver.retain_primary_context(0)
    loader = KernelLoader(driver, context)
    libraries = {"matmul": library or FakeLibrary(driver)}
    return CudaGraph(driver, stage, locate, loader, libraries, name)


def read_actions(driver: FakeDriver, graph: CudaGraph) -> list[object]:
    nodes = driver.executables[graph.handles[1]].nodes
    return [nodes[handle].action for handle in graph.node_handles]


# A launch with parameters of three sizes, and a tensor map with an unusual value in each field.
LAUNCH = KernelLaunch(
    0xF00,
    LaunchShape((4, 3, 2), (128, 2, 1), shared_bytes=1024),
    (b"12345678", b"\x07\0\0\0", b"m" * 128),
)
MAP = TensorMap(
    BufferUse("x", 0, 64), 2, (8, 4), (16,), (8, 4), (1, 1), 0, Swizzle.BYTES_64, 2, True
)
