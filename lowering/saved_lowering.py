"""Saved lowerings: a `Lowered` to a tree of JSON and byte strings, and back.

Note [Executables in a file]. On the host device a graph calls what XLA compiled, so that is saved,
too. On a GPU a graph is made of kernels, which its definition has; what XLA compiled is only what
the graph was verified against, and is left out: 0.3 s and more of loading it are saved. Who reads
the tree gives what stands for it. Of a graph that is still to be verified it is the reference: then
it is in the tree, and loaded when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegraph.lowering import device_program, request
from tracegraph.lowering.compiled_region import CompiledRegion
from tracegraph.lowering.late_executable import find_compiled
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.planning.lifetimes import Lifetime
from tracegraph.lowering.planning.memory_plan import MemoryPlan, find_plan_problems
from tracegraph.runtime.definition.event_nodes import EventNode, HostEvent
from tracegraph.runtime.definition.graph_nodes import list_nested
from tracegraph.runtime.definition.nodes import CallNode
from tracegraph.runtime.errors import InternalError
from tracegraph.runtime.jax_interop import load_executable, save_executable
from tracegraph.runtime.saved_executable import ArrayAval, SavedExecutable
from tracegraph.runtime.saving.check_definition import find_definition_problem
from tracegraph.runtime.saving.graph_records import GRAPH_TYPES
from tracegraph.runtime.saving.record_codec import ContentProblem, Encoded, RecordCodec

LOWERED_TYPES: tuple[type, ...] = (
    *GRAPH_TYPES,
    ArrayAval,
    SavedExecutable,
    CallNode,
    request.BufferSpec,
    request.Role,
    request.InputSpec,
    request.OutputSpec,
    device_program.ExecutableCall,
    device_program.Copy,
    device_program.DeviceStep,
    device_program.ConditionalStep,
    device_program.DeviceProgram,
    Lifetime,
    MemoryPlan,
    CompiledRegion,
    Lowered,
)
_codec = RecordCodec(LOWERED_TYPES)


class SaveProblem(Exception):
    """Why a lowering cannot be saved; its text is a clause, as ``it calls back into Python``."""


def encode_lowered(
    lowered: Lowered, *, blobs: Sequence[bytes] = (), has_references: bool = False
) -> Encoded:
    """Returns a lowering as a tree and byte strings, see Note [Executables in a file].

    Args:
        lowered: of a whole capture.
        has_references: True to add what a graph of kernels is to be compared with.
        blobs: byte strings that are there already; those of the lowering are added.

    Raises:
        SaveProblem: it holds what belongs to this process.
    """
    if lowered.eager_regions:
        raise SaveProblem(f"its part {lowered.eager_regions[0]} runs as Python between two graphs")
    for stage in lowered.definition.stages:
        if any(map(_is_event, list_nested(stage.nodes))):
            raise SaveProblem("it records an event of this process, or waits for one")
    executables = [region.executable for region in lowered.regions]
    is_needed = has_references or not lowered.takes_kernels
    saved = tuple(map(_save, lowered.regions)) if is_needed else ()
    encoded = _codec.encode(saved, blobs=blobs)
    last = _codec.encode(lowered, externals=executables, blobs=encoded.blobs)
    kind = {"takes_kernels": lowered.takes_kernels}
    return Encoded({**kind, "executables": encoded.tree, "lowered": last.tree}, last.blobs)


def decode_lowered(
    tree: Any,
    blobs: Sequence[bytes | memoryview],
    jax_device: Any,
    stand_ins: Sequence[Callable[..., Any]] = (),
) -> Lowered:
    """Returns the lowering of a tree.

    Args:
        tree: of JSON.
        blobs: byte strings that it refers to.
        jax_device: that it is for; None to read what is there without loading code.
        stand_ins: called in place of what XLA compiled, one per region, where the graph was made of
            kernels. No replay calls them.

    Raises:
        ContentProblem: something in it is not as `encode_lowered` writes it.
    """
    if not isinstance(tree, dict) or tree.keys() != {"takes_kernels", "executables", "lowered"}:
        raise ContentProblem("the lowering", "it has not a kind, executables and a lowering")
    saved = _codec.decode(tree["executables"], blobs, tuple[SavedExecutable, ...])
    is_late = tree["takes_kernels"] is True or jax_device is None
    load: Callable[..., Any] = LateCode if is_late else _load
    externals = [load(each, jax_device) for each in saved] or stand_ins
    lowered = _codec.decode(tree["lowered"], blobs, Lowered, externals=externals)
    if lowered.takes_kernels is not tree["takes_kernels"]:
        raise ContentProblem("the lowering", "it is of another kind than it says")
    if len(saved) != len(lowered.regions) and (saved or not lowered.takes_kernels):
        raise ContentProblem("the lowering", f"it has {len(saved)} executables")
    if problem := find_definition_problem(lowered.definition):
        raise ContentProblem("the definition", problem)
    if problems := find_plan_problems(lowered.plan):
        raise ContentProblem("the memory plan", problems[0])
    return lowered


def _is_event(node: Any) -> bool:
    if isinstance(node, EventNode):
        return True
    return isinstance(node, CallNode) and isinstance(node.executable, HostEvent)


def _save(region: CompiledRegion) -> SavedExecutable:
    compiled = find_compiled(region.executable)
    if compiled is None:
        raise SaveProblem(f"its part {region.name} runs as Python")
    try:
        return save_executable(compiled)
    except ValueError as error:
        raise SaveProblem(str(error)) from None


class LateCode:
    """What XLA compiled, loaded when it is called first.

    Args:
        saved: its parts.
        jax_device: that it is loaded on; None for one that is only read.
    """

    def __init__(self, saved: SavedExecutable, jax_device: Any) -> None:
        self._saved, self._jax_device = saved, jax_device
        self._loaded: Callable[..., Any] | None = None

    def __call__(self, *arrays: Any) -> Any:
        """Calls what XLA compiled.

        Raises:
            jax.errors.JaxRuntimeError: XLA does not take the code, or fails.
        """
        if self._jax_device is None:
            raise InternalError(
                f"the program {self._saved.name} of a file that was only read is called",
                where="lowering/saved_lowering.py",
                why="no device was named for it",
            )
        if self._loaded is None:
            self._loaded = load_executable(self._saved, self._jax_device)
        return self._loaded(*arrays)


def _load(saved: SavedExecutable, jax_device: Any) -> Callable[..., Any]:
    try:
        return load_executable(saved, jax_device)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise ContentProblem(f"executable {saved.name}", f"XLA refuses it: {error}") from None
