"""Decode: XLA's compiled program → XlaProgram, or one error that names all it cannot lower."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tracegraph.lowering.device_program import GraphStep, list_device_steps
from tracegraph.lowering.kernels.loops.waits import add_waits
from tracegraph.lowering.xla.allocations import (
    read_allocations,
    read_outputs,
    read_updated,
    read_views,
)
from tracegraph.lowering.xla.allow_list import check_listed, check_schema
from tracegraph.lowering.xla.atomics import find_float_atomics
from tracegraph.lowering.xla.computations import Computations
from tracegraph.lowering.xla.container import read_executable
from tracegraph.lowering.xla.ffi_call import CheckCall
from tracegraph.lowering.xla.guard_loops import guard_loops
from tracegraph.lowering.xla.origins import Origins, index_origins
from tracegraph.lowering.xla.program import Allocation, XlaProgram
from tracegraph.lowering.xla.refusal import Refusal, make_refused_error
from tracegraph.lowering.xla.riegeli import load_cramjam
from tracegraph.lowering.xla.schema import EXECUTABLE, MANIFEST, OPTIONS, load_schema
from tracegraph.lowering.xla.scope import PlanCall, Scope
from tracegraph.lowering.xla.thunks import RefusedThunk, decode_sequence
from tracegraph.runtime.errors import (
    MAX_EXAMPLES,
    RefusedWork,
    UnsupportedError,
    shorten_list,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message


# Options of XLA's by which small numbers become zero, or sums are made in another order.
_INEXACT_SUMS = ("xla_gpu_ftz", "xla_enable_fast_math")


def decode_executable(
    executable: Message,
    *,
    name: str,
    check_call: CheckCall | None = None,
    plan_call: PlanCall | None = None,
    reads_loops: bool = False,
    partitions: int = 1,
    has_choices: bool = True,
) -> XlaProgram:
    """Returns the steps of a compiled program over XLA's own allocations.

    Args:
        executable: an ``xla.gpu.GpuExecutableProto`` as `read_executable` returns it: read with the
            schema of the plugin that wrote it, and without unknown fields.
        name: of the region, for messages.
        check_call: of the device; says why a call of a handler cannot be in a graph; None to ask
            nothing.
        plan_call: of the device; says how much workspace a call of a library needs; None for none.
        reads_loops: say of each kernel what it computes for each element, where that is known.
        partitions: how many devices it must be for.
        has_choices: the driver has nodes that choose among several branches.

    Raises:
        UnsupportedError: the program has thunks, fields, memory or layouts that are not lowered;
            all of its thunks that are not lowered are named in one error, and recorded with it.
    """
    program: Any = executable
    refused: list[RefusedThunk] = []
    try:
        _check_program(program, partitions)
        views = read_views(program.buffer_allocations.values)
        outputs = read_outputs(program, views)
        updated = read_updated(program)
        computations = Computations(program.hlo_module_with_config.hlo_module)
        scope = _make_scope(program, computations, views, check_call, plan_call)
        scope = dataclasses.replace(
            scope, reads_loops=reads_loops, partitions=partitions, has_choices=has_choices
        )
        steps = tuple(decode_sequence(program.thunks, scope, refused))
        if not refused:
            steps = add_waits(_guard(steps, outputs, scope))
            used = _list_used(steps)
            own = read_allocations(program, computations, used, frozenset(outputs))
            allocations = (*own, *scope.added)
            _check_writes(allocations, steps, updated)
            atomics = find_float_atomics(computations)
            return XlaProgram(program.module_name, allocations, steps, outputs, atomics)
    except Refusal as refusal:
        raise make_refused_error(
            f"the compiled program of `{name}` {refusal}",
            where=f"XLA's module `{program.module_name}`",
            why="a CUDA graph is built only from what tracegraph can interpret in full",
            refused=[RefusedWork(name, "program", str(refusal))],
        ) from None
    raise _make_thunks_error(refused, program, name)


def read_program(
    serialized: bytes,
    *,
    name: str,
    check_call: CheckCall | None = None,
    plan_call: PlanCall | None = None,
    reads_loops: bool = False,
    partitions: int = 1,
    has_choices: bool = True,
) -> XlaProgram:
    """Returns the steps of a compiled program from the bytes that XLA writes it as.

    Args:
        serialized: of ``compiled.runtime_executable().serialize()``, from JAX in this environment.
        name: of the region, for messages.
        check_call: as for `decode_executable`.
        plan_call: as for `decode_executable`.
        reads_loops: as for `decode_executable`.
        partitions: as for `decode_executable`.
        has_choices: as for `decode_executable`.

    Raises:
        UnsupportedError: as `decode_executable`; or the bytes are no program that the installed
            CUDA plugin knows, or there is no such plugin.
    """
    executable = read_executable(serialized, load_schema())
    return decode_executable(
        executable,
        name=name,
        check_call=check_call,
        plan_call=plan_call,
        reads_loops=reads_loops,
        partitions=partitions,
        has_choices=has_choices,
    )


def prepare_reading() -> None:
    """Does what the first program that is read would wait for.

    Loads XLA's schema, half a second once per CUDA plugin, makes its messages and looks at them,
    and loads this module with all readers.
    """
    load_cramjam()
    # Without a plugin, or with an unknown one, the capture is refused where one is needed.
    with contextlib.suppress(UnsupportedError, Refusal):
        schema = load_schema()
        for name in (MANIFEST, OPTIONS):
            schema.message_class(name)
        check_schema(schema.message_class(EXECUTABLE).DESCRIPTOR)


def read_origins(executable: Any) -> Origins:
    """Returns where the instructions of a compiled program come from.

    Args:
        executable: a ``jax.stages.Compiled`` for a GPU.

    Raises:
        UnsupportedError: there is no CUDA plugin whose programs can be read.
    """
    serialized = executable.runtime_executable().serialize()
    program: Any = read_executable(serialized, load_schema())
    return index_origins(program.hlo_module_with_config.hlo_module)


def _check_program(program: Any, partitions: int) -> None:
    check_schema(program.DESCRIPTOR)
    check_listed(program)
    config = program.hlo_module_with_config.config
    if config.replica_count > 1 or max(config.num_partitions, 1) != partitions:
        raise Refusal(f"is for {config.replica_count} by {config.num_partitions} devices")


def _make_scope(
    program: Any,
    computations: Computations,
    views: Any,
    check_call: CheckCall | None,
    plan_call: PlanCall | None,
) -> Scope:
    module = program.hlo_module_with_config.hlo_module
    # XLA loads constants into the image under their symbols; kernels in it may look there.
    binary = b"" if program.constants else program.binary
    instructions = computations.get(module.entry_computation_id, {})
    return Scope(
        views,
        instructions,
        binary=binary,
        computations=computations,
        check_call=check_call,
        plan_call=plan_call,
        cudnn_graphs=program.dnn_compiled_graphs,
        has_ieee_sums=_has_ieee_sums(program.hlo_module_with_config.config.debug_options),
    )


def _has_ieee_sums(options: Any) -> bool:
    """True where XLA knows the options that change sums, and none is set."""
    known = options.DESCRIPTOR.fields_by_name
    return all(name in known and not getattr(options, name) for name in _INEXACT_SUMS)


def _guard(
    steps: Sequence[GraphStep], outputs: Sequence[str], scope: Scope
) -> tuple[GraphStep, ...]:
    """Returns the steps, with several iterations per turn of loops of unknown length."""
    results = [view for view in scope.views if view is not None and view.buffer in outputs]
    return guard_loops(steps, results, scope.computations, scope.add_temporary)


def _list_used(steps: Sequence[GraphStep]) -> frozenset[str]:
    """Returns every allocation that a node names, through empty ranges too."""
    nodes = [step.node for step in list_device_steps(steps)]
    return frozenset([use.buffer for node in nodes for use in node.ranges])


def _check_writes(
    allocations: Sequence[Allocation], steps: Sequence[GraphStep], updated: frozenset[int]
) -> None:
    """Raises `Refusal` when a step writes what JAX may still read, or what never changes."""
    held = {
        each.name: each
        for each in allocations
        if each.content is not None
        or (each.parameter is not None and each.parameter not in updated)
    }
    for step in list_device_steps(steps):
        for use in step.writes:
            if use.buffer in held:
                kind = held[use.buffer].kind.value
                raise Refusal(f"writes into the {kind} {use.buffer} at `{step.name}`")


def _make_thunks_error(
    refused: Sequence[RefusedThunk], program: Any, name: str
) -> UnsupportedError:
    origins = index_origins(program.hlo_module_with_config.hlo_module)
    counts = Counter(each.kind for each in refused)
    kinds = [f"{kind} ({count})" for kind, count in counts.most_common()]
    # Of every kind the first one is named: many of one kind hide no other.
    firsts = {kind: index for index, kind in reversed([*enumerate(each.kind for each in refused)])}
    order = sorted(range(len(refused)), key=lambda index: firsts[refused[index].kind] != index)
    named = [refused[index] for index in sorted(order[:MAX_EXAMPLES])]
    lines = [f"{each.kind} at {origins.locate(each.name)}" for each in named]
    if len(refused) > len(named):
        lines.append(f"and {len(refused) - len(named)} more")
    reasons = list(dict.fromkeys(f"{each.kind} {each.reason}" for each in refused if each.reason))
    rule = "a CUDA graph is built here from kernels, memcpys, memsets, calls, branches and loops"
    return make_refused_error(
        f"`{name}` has work that cannot be lowered: {', '.join(shorten_list(kinds))}",
        where="; ".join(lines),
        why="; ".join([rule, *shorten_list(reasons)]),
        refused=[
            RefusedWork(name, each.kind, each.reason, origins.find_path(each.name))
            for each in refused
        ],
    )
