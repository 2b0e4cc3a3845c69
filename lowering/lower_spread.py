"""Lower a function for several GPUs: XLA partitions it, and each GPU gets the same graph.

Note [Graphs of several GPUs]
XLA compiles one program that all GPUs run, see Note [One program]. What it is made of is the work
of one GPU on its own parts, with collectives between. So the request is lowered as for one GPU,
with the shapes of the parts. Only where the parts of the other GPUs are is not known here: that is
filled in when the graph is made executable on each of them.

The new value of donated state keeps the sharding of the old one, where `jax.jit` lets XLA choose:
it is written to the same bytes. State that is not on the GPUs yet is held whole by each of them.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax

from tracegraph.lowering.collectives import list_collectives
from tracegraph.lowering.compile import arrange_in_place, place_donated_results
from tracegraph.lowering.compile_gpu import FIRST_OPTIONS, find_plain, keep_legal
from tracegraph.lowering.compile_spread import (
    Agree,
    Spreading,
    SpreadLowering,
    SpreadProgram,
    agree_alone,
)
from tracegraph.lowering.compiled_region import record_region
from tracegraph.lowering.compiler import Compiler, CompileTarget, PhaseProgress
from tracegraph.lowering.lower import lower_request
from tracegraph.lowering.overlap import Overlap
from tracegraph.lowering.request import BufferSpec, CaptureRequest, Region, Role
from tracegraph.runtime.arrays.spread_buffer import GlobalType
from tracegraph.runtime.errors import UnsupportedError
from tracegraph.runtime.jax_interop import carry_settings

_Options: TypeAlias = tuple[tuple[str, bool | str], ...]
# XLA has kernels of its own for small sums, which need its barriers.
_OPTIONS: _Options = (
    *FIRST_OPTIONS,
    ("xla_gpu_experimental_use_collective_kernels", ""),
)


def lower_spread(
    request: CaptureRequest,
    spreading: Spreading,
    target: CompileTarget,
    progress: PhaseProgress,
    overlap: Overlap,
    agree: Agree = agree_alone,
) -> SpreadLowering:
    """Compiles a request of one region, and lowers it: Note [Graphs of several GPUs].

    Args:
        request: with the shapes of whole arrays.
        spreading: where it is to run.
        target: one of the GPUs.
        progress: enters ``compile`` and, afterwards, ``lower``.
        overlap: work for this thread while XLA compiles.
        agree: see `Agree`.

    Raises:
        jax.errors.JaxRuntimeError: XLA cannot compile it.
        UnsupportedError: XLA's program holds steps that this version cannot lower.
    """
    options = keep_legal(_OPTIONS)
    try:
        return _lower(request, spreading, target, progress, overlap, agree, options)
    except UnsupportedError as refusal:
        # As for one GPU: `_compile_to_kernels` of ``compile_gpu.py``.
        plain = find_plain(refusal)
        if not plain:
            raise
    return _lower(request, spreading, target, progress, overlap, agree, (*options, *plain))


def _lower(
    request: CaptureRequest,
    spreading: Spreading,
    target: CompileTarget,
    progress: PhaseProgress,
    overlap: Overlap,
    agree: Agree,
    options: _Options,
) -> SpreadLowering:
    given = {spec.buffer.name: spreading.shardings.get(spec.buffer.name) for spec in request.inputs}
    for spec in request.inputs:
        if spec.role is Role.DONATED and given[spec.buffer.name] is None:
            given[spec.buffer.name] = spreading.whole
    compiled = _compile_region(request, spreading, given, options, progress, overlap, agree)
    # What is on the devices already stays as it is; the region need not read all of it.
    kept = {name: sharding for name, sharding in given.items() if sharding is not None}
    placed = {} if compiled is None else _find_shardings(*compiled[:2])
    found = {**dict.fromkeys(given, spreading.whole), **placed, **kept}
    records = []
    if compiled is not None:
        arranged, executable, count = compiled
        records.append(record_region(_take_part(arranged, found), executable, count, options))
    devices = spreading.devices
    owners = [device.process_index for device in devices]
    compiler = Compiler(target, progress, compiled=records, owners=owners)
    lowered = lower_request(_take_parts(request, found), compiler)
    types = {name: GlobalType(aval, found[name]) for name, aval in spreading.avals.items()}
    results = tuple(types[name].sharding for name in lowered.definition.outputs)
    executable = compiled[1] if compiled is not None else None
    text = executable.as_text() if executable is not None else ""
    program = SpreadProgram(executable, devices, list_collectives(text or ""), results)
    return SpreadLowering(lowered, program, types)


def _compile_region(
    request: CaptureRequest,
    spreading: Spreading,
    given: Mapping[str, Any],
    options: _Options,
    progress: PhaseProgress,
    overlap: Overlap,
    agree: Agree,
) -> tuple[Region, jax.stages.Compiled, int] | None:
    """Returns the region in the order of `compile_for_gpu`, XLA's program, and how many in place.

    None where every result is an argument or a constant.
    """
    if not request.regions:
        return None
    (region,) = request.regions
    renamed, _ = place_donated_results(request)
    arranged, count = arrange_in_place(region, request.regions, renamed, is_shared=True)
    executable = _compile(
        arranged,
        count,
        given,
        options,
        progress=progress,
        overlap=overlap,
        agree=agree,
        spreading=spreading,
    )
    return arranged, executable, count


def _compile(
    region: Region,
    count: int,
    given: Mapping[str, Any],
    options: _Options,
    *,
    progress: PhaseProgress,
    overlap: Overlap,
    agree: Agree,
    spreading: Spreading,
) -> jax.stages.Compiled:
    arguments = [
        jax.ShapeDtypeStruct(
            spec.shape, spec.dtype, sharding=given[spec.name], weak_type=spec.weak_type
        )
        for spec in region.inputs
    ]
    kept = [given[spec.name] for spec in region.inputs[:count]]
    # Where nothing else names the devices, the results do.
    is_named = spreading.is_named or any(each.sharding is not None for each in arguments)
    other = None if is_named else spreading.whole
    placed: Any = (*kept, *[other] * (len(region.outputs) - count))
    if len(region.outputs) == 1:
        (placed,) = placed
    detail = f"for {len(spreading.devices)} devices"
    progress.enter("compile", detail)
    with warnings.catch_warnings():
        # Donated leaves that no result can use are consumed all the same, as in any capture.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        jitted = jax.jit(
            _unwrap(region), donate_argnums=range(count), out_shardings=placed, keep_unused=True
        )
        lowered = jitted.lower(*arguments)
    agree(lowered)
    compile_program: Callable[[], jax.stages.Compiled] = functools.partial(
        lowered.compile, compiler_options=dict(options)
    )
    compiled = overlap.run(carry_settings(compile_program), on_late=progress.enter)
    progress.enter("lower", detail)
    return compiled


def _unwrap(region: Region) -> Callable[..., Any]:
    """Returns the function of a region; a result by itself comes bare, as `Compiler` has it."""
    if len(region.outputs) != 1:
        return region.function

    @functools.wraps(region.function)
    def run(*arrays: Any) -> Any:
        return region.function(*arrays)[0]

    return run


def _find_shardings(region: Region, executable: jax.stages.Compiled) -> dict[str, Any]:
    """Returns where XLA wants inputs and puts results, by the names of their buffers."""
    inputs, _ = executable.input_shardings
    outputs = jax.tree_util.tree_leaves(executable.output_shardings)
    specs = (*region.inputs, *region.outputs)
    return {spec.name: sharding for spec, sharding in zip(specs, (*inputs, *outputs), strict=True)}


def _take_parts(request: CaptureRequest, shardings: Mapping[str, Any]) -> CaptureRequest:
    """Returns the request of one device: each array is its part of the whole one."""
    return dataclasses.replace(
        request,
        regions=tuple(_take_part(region, shardings) for region in request.regions),
        inputs=tuple(
            dataclasses.replace(each, buffer=_cut(each.buffer, shardings))
            for each in request.inputs
        ),
        outputs=tuple(
            dataclasses.replace(each, buffer=_cut(each.buffer, shardings))
            for each in request.outputs
        ),
    )


def _take_part(region: Region, shardings: Mapping[str, Any]) -> Region:
    return dataclasses.replace(
        region,
        inputs=tuple(_cut(spec, shardings) for spec in region.inputs),
        outputs=tuple(_cut(spec, shardings) for spec in region.outputs),
    )


def _cut(spec: BufferSpec, shardings: Mapping[str, Any]) -> BufferSpec:
    return dataclasses.replace(spec, shape=tuple(shardings[spec.name].shard_shape(spec.shape)))
