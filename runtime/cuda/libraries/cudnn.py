"""cuDNN: convolutions and compiled graphs of operations as parts of graphs.

The library is the one that XLA has loaded, by its path in the process's memory map. It is called
through its C interface, which needs no package beside cuDNN itself.

Note [Calls of cuDNN]
    A call becomes a plan while a function is lowered, where the function can still be cut at it: a
    plan that cuDNN cannot make is the reason why it is not in a graph. A graph holds the plans of
    its calls, since they hold the code of its kernels. Before a call is captured it runs once, at
    the addresses that it will have, so that cuDNN loads its kernels outside of the capture: nothing
    in the arena is in use yet, and the stream is that of all other work on it. Addresses,
    workspace and scalars are all that a plan is given, so calls may run side by side.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable

from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.cuda.libraries.cudnn_backend import (
    Attribute,
    CudnnBackend,
    CudnnError,
    Kind,
    make_cudnn_error,
)
from tracegraph.runtime.cuda.libraries.cudnn_plans import PlanMaker, PlanParts
from tracegraph.runtime.cuda.libraries.nvidia_bindings import (
    check_one_library,
    find_loaded_libraries,
    read_memory_map,
)
from tracegraph.runtime.definition.cudnn_calls import CompiledGraph, CudnnCall
from tracegraph.runtime.definition.library_nodes import CudnnNode
from tracegraph.runtime.definition.nodes import BufferUse, Locate
from tracegraph.runtime.errors import CudaError, UnsupportedError
from tracegraph.runtime.memory.allocator import Allocator

NAME = "libcudnn"
# The file that XLA looks for where nothing has loaded it yet.
FILE = "libcudnn.so.9"
# Plans between the lowering of a function and its graph; a larger function makes some again.
KEPT_PLANS = 256
# Of an operand that may hold lengths of sequences.
SMALL_BYTES = 1 << 16


def load_cudnn(read_maps: Callable[[], str] = read_memory_map) -> CudnnBackend:
    """Returns the cuDNN that XLA has loaded, or would load.

    Args:
        read_maps: returns the text of ``/proc/self/maps``.

    Raises:
        UnsupportedError: there is none.
        CudaError: there are several.
    """
    maps = read_maps()
    loaded = find_loaded_libraries(NAME, maps)
    if loaded:
        check_one_library(NAME, maps)
    try:
        library = ctypes.CDLL(loaded[0] if loaded else FILE)
    except OSError as error:
        raise UnsupportedError(
            "the library cuDNN is missing",
            where="the first convolution or attention of cuDNN in a capture",
            why=f"XLA's calls of cuDNN are repeated in the library itself: {error}",
            fix="pip install nvidia-cudnn-cu13, or nvidia-cudnn-cu12 beside jax[cuda12]",
            anchor="unsupported",
        ) from error
    if not loaded:
        check_one_library(NAME, read_maps())
    return CudnnBackend(library)


def is_cudnn_loaded(read_maps: Callable[[], str] = read_memory_map) -> bool:
    """True where XLA, or another package, has loaded cuDNN.

    Args:
        read_maps: as for `load_cudnn`.
    """
    return bool(find_loaded_libraries(NAME, read_maps()))


class Plan:
    """A plan of cuDNN, destroyed when the last graph that holds it is gone.

    Args:
        backend: the library.
        parts: its descriptors.
    """

    def __init__(self, backend: CudnnBackend, parts: PlanParts) -> None:
        self.parts = parts
        weakref.finalize(self, _destroy, backend, parts).atexit = False


def _destroy(backend: CudnnBackend, parts: PlanParts) -> None:
    for descriptor in (parts.plan, *reversed(parts.others)):
        backend.destroy(descriptor)


class Cudnn:
    """The calls of cuDNN on one GPU. May be used from any thread.

    Args:
        order: of JAX's work on it and ours.
        open_allocator: returns its allocator, when it is first needed.
        load: returns the library's functions.
        is_loaded: says whether the library is loaded already.
    """

    def __init__(
        self,
        order: JaxOrder,
        open_allocator: Callable[[], Allocator],
        load: Callable[[], CudnnBackend] = load_cudnn,
        is_loaded: Callable[[], bool] = is_cudnn_loaded,
    ) -> None:
        self._order, self._open_allocator = order, open_allocator
        self._load, self._is_loaded = load, is_loaded
        # cuDNN's handles are for one thread at a time.
        self._lock = threading.RLock()
        self._backend: CudnnBackend | None = None
        self._handle = 0
        self._plans: weakref.WeakValueDictionary[CudnnCall, Plan] = weakref.WeakValueDictionary()
        self._recent: collections.OrderedDict[CudnnCall, Plan] = collections.OrderedDict()

    def preload(self) -> None:
        """Opens the library, if it is loaded: XLA may still load another one than we would."""
        # What fails, fails again where it is needed, and says so there.
        with self._lock, contextlib.suppress(UnsupportedError, CudaError):
            if self._is_loaded():
                self._open()

    def find_problem(self, call: CudnnCall) -> str:
        """Returns why a call cannot be in a graph, or an empty text; reads on after ``it``.

        Raises:
            UnsupportedError: cuDNN is missing.
            CudaError: there are several, or it cannot be used at all.
        """
        try:
            self._find_plan(call)
        except CudnnError as error:
            return f"{_describe(call)}, which cuDNN {self._open().read_version()} refuses: {error}"
        return ""

    def take_plan(self, node: CudnnNode) -> Plan:
        """Returns the plan of a node's call, for a graph to hold.

        Raises:
            UnsupportedError: cuDNN is missing.
            CudaError: cuDNN cannot make the plan.
        """
        with self._lock:
            try:
                plan = self._find_plan(node.call)
            except CudnnError as error:
                what = f"cuDNN has no plan for `{node.name}`, which {_describe(node.call)}"
                raise make_cudnn_error(what, node.name, error) from error
            self._recent.pop(node.call, None)
        return plan

    def warm(self, node: CudnnNode, plan: Plan, locate: Locate) -> None:
        """Runs a call once, and waits for it; see Note [Calls of cuDNN].

        Raises:
            CudaError: cuDNN returns an error.
            OutOfMemoryError: there is no memory for zeros.
        """
        driver, stream = self._order.driver, self._order.stream
        small = _list_small(node)
        with contextlib.ExitStack() as stack:
            if small:
                allocator = self._open_allocator()
                zeros = allocator.allocate(SMALL_BYTES)
                stack.callback(allocator.free, zeros)
                driver.fill_async(zeros.address, 0, 1, SMALL_BYTES, stream)
                locate = _substitute(locate, small, zeros.address)
            # The memory may be in use until then.
            stack.callback(driver.synchronize_stream, stream)
            self.execute(node, plan, locate, stream)

    def execute(self, node: CudnnNode, plan: Plan, locate: Locate, stream: int) -> None:
        """Enqueues a call on a stream, or adds it to the graph that the stream is capturing.

        Raises:
            CudaError: cuDNN returns an error.
        """
        addresses = {uid: locate(use) for uid, use in node.operands}
        workspace, values = 0, []
        if node.workspace is not None:
            workspace = locate(node.workspace)
        call = node.call
        if isinstance(call, CompiledGraph):
            # cuDNN reads them before it returns.
            values = [(uid, ctypes.create_string_buffer(value)) for uid, value in call.values]
            addresses |= {uid: ctypes.addressof(buffer) for uid, buffer in values}
            addresses |= {uid: workspace + offset for uid, offset in call.places}
            addresses = {uid: addresses[uid] for uid in call.uids}
            workspace += call.own_bytes
        with self._lock, self._order.use_context(), contextlib.ExitStack() as stack:
            backend = self._open()
            try:
                backend.set_stream(self._handle, stream)
                pack = backend.make(
                    Kind.VARIANT_PACK,
                    {
                        Attribute.VARIANT_PACK_UNIQUE_IDS: tuple(addresses),
                        Attribute.VARIANT_PACK_DATA_POINTERS: tuple(addresses.values()),
                        Attribute.VARIANT_PACK_WORKSPACE: workspace,
                    },
                )
                stack.callback(backend.destroy, pack)
                backend.execute(self._handle, plan.parts.plan, pack)
            except CudnnError as error:
                what = f"cuDNN failed at `{node.name}`, which {_describe(call)}"
                raise make_cudnn_error(what, node.name, error) from error

    def _find_plan(self, call: CudnnCall) -> Plan:
        with self._lock:
            plan = self._plans.get(call)
            if plan is None:
                backend = self._open()
                with self._order.use_context():
                    parts = PlanMaker(backend, self._handle).make_plan(call)
                plan = self._plans[call] = Plan(backend, parts)
                self._recent[call] = plan
            self._drop_oldest()
        return plan

    def _drop_oldest(self) -> None:
        while len(self._recent) > KEPT_PLANS:
            self._recent.popitem(last=False)

    def _open(self) -> CudnnBackend:
        if self._backend is None:
            self._backend = self._load()
        if not self._handle:
            try:
                with self._order.use_context():
                    self._handle = self._backend.create_handle()
            except CudnnError as error:
                what = "cuDNN could not be initialized"
                raise make_cudnn_error(what, "the first call of cuDNN", error) from error
        return self._backend


class GraphCudnn:
    """The calls of cuDNN in one graph: lives as long as the graph.

    Args:
        cudnn: of the GPU.
    """

    stream = 0  # they are captured on any

    def __init__(self, cudnn: Cudnn) -> None:
        self._cudnn = cudnn
        self._plans: dict[CudnnCall, Plan] = {}

    def prepare(self, node: CudnnNode, locate: Locate) -> None:
        """Does all of a call that cannot be captured; see Note [Calls of cuDNN].

        The GPU's context must be current.

        Raises:
            CudaError: cuDNN has no plan for it, or returns an error.
        """
        if node.call not in self._plans:
            plan = self._cudnn.take_plan(node)
            self._cudnn.warm(node, plan, locate)
            self._plans[node.call] = plan

    def enqueue(self, node: CudnnNode, locate: Locate, stream: int) -> None:
        """Enqueues one call on a stream that is being captured.

        Raises:
            CudaError: cuDNN returns an error.
        """
        self._cudnn.execute(node, self._plans[node.call], locate, stream)


def _list_small(node: CudnnNode) -> frozenset[BufferUse]:
    """Returns the operands of a compiled graph that may be lengths, which must be legal."""
    if not isinstance(node.call, CompiledGraph):
        return frozenset()
    read = (use for uid, use in node.operands if uid not in node.written)
    return frozenset(use for use in read if use.nbytes <= SMALL_BYTES)


def _substitute(locate: Locate, replaced: frozenset[BufferUse], address: int) -> Locate:
    return lambda use: address if use in replaced else locate(use)


def _describe(call: CudnnCall) -> str:
    """Returns what a call is; reads on after ``it``."""
    if isinstance(call, CompiledGraph):
        return f"is a compiled graph of {len(call.uids)} tensors"
    x, w = call.x, call.w
    shapes = f"is {call.direction.value}, of {x.dtype} {list(x.dims)} with {list(w.dims)}"
    engine = call.algorithm.engine
    if engine is None:
        return shapes
    knobs = ", ".join(f"{knob}={value}" for knob, value in call.algorithm.knobs)
    settings = f" with knobs {knobs}" if knobs else ""
    return f"{shapes}, by engine {engine}{settings}"
