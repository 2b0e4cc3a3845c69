"""Compiler: XLA compiles a region for one device while the calling thread does other work."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax

from tracegraph.lowering.compiled_region import CompiledRegion
from tracegraph.lowering.overlap import Overlap
from tracegraph.lowering.request import Region
from tracegraph.lowering.tuning import UNTUNED, Tuning
from tracegraph.runtime.definition.code_target import CodeTarget, CompileKernel
from tracegraph.runtime.definition.cudnn_calls import CudnnCall
from tracegraph.runtime.definition.library_calls import LibraryCall
from tracegraph.runtime.definition.library_nodes import MatmulNode
from tracegraph.runtime.ffi.call import FfiCall
from tracegraph.runtime.jax_interop import carry_settings, is_default_device, keep_code

# XLA's options with their values.
XlaOptions: TypeAlias = tuple[tuple[str, bool | str], ...]


class CompileTarget(Protocol):
    """What lowering needs to know of a device; every `runtime.device.Device` is one."""

    @property
    def jax_device(self) -> Any:
        """A device of this process, or one of a topology that is only compiled for."""
        ...

    @property
    def takes_kernels(self) -> bool:
        """True when its graphs are made of the kernels that XLA wrote."""
        ...

    @property
    def updates_in_place(self) -> bool:
        """True when compiled regions may overwrite the memory of resident state."""
        ...

    @property
    def target(self) -> CodeTarget:
        """What its code is compiled for."""
        ...

    def find_call_problem(self, call: FfiCall | CudnnCall) -> str:
        """Returns why a call of a library cannot be in a graph, or an empty text."""
        ...

    def plan_library_call(self, call: LibraryCall) -> int:
        """Returns how many bytes of workspace a call of a library of NVIDIA needs."""
        ...

    def find_workspace_bytes(self, node: MatmulNode) -> int | None:
        """Returns how many bytes of its workspace a matmul needs; None where nothing says it."""
        ...

    @property
    def compile_kernel(self) -> CompileKernel | None:
        """Makes machine code of a source of ours; None where no kernels are taken."""
        ...


class PhaseProgress(Protocol):
    """Is notified of each phase of a capture."""

    def enter(self, phase: str, detail: str = "") -> None:
        """Begins a phase; the detail says which part of it."""
        ...


class Compiler:
    """Compiles the regions of one capture.

    Args:
        target: the device that they are compiled for.
        progress: enters ``compile`` when JAX begins to compile, and ``lower`` when it is done.
        overlap: work for the calling thread while XLA compiles. Where nothing is compiled, or an
            error comes before that, it is left to the caller.
        tuning: how programs are made.
        compiled: regions that were compiled before, with the same options.
        owners: the process of each device that the program is for.

    Attributes:
        target: the same.
        tuning: the same.
        owners: the same.
    """

    def __init__(
        self,
        target: CompileTarget,
        progress: PhaseProgress,
        overlap: Overlap | None = None,
        *,
        tuning: Tuning = UNTUNED,
        compiled: Sequence[CompiledRegion] = (),
        owners: Sequence[int] = (0,),
    ) -> None:
        self.target, self._progress, self.tuning = target, progress, tuning
        self.owners = tuple(owners)
        self._compiled = {region.name: region for region in compiled}
        self._overlap = overlap if overlap is not None else Overlap()

    def find_compiled(self, region: Region) -> CompiledRegion | None:
        """Returns a region that was compiled before, or None."""
        return self._compiled.get(region.name)

    def compile(
        self,
        region: Region,
        donated: int = 0,
        *,
        count: int = 1,
        options: XlaOptions = (),
        keep_known: Callable[[XlaOptions], XlaOptions] = tuple,
    ) -> Callable[..., Any]:
        """Returns the compiled region, or for an eager one its function as it is.

        A region of one result returns it bare: a tuple would cost every call its unpacking.

        Args:
            region: flat function and specs.
            donated: how many of the first inputs are donated.
            count: how many regions the capture has, for the progress line.
            options: XLA's options, over its defaults, for this compilation alone.
            keep_known: returns those of the options that this XLA knows. It is asked only where XLA
                refuses them: what it reads may take as long as a capture does otherwise.

        Raises:
            jax.errors.JaxRuntimeError: XLA cannot compile it.
        """
        function = region.function if len(region.outputs) != 1 else _return_bare(region.function)
        if not region.place.is_captured:
            return function
        jax_device = self.target.jax_device
        # On the default device results are uncommitted, as those of `jax.jit` on plain arguments.
        is_default = is_default_device(jax_device)
        sharding = None if is_default else jax.sharding.SingleDeviceSharding(jax_device)
        arguments = [
            jax.ShapeDtypeStruct(
                spec.shape, spec.dtype, sharding=sharding, weak_type=spec.weak_type
            )
            for spec in region.inputs
        ]
        detail = f"{region.name} of {count}"
        self._progress.enter("compile", detail)
        with _use_by_default(jax_device, is_default=is_default):
            lowered = _lower(function, arguments, donated)
            compile_program = functools.partial(_compile_known, lowered, options, keep_known)
            if not self.target.takes_kernels:
                compile_program = keep_code(compile_program)
            compile_program = carry_settings(compile_program)
        compiled = self._overlap.run(compile_program, on_late=self._progress.enter)
        self._progress.enter("lower", detail)
        return compiled

    def finish_overlap(self) -> None:
        """Does what was to overlap with XLA, unless it was started before."""
        if not self._overlap.is_done:
            self._progress.enter(self._overlap.phase)
            self._overlap.finish()


def _use_by_default(
    jax_device: Any, *, is_default: bool
) -> contextlib.AbstractContextManager[None]:
    """Returns what makes JAX use a device; nothing where it does so by itself.

    JAX takes a default that was set for another than its own, also where both are one device, and
    would trace again what it has traced before.
    """
    is_set = jax.config.jax_default_device is not None  # pyright: ignore[reportAttributeAccessIssue]
    return contextlib.nullcontext() if is_default and not is_set else jax.default_device(jax_device)


def _lower(
    function: Callable[..., Any], arguments: Sequence[jax.ShapeDtypeStruct], donated: int
) -> jax.stages.Lowered:
    """Lowers a region to the program that `jax.jit` makes of it, with all of its parameters.

    JAX removes dead code only where it may drop parameters, too: what a loop carries and nothing
    reads, for one. XLA would remove it later, and then fuse the rest in another way: other bits.
    """
    lower = functools.partial(jax.jit, function, donate_argnums=range(donated))
    lowered = lower().lower(*arguments)
    if _count_parameters(lowered) == len(arguments):
        return lowered
    # A caller passes all of its arguments, by position, to what XLA compiled.
    return lower(keep_unused=True).lower(*arguments)


def _compile_known(
    lowered: jax.stages.Lowered, options: XlaOptions, keep_known: Callable[[XlaOptions], XlaOptions]
) -> jax.stages.Compiled:
    """Compiles a program with those of the options that this XLA knows.

    Which those are says XLA's schema. Here it is not loaded yet, and mostly all of them are.
    """
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError:
        known = keep_known(options)
        if len(known) == len(options):
            raise
    return lowered.compile(compiler_options=dict(known))


def _count_parameters(lowered: jax.stages.Lowered) -> int:
    module: Any = lowered.compiler_ir("stablehlo")
    # Not every op of a module has a class that would give its name.
    (main,) = [
        each
        for each in module.body.operations
        if each.operation.attributes["sym_name"].value == "main"
    ]
    return len(main.regions[0].blocks[0].arguments)


def _return_bare(function: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arrays: Any) -> Any:
        return function(*arrays)[0]

    return run
