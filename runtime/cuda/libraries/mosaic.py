"""Kernels of Mosaic GPU, as Pallas writes them, in the place of a handler of `jax.ffi`.

Note [Kernels of Mosaic]
The handler of ``mosaic_gpu_v2`` is inside of JAX's CUDA plugin, and nothing gives its address. But
the plugin exports what it compiles such kernels with, and JAX calls that to run them for PyTorch
(``jax.experimental.mosaic.gpu.core._compile_as_torch_gpu_kernel``): ``MosaicGpuCompile`` takes the
module that the call has as an attribute, and returns what launches the kernel on a stream, with the
addresses of operands and results. So a call is captured as that of a handler is. The arguments of
these functions change with JAX's version, as its source shows; of an unknown one the call is
refused.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegraph.runtime.cuda.properties import PLUGIN_MAJORS
from tracegraph.runtime.ffi.c_api import DataType, ErrorCode, ExecutionStage
from tracegraph.runtime.ffi.call import FfiCall, ScalarAttribute
from tracegraph.runtime.ffi.context import CallContext, InterfaceError
from tracegraph.runtime.ffi.frames import Frame

TARGET = "mosaic_gpu_v2"
# Of JAX, in which the functions have these arguments: those that ran on a GPU.
VERSIONS = ("0.11.2",)
# Set for kernels of several GPUs.
_FLAGS = ("use_custom_barrier", "skip_device_barrier", "uses_xla_collective_metadata")
_UNSET = ScalarAttribute(DataType.PRED, False)
_PLAIN = ("kernel_hash", "module")
_LAUNCH: Any = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)


@dataclasses.dataclass(frozen=True)
class MosaicHandler:
    """The kernels of one GPU; called as a `Handler` is.

    Attributes:
        context: the driver's handle of the context that they are loaded in.
        library: path of the plugin.
    """

    context: int
    library: str

    def has(self, stage: ExecutionStage) -> bool:
        """True for the stages that do something."""
        return stage in (ExecutionStage.INSTANTIATE, ExecutionStage.EXECUTE)

    def run(self, stage: ExecutionStage, frame: Frame, context: CallContext) -> None:
        """Compiles the kernel of a call, or launches it; the context is current.

        Raises:
            InterfaceError: the kernel cannot be compiled.
        """
        if not self.has(stage):
            return
        module = dict(frame.call.attributes.items)["module"]
        assert isinstance(module, bytes)
        kernel = _find_kernel(self, module)
        if stage is ExecutionStage.EXECUTE:
            kernel.launch(context.stream, frame.addresses)


@dataclasses.dataclass(frozen=True)
class MosaicKernel:
    """A compiled kernel, which stays loaded until the process ends.

    Attributes:
        function: what the plugin launches.
        launcher: address of the function that does.
    """

    function: int
    launcher: int

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        """Enqueues the kernel.

        Args:
            stream: the driver's handle.
            addresses: of the operands, then of the results.
        """
        buffers = (ctypes.c_void_p * len(addresses))(*addresses)
        _LAUNCH(self.launcher)(self.function, stream, buffers)


def find_mosaic(call: FfiCall, context: int) -> MosaicHandler | str:
    """Returns what launches the kernel of a call, or why there is none; reads on after its name.

    Args:
        call: of `TARGET`.
        context: the driver's handle of the GPU's context.
    """
    if jax.__version__ not in VERSIONS:
        return f"whose kernels tracegraph can launch with JAX {' and '.join(VERSIONS)} only"
    attributes = dict(call.attributes.items)
    if not isinstance(attributes.get("module"), bytes):
        return "which has no module"
    others = [
        name
        for name, value in attributes.items()
        if name not in _PLAIN and (name not in _FLAGS or value != _UNSET)
    ]
    if others:
        return f"whose kernel is for several GPUs: it sets {', '.join(others)}"
    library = find_library()
    if library is None:
        return "which JAX's CUDA plugin does not export the compiler of"
    return MosaicHandler(context, library)


@functools.cache
def find_library() -> str | None:
    """Returns the path of the plugin that exports the compiler, or None."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = () if spec is None else spec.submodule_search_locations or ()
    for folder, major in itertools.product(folders, PLUGIN_MAJORS):
        path = pathlib.Path(folder, f"xla_cuda{major}", "xla_cuda_plugin.so")
        if path.exists() and hasattr(ctypes.CDLL(str(path)), "MosaicGpuCompile"):
            return str(path)
    return None


def _load_compiler(library: str) -> Callable[[bytes, int], Any]:
    # It says where the compiler finds its runtime and NVIDIA's tools.
    importlib.import_module("jax.experimental.mosaic.gpu")
    compile_module: Any = ctypes.CDLL(library).MosaicGpuCompile
    compile_module.argtypes = [ctypes.c_char_p, ctypes.c_int]
    compile_module.restype = ctypes.POINTER(ctypes.c_void_p)
    return compile_module


@functools.cache
def _compile(handler: MosaicHandler, module: bytes) -> MosaicKernel:
    compiled = _load_compiler(handler.library)(module, len(module))
    if not compiled:
        raise InterfaceError(ErrorCode.INTERNAL, "the kernel of Mosaic GPU cannot be compiled")
    return MosaicKernel(compiled[0], compiled[1])


# Two threads that ask for one kernel would both compile it.
_lock = threading.Lock()


def _find_kernel(handler: MosaicHandler, module: bytes) -> MosaicKernel:
    with _lock:
        return _compile(handler, module)
