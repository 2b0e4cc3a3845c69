"""The one door to the CUDA driver: the only file that imports its bindings.

The bindings are an optional package, and are imported at the first use, so that everything can be
imported without CUDA: what is missing is an error only where a GPU is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from tracegraph.runtime.cuda.driver.captured_nodes import CapturedNodes
from tracegraph.runtime.cuda.driver.device_calls import DeviceCalls
from tracegraph.runtime.cuda.driver.graph_calls import GraphCalls
from tracegraph.runtime.cuda.driver.memory_calls import MemoryCalls
from tracegraph.runtime.cuda.driver.node_kinds import NodeKinds
from tracegraph.runtime.cuda.driver.stream_calls import StreamCalls
from tracegraph.runtime.errors import CudaError

BINDINGS = "cuda.bindings.driver"
# Programmatic edges came with CUDA 12.3, and XLA's own plugins want 12.4 or later.
OLDEST_DRIVER = 12_040


class CudaDriver(StreamCalls, MemoryCalls, GraphCalls, CapturedNodes, NodeKinds, DeviceCalls):
    """The driver, as small typed calls over plain ints.

    Every failing call raises CudaError, or OutOfMemoryError, with its name and arguments. Handles
    are not owned: the code that made one destroys it.

    Args:
        api: the module ``cuda.bindings.driver``, initialised.
    """

    def read_version(self) -> int:
        """Returns the newest CUDA that the driver serves, as 13000 for 13.0."""
        return int(self._call("cuDriverGetVersion"))

    def retain_primary_context(self, ordinal: int) -> int:
        """Returns the context of a device that JAX uses too, and keeps it alive."""
        return int(self._call("cuDevicePrimaryCtxRetain", self._get_device(ordinal)))

    def release_primary_context(self, ordinal: int) -> None:
        """Releases what `retain_primary_context` retained, once for each call of it."""
        self._call("cuDevicePrimaryCtxRelease", self._get_device(ordinal))

    def set_current(self, context: int) -> None:
        """Makes a context current in this thread; 0 for none."""
        self._call("cuCtxSetCurrent", context)

    def get_current(self) -> int:
        """Returns the context that is current in this thread, 0 for none."""
        return int(self._call("cuCtxGetCurrent"))

    @contextlib.contextmanager
    def use_context(self, context: int) -> Iterator[None]:
        """Makes a context current in this thread while the block runs."""
        before = self.get_current()
        if before == context:
            yield
            return
        self.set_current(context)
        try:
            yield
        finally:
            self.set_current(before)

    def count_processors(self) -> int:
        """Returns how many multiprocessors the GPU of the current context has."""
        name = self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(self._call("cuDeviceGetAttribute", name, self._call("cuCtxGetDevice")))

    def count_resident_blocks(self, function: int, threads: int, shared_bytes: int) -> int:
        """Returns how many blocks of a kernel a multiprocessor has registers and memory for.

        Args:
            function: the kernel.
            threads: of a block.
            shared_bytes: of shared memory that a launch gives each block.
        """
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(self._call(name, function, threads, shared_bytes))

    def count_resident_threads(self) -> int:
        """Returns how many threads the GPU of the current context holds at once."""
        name = self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR
        each = self._call("cuDeviceGetAttribute", name, self._call("cuCtxGetDevice"))
        return self.count_processors() * int(each)

    def synchronize_context(self) -> None:
        """Blocks the host until all work of the current context is done."""
        self._call("cuCtxSynchronize")


@functools.cache
def load_driver() -> CudaDriver:
    """Returns the driver of this process, initialised.

    Raises:
        CudaError: there are no bindings, no driver or no GPU, or the driver is too old.
    """
    return open_driver(import_bindings())


def import_bindings() -> Any:
    """Returns the module of the driver's bindings.

    Raises:
        CudaError: it is not installed.
    """
    try:
        return importlib.import_module(BINDINGS)
    except ImportError as error:
        raise CudaError(
            "cuda-bindings, the CUDA bindings for Python, are not installed",
            where=f"import {BINDINGS}: {error}",
            why="graphs on a GPU are built through the CUDA driver",
            fix='pip install "tracegraph-jax[cuda13]", or [cuda12] beside jax[cuda12]',
            anchor="cuda-driver",
        ) from error


def open_driver(api: Any) -> CudaDriver:
    """Returns an initialised driver of a module of bindings.

    Raises:
        CudaError: there is no driver or no GPU, or the driver is too old.
    """
    driver = CudaDriver(api)
    try:
        driver._call("cuInit", 0)
    except (RuntimeError, OSError) as error:
        raise CudaError(
            "this machine has no CUDA driver",
            where=f"cuInit(0): {str(error).splitlines()[0]}",
            why="libcuda comes with the NVIDIA driver, not with any Python package",
            fix=f"install an NVIDIA driver of CUDA {_format_version(OLDEST_DRIVER)} or later",
            anchor="cuda-driver",
        ) from error
    version = driver.read_version()
    if version < OLDEST_DRIVER:
        raise CudaError(
            f"the CUDA driver is too old: CUDA {_format_version(version)}",
            where="cuDriverGetVersion()",
            why=f"graphs need CUDA {_format_version(OLDEST_DRIVER)} or later in the driver",
            fix="install a newer NVIDIA driver, then check with: nvidia-smi",
            anchor="cuda-driver",
        )
    return driver


def _format_version(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
