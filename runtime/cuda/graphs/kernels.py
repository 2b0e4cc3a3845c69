"""KernelLoader: from the compiled code of a kernel to a function that graphs can launch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import weakref
from collections.abc import Iterable

from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.driver.graph_calls import PORTABLE_CLUSTER_SIZE
from tracegraph.runtime.definition.nodes import KernelCode, LaunchShape
from tracegraph.runtime.errors import CudaError, OutOfMemoryError


class LoadedLibrary:
    """One image of kernels on one device; unloaded when it is not held any more.

    Args:
        driver: the CUDA driver.
        cubin: the image.
    """

    def __init__(self, driver: CudaDriver, cubin: bytes) -> None:
        self.handle = driver.load_library(cubin)
        self.functions: dict[str, int] = {}
        self.shared_bytes: dict[str, int] = {}
        self.with_large_clusters: set[str] = set()
        # At exit the driver may be gone before Python's objects are.
        weakref.finalize(self, driver.unload_library, self.handle).atexit = False


@dataclasses.dataclass(frozen=True)
class LoadedKernel:
    """A function that the driver can launch while this record, and so its library, lives."""

    function: int
    library: LoadedLibrary = dataclasses.field(repr=False)


class KernelLoader:
    """Loads kernels, each image once, for the graphs of one device. Safe from several threads.

    Args:
        driver: the CUDA driver.
        context: of the device.
    """

    def __init__(self, driver: CudaDriver, context: int) -> None:
        self.driver = driver
        self.context = context
        self._lock = threading.Lock()
        # Graphs hold the libraries, so that kernels are unloaded with the last graph that launches
        # them.
        self._libraries: weakref.WeakValueDictionary[bytes, LoadedLibrary]
        self._libraries = weakref.WeakValueDictionary()
        self._kept: dict[bytes, LoadedLibrary] = {}

    @property
    def library_count(self) -> int:
        """How many images are loaded now."""
        return len(self._libraries)

    def load(self, code: KernelCode, shape: LaunchShape) -> LoadedKernel:
        """Returns a kernel that may be launched with a shape, without keeping it alive.

        Args:
            code: the image and the symbol in it.
            shape: how it will be launched; what the driver must allow before is allowed.

        Raises:
            CudaError: the image does not fit the GPU, or has no such symbol, or the shape is more
                than the GPU can run.
        """
        with self._lock, self.driver.use_context(self.context):
            library = self._find(code.cubin)
            return LoadedKernel(self._prepare(library, code.symbol, shape), library)

    def keep(self, codes: Iterable[KernelCode]) -> None:
        """Loads the images of kernels, and keeps them for as long as this object.

        The driver compiles an image of PTX when it is loaded: 11 to 27 ms on a machine with an
        H200, and 0.2 where it has done so before.

        Args:
            codes: the kernels. What the driver refuses is left to the graph that needs it.
        """
        for code in codes:
            with (
                contextlib.suppress(CudaError, OutOfMemoryError),
                self._lock,
                self.driver.use_context(self.context),
            ):
                self._kept[code.cubin] = self._find(code.cubin)

    def _find(self, image: bytes) -> LoadedLibrary:
        library = self._libraries.get(image)
        if library is None:
            library = self._libraries[image] = LoadedLibrary(self.driver, image)
        return library

    def _prepare(self, library: LoadedLibrary, symbol: str, shape: LaunchShape) -> int:
        function = library.functions.get(symbol)
        if function is None:
            function = self.driver.get_function(library.handle, symbol)
            library.functions[symbol] = function
        if shape.shared_bytes > library.shared_bytes.get(symbol, 0):
            self.driver.set_shared_bytes(function, shape.shared_bytes)
            library.shared_bytes[symbol] = shape.shared_bytes
        is_large = math.prod(shape.cluster) > PORTABLE_CLUSTER_SIZE
        if is_large and symbol not in library.with_large_clusters:
            self.driver.allow_large_clusters(function)
            library.with_large_clusters.add(symbol)
        return function
