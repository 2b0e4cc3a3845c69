"""CudaTimer: each node of a graph timed on the GPU.

Note [How a node is timed]
A node takes 1 to 10 microseconds, a launch as much, and events of the driver count in half
microseconds. So a chain of copies of the node becomes a graph, bound to the addresses that the node
has, and two chains of different lengths are launched between two events each: what the longer one
takes more, per copy more, is the node with what it takes to start it behind itself. The launch, the
first start and the events drop out. Before the first event a kernel keeps the GPU busy until
everything is enqueued, so that no time of the host is between the events.

With the caches cold: a chain in which a kernel before each copy reads twice as many bytes as the
second-level cache has, less a chain of these readers alone. They read, since what a memset wrote
would have to be written back in the time of the node.

Copies of a node that updates its operands change them again and again. The time of a kernel does
not depend on such values, and the bytes that it writes are saved before and restored afterwards.

Note [Nodes that are launched once]
A branch, a loop and a call of a handler may depend on what they have written: a loop that has ended
does not run again. They are timed alone in a graph, and what they write is restored before
each launch. From that the time of a graph with a node that does nothing is taken away.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from tracegraph.runtime.cuda.buffer import CudaBuffer
from tracegraph.runtime.cuda.context import CudaContext
from tracegraph.runtime.cuda.driver.calls import KernelLaunch
from tracegraph.runtime.cuda.graphs.builder import Library
from tracegraph.runtime.cuda.graphs.graph import CudaGraph
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader
from tracegraph.runtime.cuda.graphs.stages import EagerStage
from tracegraph.runtime.cuda.timing_kernels import (
    LOAD_BYTES,
    make_nothing,
    make_reading,
    make_spin,
)
from tracegraph.runtime.definition.graph import Stage
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, Node, list_nested
from tracegraph.runtime.definition.library_nodes import FfiCallNode
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode, KernelNode, Locate
from tracegraph.runtime.node_timer import NodeTime, TimedGraph

# Launches of each chain; the median counts.
REPEATS, REPEATS_OF_LONG = 7, 3
LONG_US = 5_000.0
# Copies of a node in the shorter chain, and the most in the longer one: as many as take so long.
SHORT, MOST, MOST_CAPTURED = 2, 64, 16
CHAIN_US = 400.0
# Copies between readers.
COLD, COLD_OF_LONG = 8, 2
# About 50 microseconds.
SPIN_CYCLES = 100_000
# A GPU that was idle raises its clock within milliseconds.
WARM_UP_LAUNCHES = 200
# Where the driver does not say how large the cache is.
LEAST_READ_BYTES = 64 << 10


class CudaTimer:
    """Times nodes on one GPU, see Note [How a node is timed].

    Args:
        context: of the GPU.
        kernels: of the same.
        libraries: of the graph's calls, ready to be captured.
        graph: what is timed.

    Attributes:
        floor_us: what an empty kernel takes in a chain, started early if the graph's kernels are.
    """

    def __init__(
        self,
        context: CudaContext,
        kernels: KernelLoader,
        libraries: Mapping[str, Library],
        graph: TimedGraph,
    ) -> None:
        self._context, self._kernels, self._libraries = context, kernels, libraries
        self._driver, self._stream = context.driver, context.order.stream
        self._graph = graph
        self._locate = _make_locate(graph.buffers)
        self._pending: list[Node] = []
        self._baselines: dict[int, float] = {}
        nodes = [each for stage in graph.definition.stages for each in list_nested(stage.nodes)]
        self._waits = any(isinstance(each, KernelNode) and each.begins_with_wait for each in nodes)
        self._events: list[int] = []
        self._undo = contextlib.ExitStack()
        self.floor_us: float | None = None

    def __enter__(self) -> CudaTimer:
        try:
            self._open()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _open(self) -> None:
        """Takes what it needs of the GPU."""
        driver, undo = self._driver, self._undo
        undo.enter_context(self._context.order.use_context())
        ordinal = self._context.jax_device.local_hardware_id
        cache_bytes = driver.read_attribute(ordinal, "L2_CACHE_SIZE")
        read_bytes = -(-max(2 * cache_bytes, LEAST_READ_BYTES) // LOAD_BYTES) * LOAD_BYTES
        # It lives as long as the arena.
        block = self._graph.arena.allocate_beside(read_bytes + self._graph.saved_bytes)
        self._saved_address = block.address + read_bytes
        self._reader = make_reading(block.address, read_bytes, driver.count_resident_threads())
        driver.fill_async(block.address, 0, 4, read_bytes // 4, self._stream)
        for _ in range(2):
            self._events.append(driver.create_event(timing=True))
            undo.callback(driver.destroy_event, self._events[-1])
        spin = make_spin(SPIN_CYCLES)
        # Held as long as it may run.
        self._loaded = loaded = self._kernels.load(spin.code, spin.shape)
        parameters = tuple(each for each in spin.parameters if isinstance(each, bytes))
        self._spin = KernelLaunch(loaded.function, spin.shape, parameters)
        undo.callback(driver.synchronize_stream, self._stream)
        for _ in range(WARM_UP_LAUNCHES):
            driver.launch_kernel(self._spin, self._stream)
        self.floor_us = self._measure_chain(make_nothing(waits=self._waits))
        nothing = self._make_launcher([make_nothing(waits=self._waits)])
        self._single_us = self._measure(nothing) - self.floor_us

    def time_stage(self, index: int) -> float:
        """Returns the microseconds of one launch of a stage, on what is in the buffers."""
        launch = self._graph.stages[index].launch
        if self._graph.definition.stages[index].is_captured:
            return self._measure_once(launch)
        return self._time_on_host(launch)

    def start(self) -> None:
        """Begins with the first node."""
        self._pending = []

    def run(self, node: Node) -> None:
        """Runs a node before the next one is timed."""
        self._pending.append(node)

    def time(self, node: Node, written: Sequence[BufferUse], *, is_captured: bool) -> NodeTime:
        """Times the next node, and leaves what one run of it leaves."""
        self._catch_up()
        if not is_captured:
            stage = Stage((node,), (), is_captured=False)
            launch = EagerStage(stage, self._graph.buffers).launch
            return NodeTime(self._time_on_host(launch), None, "eager: the host's time of one call")
        with self._keep(written) as restore:
            found = self._time_node(node, restore)
        self.run(node)
        return found

    @contextlib.contextmanager
    def visit(self, written: Sequence[BufferUse]) -> Iterator[None]:
        """Restores what nodes of a body write, after each of them and at the end."""
        self._catch_up()
        # What a node of a body saves lies behind what is saved here.
        with self._keep(written):
            yield
            self._catch_up()

    def _time_node(self, node: Node, restore: Callable[[], None]) -> NodeTime:
        if isinstance(node, ConditionalNode | FfiCallNode):
            return self._time_single(node, restore)
        warm_us = self._measure_chain(node)
        return NodeTime(warm_us, self._measure_cold(node, warm_us))

    def _time_single(self, node: Node, restore: Callable[[], None]) -> NodeTime:
        """See Note [Nodes that are launched once]."""
        launch = self._make_launcher([node])
        read = self._make_launcher([self._reader])

        def prepare_cold() -> None:
            restore()
            read()

        warm, cold = (
            max(self._measure(launch, prepare) - self._single_us, 0.1)
            for prepare in (restore, prepare_cold)
        )
        return NodeTime(warm, max(warm, cold), "launched alone: it depends on what it writes")

    def _measure_chain(self, node: Node) -> float:
        """Returns the microseconds of a node behind itself."""
        short_us = self._measure(self._make_launcher([node] * SHORT))
        most = MOST if isinstance(node, KernelNode | CopyNode | FillNode) else MOST_CAPTURED
        more = min(max(int(CHAIN_US * SHORT / max(short_us, 1.0)), SHORT), most)
        long_us = self._measure(self._make_launcher([node] * (SHORT + more)))
        if long_us > short_us:
            return (long_us - short_us) / more
        # Another program has disturbed the shorter chain: this is what it takes at most.
        return long_us / (SHORT + more)

    def _measure_cold(self, node: Node, warm_us: float) -> float:
        count = COLD if warm_us * COLD < LONG_US else COLD_OF_LONG
        if count not in self._baselines:
            self._baselines[count] = self._measure(self._make_launcher([self._reader] * count))
        both_us = self._measure(self._make_launcher([self._reader, node] * count))
        # A node is not faster when it has to wait for memory: less than that is noise.
        return max((both_us - self._baselines[count]) / count, warm_us)

    def _measure(
        self, launch: Callable[[], None], prepare: Callable[[], None] | None = None
    ) -> float:
        """Returns the median of some launches in microseconds, after one that does not count."""
        found: list[float] = []
        repeats = REPEATS
        for turn in itertools.count():
            if prepare is not None:
                prepare()
            elapsed_us = self._measure_once(launch)
            if not turn:
                repeats = REPEATS if elapsed_us < LONG_US else REPEATS_OF_LONG
                continue
            found.append(elapsed_us)
            if turn >= repeats:
                break
        return statistics.median(found)

    def _measure_once(self, launch: Callable[[], None]) -> float:
        driver, stream = self._driver, self._stream
        start, end = self._events
        driver.launch_kernel(self._spin, stream)
        driver.record_event(start, stream)
        launch()
        driver.record_event(end, stream)
        driver.synchronize_event(end)
        return 1000 * driver.elapsed_ms(start, end)

    def _time_on_host(self, launch: Callable[[], None]) -> float:
        self._driver.synchronize_stream(self._stream)
        start = time.perf_counter()
        launch()
        self._driver.synchronize_stream(self._stream)
        return 1e6 * (time.perf_counter() - start)

    def _make_launcher(self, nodes: Sequence[Node]) -> Callable[[], None]:
        """Returns what launches nodes one after another; it owns their graph."""
        edges = tuple(itertools.pairwise(range(len(nodes))))
        early = frozenset(edge for edge in edges if _may_start_early(*(nodes[i] for i in edge)))
        stage = Stage(tuple(nodes), edges, programmatic=early)
        name = f"profile of {self._graph.definition.name}"
        graph = CudaGraph(self._driver, stage, self._locate, self._kernels, self._libraries, name)
        graph.upload(self._stream)
        return graph.launcher(self._stream)

    def _catch_up(self) -> None:
        """Runs what was not run yet, so that the next node finds its values."""
        if not self._pending:
            return
        nodes, self._pending = self._pending, []
        self._make_launcher(nodes)()
        self._driver.synchronize_stream(self._stream)

    @contextlib.contextmanager
    def _keep(self, written: Sequence[BufferUse]) -> Iterator[Callable[[], None]]:
        """Saves byte ranges, yields what restores them, and restores them when the block ends."""
        ranges = _join_ranges([(self._locate(use), use.nbytes) for use in written])
        first = self._saved_address
        places = list(itertools.accumulate((nbytes for _, nbytes in ranges), initial=first))
        copy, stream = self._driver.copy_async, self._stream

        def restore() -> None:
            for place, (address, nbytes) in zip(places, ranges, strict=False):
                copy(address, place, nbytes, stream)

        for place, (address, nbytes) in zip(places, ranges, strict=False):
            copy(place, address, nbytes, stream)
        self._saved_address = places[-1]
        try:
            yield restore
        finally:
            self._saved_address = first
        restore()


def _may_start_early(first: Node, second: Node) -> bool:
    """True for kernels between which a graph would have a programmatic edge."""
    return (
        isinstance(first, KernelNode) and isinstance(second, KernelNode) and second.begins_with_wait
    )


def _make_locate(buffers: Mapping[str, CudaBuffer]) -> Locate:
    return functools.partial(_locate, buffers)


def _locate(buffers: Mapping[str, CudaBuffer], use: BufferUse) -> int:
    return buffers[use.buffer].address + use.offset


def _join_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns ranges of addresses, each byte once.

    Example:
        >>> _join_ranges([(8, 4), (0, 4), (2, 4), (20, 0)])
        [(0, 6), (8, 4)]
    """
    joined: list[tuple[int, int]] = []
    for address, nbytes in sorted(each for each in ranges if each[1]):
        if joined and address <= sum(joined[-1]):
            start, before = joined.pop()
            joined.append((start, max(before, address + nbytes - start)))
        else:
            joined.append((address, nbytes))
    return joined
