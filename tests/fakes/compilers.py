"""Compilers for tests: for any device, and their progress noted."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from tracegraph.lowering.compiler import Compiler
from tracegraph.runtime.definition.code_target import CodeTarget, CompileKernel
from tracegraph.runtime.definition.cudnn_calls import CudnnCall
from tracegraph.runtime.definition.library_calls import LibraryCall
from tracegraph.runtime.definition.library_nodes import MatmulNode
from tracegraph.runtime.ffi.call import FfiCall
from tracegraph.runtime.ffi.checks import find_registration_problem

# A library that is not there plans nothing: made up, and not the same for all.
WORKSPACE_BYTES = {"fft": 512, "scale": 0, "triangular_solve": 4096}


@dataclasses.dataclass(frozen=True)
class Target:
    """A device that is only compiled for."""

    jax_device: Any
    takes_kernels: bool = False
    updates_in_place: bool = False
    compile_kernel: CompileKernel | None = None

    # Of no driver that is known.
    target = CodeTarget("cuda", "9.0", "described")

    def find_call_problem(self, call: FfiCall | CudnnCall) -> str:
        return find_registration_problem(call, "CUDA") if isinstance(call, FfiCall) else ""

    def plan_library_call(self, call: LibraryCall) -> int:
        return WORKSPACE_BYTES[call.kind]

    def find_workspace_bytes(self, node: MatmulNode) -> int | None:
        del node
        return None


class NotedPhases(list[tuple[str, str]]):
    """Progress that notes each call."""

    def enter(self, phase: str, detail: str = "") -> None:
        self.append((phase, detail))


def make_compiler(
    jax_device: Any = None,
    *,
    takes_kernels: bool = False,
    updates_in_place: bool = False,
    phases: NotedPhases | None = None,
) -> Compiler:
    """Returns a compiler, by default for JAX's first device, which overlaps with nothing."""
    device = jax.devices()[0] if jax_device is None else jax_device
    target = Target(device, takes_kernels, updates_in_place)
    return Compiler(target, NotedPhases() if phases is None else phases)
