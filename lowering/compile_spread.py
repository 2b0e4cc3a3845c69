"""Compile a function for several devices: XLA partitions it into one program that all of them run.

Note [One program]
What JAX traced is compiled as one program, as `jax.jit` compiles it: where to put a collective, and
which collectives to join, is decided over the whole function. Cutting it into regions would take
these decisions from XLA, and the bits with them.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from tracegraph.lowering.collectives import Collective, list_collectives
from tracegraph.lowering.compiler import PhaseProgress
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.overlap import Overlap
from tracegraph.runtime.arrays.spread_buffer import GlobalType
from tracegraph.runtime.jax_interop import carry_settings

# Is called with what XLA is about to compile; raises where another process compiles something else.
Agree: TypeAlias = Callable[[jax.stages.Lowered], None]


def agree_alone(_lowered: jax.stages.Lowered) -> None:
    """Agrees on a program that no other process takes part in."""


@dataclasses.dataclass(frozen=True)
class SpreadProgram:
    """A function that was compiled for several devices.

    Attributes:
        executable: of XLA, for all of them; None where graphs of theirs compute nothing.
        devices: in the order of the mesh.
        collectives: that each device takes part in.
        results: the sharding of each flat result.
    """

    executable: Any
    devices: tuple[Any, ...]
    collectives: tuple[Collective, ...]
    results: tuple[Any, ...]

    @property
    def regions(self) -> tuple[SpreadProgram]:
        """Itself: all of the function is one region."""
        return (self,)

    def __str__(self) -> str:
        return f"one program on {len(self.devices)} devices"


@dataclasses.dataclass(frozen=True)
class Spreading:
    """Where a request is to run.

    Attributes:
        devices: in the order of XLA's partitions.
        whole: the sharding of what each of them holds whole.
        shardings: of the inputs that are on the devices already, by the names of their buffers.
        avals: JAX's abstract values of inputs and results, the same way.
        is_named: True where the function, or a mesh around it, names the devices itself.
    """

    devices: tuple[Any, ...]
    whole: Any
    shardings: Mapping[str, Any]
    avals: Mapping[str, Any]
    is_named: bool


@dataclasses.dataclass(frozen=True)
class SpreadLowering:
    """A request that was lowered for several GPUs.

    Attributes:
        lowered: what each of them does.
        program: of XLA, for all of them.
        types: of the static inputs and the results, by the names of their buffers.
    """

    lowered: Lowered
    program: SpreadProgram
    types: Mapping[str, GlobalType]


def compile_spread(
    function: Callable[..., Any],
    arguments: Sequence[jax.ShapeDtypeStruct],
    devices: tuple[Any, ...],
    *,
    donated: Collection[int],
    progress: PhaseProgress,
    overlap: Overlap,
    agree: Agree = agree_alone,
) -> SpreadProgram:
    """Compiles a function of flat arguments, see Note [One program].

    Args:
        function: traceable.
        arguments: types; those with a sharding are taken in that one, others where XLA wants them.
        devices: that the arguments and the function name.
        donated: indices of donated arguments.
        progress: enters ``compile`` and, afterwards, ``lower``.
        overlap: work for this thread meanwhile.
        agree: see `Agree`.

    Raises:
        jax.errors.JaxRuntimeError: XLA cannot compile it.
    """
    detail = f"for {len(devices)} devices"
    progress.enter("compile", detail)
    with warnings.catch_warnings():
        # Donated leaves that no result can use are consumed all the same, as in any capture.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        lowered = jax.jit(function, donate_argnums=tuple(sorted(donated))).lower(*arguments)
    agree(lowered)
    compile_program: Callable[[], jax.stages.Compiled] = functools.partial(lowered.compile)
    compiled = overlap.run(carry_settings(compile_program), on_late=progress.enter)
    progress.enter("lower", detail)
    results = tuple(jax.tree_util.tree_leaves(compiled.output_shardings))
    return SpreadProgram(compiled, devices, list_collectives(compiled.as_text() or ""), results)
