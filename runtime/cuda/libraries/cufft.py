"""cuFFT: plans of Fourier transforms, and their calls in graphs, through NVIDIA's Python bindings.

A plan is made as XLA makes it, by the same call with the same arguments, so that cuFFT takes the
same kernels. It gets no memory for work of its own: the workspace is a temporary of the graph, set
right before the call. How long a plan lives: Note [Plans].
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.cuda.libraries.handler_calls import LeasedStream
from tracegraph.runtime.cuda.libraries.library_errors import call_library
from tracegraph.runtime.cuda.libraries.nvidia_bindings import (
    check_one_library,
    load_nvmath,
    read_memory_map,
)
from tracegraph.runtime.definition.library_calls import Transform
from tracegraph.runtime.definition.library_nodes import LibraryCallNode
from tracegraph.runtime.definition.nodes import Locate
from tracegraph.runtime.errors import CudaError
from tracegraph.runtime.plan_cache import PlanCache

# The sign of the exponent.
FORWARD, INVERSE = -1, 1
# The letters of a transform whose call takes its direction.
COMPLEX = ("C2C", "Z2Z")


class FftPlan:
    """One plan of cuFFT.

    Args:
        handle: cuFFT's.
        workspace_bytes: what a call of it needs.

    Attributes:
        lock: is held while its stream and its workspace are set for a call.
    """

    def __init__(self, handle: int, workspace_bytes: int) -> None:
        self.handle, self.workspace_bytes = handle, workspace_bytes
        self.lock = threading.Lock()


class CuFft:
    """The plans of one GPU. May be used from any thread.

    Args:
        order: knows the GPU's context.
        cache: of its plans.
        load: returns the module ``nvmath``.
        read_maps: returns the text of ``/proc/self/maps``.
    """

    def __init__(
        self,
        order: JaxOrder,
        cache: PlanCache[FftPlan],
        load: Callable[[], Any] = load_nvmath,
        read_maps: Callable[[], str] = read_memory_map,
    ) -> None:
        self._order, self.cache = order, cache
        self._load, self._read_maps = load, read_maps
        self._is_checked = False

    @property
    def bindings(self) -> Any:
        """The module ``nvmath.bindings.cufft``."""
        return self._load().bindings.cufft

    def find_plan(self, transform: Transform) -> FftPlan:
        """Returns the plan of a transform, made now if the cache does not hold it.

        Raises:
            UnsupportedError: the bindings are missing.
            CudaError: cuFFT has no plan for it, or is not the library that XLA has loaded.
        """
        bindings = self.bindings
        make = functools.partial(self._make, bindings, transform)
        free = functools.partial(_schedule_free, bindings, self._order)
        return self.cache.find(transform, make, free)

    def _make(self, bindings: Any, transform: Transform) -> FftPlan:
        with self._order.use_context():
            handle = self.call("cufftCreate", str(transform), bindings.create)
            try:
                self._check_library()
                # Memory for work comes from the plan of the graph.
                self.call(
                    "cufftSetAutoAllocation",
                    str(transform),
                    bindings.set_auto_allocation,
                    handle,
                    0,
                )
                workspace_bytes = self.call(
                    "cufftMakePlanMany64",
                    str(transform),
                    bindings.make_plan_many64,
                    handle,
                    len(transform.lengths),
                    list(transform.lengths),
                    list(transform.source_lengths),
                    1,
                    transform.source_size,
                    list(transform.target_lengths),
                    1,
                    transform.target_size,
                    int(bindings.Type[transform.form]),
                    transform.batch_count,
                )
            except BaseException:
                bindings.destroy(handle)
                raise
        return FftPlan(handle, int(workspace_bytes))

    def _check_library(self) -> None:
        if not self._is_checked:
            check_one_library("libcufft", self._read_maps())
        self._is_checked = True

    def call(self, call: str, place: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the bindings; see `call_library`."""
        return call_library(self.bindings.cuFFTError, call, place, function, *arguments)


def _schedule_free(bindings: Any, order: JaxOrder, plan: FftPlan) -> Callable[[], None]:
    """Returns what destroys a plan, which may be gone by then."""
    return functools.partial(_free, bindings, order, plan.handle)


def _free(bindings: Any, order: JaxOrder, handle: int) -> None:
    with order.use_context():
        bindings.destroy(handle)


class FftCalls:
    """The transforms of one graph: holds their plans for as long as the graph lives.

    Args:
        cufft: of the GPU.
        stream: to be captured; a plan keeps it until its next call, so it outlives the graph.
    """

    def __init__(self, cufft: CuFft, stream: LeasedStream) -> None:
        self._cufft, self._stream = cufft, stream
        self._plans: dict[Transform, FftPlan] = {}

    @property
    def stream(self) -> int:
        """The stream that the calls are captured on."""
        return self._stream.handle

    def prepare(self, node: LibraryCallNode, _: Locate) -> None:
        """Makes the plan, which needs memory of the device, before a stream captures.

        Raises:
            CudaError: the plan needs another workspace than was planned.
        """
        transform: Any = node.call
        plan = self._plans.get(transform) or self._cufft.find_plan(transform)
        self._plans[transform] = plan
        planned_bytes = sum(use.nbytes for role, use in node.operands if role == "workspace")
        if plan.workspace_bytes <= planned_bytes:
            return
        raise CudaError(
            f"cuFFT needs {plan.workspace_bytes:,} bytes to work in, and not {planned_bytes:,} as "
            "when the graph was planned",
            where=f"cufftMakePlanMany64 for {transform}",
            why="the workspace is part of the graph's memory, which is planned before it is built",
            fix="capture again; if that does not help, report this text",
            anchor="cuda",
        )

    def enqueue(self, node: LibraryCallNode, locate: Locate, stream: int) -> None:
        """Adds a transform to the graph that a stream is capturing.

        Raises:
            CudaError: cuFFT refuses the call.
        """
        transform: Any = node.call
        plan, cufft, bindings = self._plans[transform], self._cufft, self._cufft.bindings
        addresses = {role: locate(use) for role, use in node.operands}
        arguments = [plan.handle, addresses["source"], addresses["target"]]
        if transform.form in COMPLEX:
            arguments.append(INVERSE if transform.is_inverse else FORWARD)
        place = node.name
        with plan.lock:
            cufft.call("cufftSetStream", place, bindings.set_stream, plan.handle, stream)
            cufft.call(
                "cufftSetWorkArea",
                place,
                bindings.set_work_area,
                plan.handle,
                addresses.get("workspace", 0),
            )
            cufft.call(
                f"cufftExec{transform.form}",
                place,
                getattr(bindings, f"exec_{transform.form.lower()}"),
                *arguments,
            )
