"""DescribedGpu: a kind of GPU that is compiled for where there is none.

It needs the CUDA plugin of JAX with its PJRT library and nvcc, and no driver. What a GPU alone can
tell is refused: whether a handler of `jax.ffi` or a call of cuDNN can be captured, and how much
memory a plan of cuFFT needs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from tracegraph.runtime.cuda.gpu_targets import GPU_TARGETS
from tracegraph.runtime.cuda.libraries.cublas import count_workspace_bytes
from tracegraph.runtime.cuda.libraries.nvrtc import compile_source
from tracegraph.runtime.cuda.properties import find_compiler
from tracegraph.runtime.definition.code_target import CodeTarget, CompileKernel
from tracegraph.runtime.definition.cudnn_calls import CudnnCall
from tracegraph.runtime.definition.library_calls import LibraryCall, Transform
from tracegraph.runtime.definition.library_nodes import MatmulNode
from tracegraph.runtime.definition.nodes import KernelCode
from tracegraph.runtime.errors import ConfigError, UnsupportedError
from tracegraph.runtime.ffi.call import FfiCall

# JAX takes the text of a target since then.
OLDEST_JAX = (0, 11)
_NEEDS = 'pip install "jax[cuda13]>=0.11", and set JAX_PLATFORMS=cpu'


@dataclasses.dataclass(frozen=True)
class DescribedGpu:
    """What lowering needs to know of a GPU that is not here.

    Attributes:
        jax_device: of a topology.
        name: as a command line gives it.
    """

    jax_device: Any
    name: str

    takes_kernels = True
    updates_in_place = True

    @property
    def target(self) -> CodeTarget:
        """The GPU, and the compiler of JAX's plugin."""
        capability = str(self.jax_device.compute_capability)
        compiler = find_compiler(self.jax_device)
        return CodeTarget("cuda", capability, self.jax_device.device_kind, compiler=compiler)

    @property
    def compile_kernel(self) -> CompileKernel:
        """Makes machine code for the GPU, by NVRTC, which needs none."""
        return functools.partial(compile_source, self.target.architecture)

    def prepare_result(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Does nothing: there is no memory to prepare."""

    def prepare_copies(self, types: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        """Does nothing: there is no memory to prepare."""

    def preload_matmuls(self) -> None:
        """Does nothing: what is compiled here is not run here."""

    def preload_convolutions(self) -> None:
        """Does nothing: what is compiled here is not run here."""

    def preload_comparison(self) -> None:
        """Does nothing: what is compiled here is not run here."""

    def preload_kernels(self, codes: Sequence[KernelCode]) -> None:
        """Does nothing: what is compiled here is not run here."""

    def find_call_problem(self, call: FfiCall | CudnnCall) -> str:
        """Returns why a call of a library cannot be in a graph that is compiled here."""
        what = f"the handler {call.target}" if isinstance(call, FfiCall) else "cuDNN"
        return f"calls {what}, which only a GPU can try"

    def find_workspace_bytes(self, node: MatmulNode) -> None:
        """Returns None: only cublasLt on a GPU says it."""

    def plan_library_call(self, call: LibraryCall) -> int:
        """Returns how many bytes of workspace a call of a library of NVIDIA needs.

        Raises:
            UnsupportedError: only the library on a GPU knows.
        """
        if not isinstance(call, Transform):
            return count_workspace_bytes(call, int(self.target.architecture.partition(".")[0]))
        raise UnsupportedError(
            f"a Fourier transform cannot be compiled for {self.name} without one",
            where="a call of cuFFT",
            why="its plan is made by cuFFT on the GPU, which tells how much memory it needs",
            fix=f"capture and save it on a machine with {self.name}",
            anchor="ahead-of-time",
        )


@functools.cache
def describe_gpu(name: str) -> DescribedGpu:
    """Returns a GPU that programs can be compiled for on this machine.

    Args:
        name: one of `GPU_TARGETS`.

    Raises:
        ConfigError: there is no description of it, or this JAX cannot compile for it here.
    """
    if name not in GPU_TARGETS:
        raise _make_target_error(
            f"the target {name!r} is unknown",
            f"there are descriptions of {', '.join(GPU_TARGETS)}; `here` is the current device",
            "--target h200",
        )
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < OLDEST_JAX:
        why = f"JAX {jax.__version__} compiles for a GPU only where one is"
        raise _make_target_error(f"nothing can be compiled for {name} here", why, _NEEDS)
    try:
        topology: Any = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            target_config=GPU_TARGETS[name],
            # Slices, hosts in a slice, devices of a host.
            topology="1x1x1",
        )
        (device,) = topology.devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        why = f"JAX's CUDA plugin does not take it: {str(error).partition(chr(10))[0]}"
        raise _make_target_error(f"nothing can be compiled for {name} here", why, _NEEDS) from error
    return DescribedGpu(device, name)


def _make_target_error(what: str, why: str, fix: str) -> ConfigError:
    return ConfigError(what, where="--target", why=why, fix=fix, anchor="ahead-of-time")
