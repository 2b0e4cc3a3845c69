"""The graphs of a loaded function: from the records of a file, and from a call to its graph."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.jax_internals import describe_physical
from tracegraph.lowering.collector import hold_collector
from tracegraph.lowering.lower import Lowered
from tracegraph.options import Options
from tracegraph.replaying.replayable_graph import ReplayableGraph
from tracegraph.runtime.arrays.array import ArrayState
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import SavedFileError
from tracegraph.runtime.replay import Replay
from tracegraph.runtime.saving.record_codec import ContentProblem
from tracegraph.runtime.saving.saved_file import ANCHOR, raise_damage
from tracegraph.saving.plain_values import Names, UnknownNameError
from tracegraph.saving.saved_calls import unpack_call, unpack_results
from tracegraph.saving.saved_constants import unpack_constants
from tracegraph.saving.saved_function import Opened, SavedEntry, decode_entry
from tracegraph.saving.saved_parameters import unpack_options, unpack_parameters
from tracegraph.saving.saved_target import FileOrigin
from tracegraph.tracing.call_spec import CallSpec, ResultSpec
from tracegraph.tracing.spellings import make_spellings
from tracegraph.user_memory.live_plans import watch_plan
from tracegraph.verification.expectation import Expectation
from tracegraph.verification.report import VerificationReport


@dataclasses.dataclass(frozen=True)
class LoadedEntry:
    """One signature, ready to be made a graph.

    Attributes:
        call: the calls that it takes.
        results: what it returns.
        lowered: its program, plan and nodes.
        constants: its closed-over arrays, by the names of their inputs.
        verification: what a comparison found; None where it is still to be made.
        expectation: what it is to find then.

    More than six fields because it is all that a graph is made of and held against.
    """

    call: CallSpec
    results: ResultSpec
    lowered: Lowered
    constants: Mapping[str, Any]
    verification: VerificationReport | None
    expectation: Expectation | None = None

    @hold_collector
    def instantiate(self, device: Device, pool: FunctionPool) -> ReplayableGraph:
        """Allocates the arena and returns the graph.

        Raises:
            OutOfMemoryError: the pool cannot hold the arena.
        """
        state = ArrayState(self.results.outputs)
        replay = Replay(self.lowered.definition, device, pool.join(device), state)
        graph = ReplayableGraph(self.call, self.results, self.lowered, replay, self.constants)
        watch_plan(self.lowered.plan, replay)
        return graph


@dataclasses.dataclass(frozen=True)
class LoadedParts:
    """What is known of a loaded function.

    Attributes:
        name: of it.
        parameters: that its calls are checked against.
        options: of its capture.
        entries: one per signature.
        source: what messages call the file.
        origin: what it was saved with.
        checksum: of the file.

    More than six fields because it is all that a loaded function is made of.
    """

    name: str
    parameters: tuple[inspect.Parameter, ...]
    options: Options
    entries: tuple[LoadedEntry, ...]
    source: str
    origin: FileOrigin
    checksum: str


def load_parts(opened: Opened, device: Device, names: Names, constants: Any) -> LoadedParts:
    """Returns what a file holds, for a device; takes no memory of it.

    Args:
        opened: the file.
        device: that it is loaded on.
        names: of classes and functions.
        constants: closed-over arrays that the user gives.

    Raises:
        SavedFileError: something in it is not as it was written, or is missing here.
    """
    saved, place = opened.function, "the function"
    arrays = _unpack_constants(opened, constants)
    entries: list[LoadedEntry] = []
    try:
        outputs = saved.entries[0].results.outputs
        options = unpack_options(saved.options, saved.name, outputs)
        parameters = unpack_parameters(saved.parameters, names)
        spellings = make_spellings(unpack_parameters(saved.own_parameters, names), options)
        for number, each in enumerate(saved.entries):
            place = f"signature {number}"
            call = unpack_call(each.call, saved.name, spellings, names)
            results = unpack_results(each.results, names)
            lowered = decode_entry(opened, number, device.jax_device)
            held = _choose_constants(each, arrays)
            _check_entry(call, results, lowered, held)
            _check_in_place(lowered, device, opened.source, place)
            _check_proof(each, call)
            entries.append(
                LoadedEntry(call, results, lowered, held, each.verification, each.expectation)
            )
    except ContentProblem as problem:
        raise_damage(opened.source, f"{place}, {problem.place}", problem.problem)
    except UnknownNameError as error:
        _raise_unknown(opened.source, place, error)
    if len({each.call.signature for each in entries}) < len(entries):
        raise_damage(opened.source, "the function", "two signatures are equal")
    return LoadedParts(
        saved.name,
        parameters,
        options,
        tuple(entries),
        opened.source,
        opened.origin,
        opened.checksum,
    )


def _unpack_constants(opened: Opened, given: Any) -> Sequence[Any]:
    try:
        return unpack_constants(opened.function.constants.held, given, opened.source)
    except ContentProblem as problem:
        raise_damage(opened.source, problem.place, problem.problem)


def _choose_constants(saved: SavedEntry, arrays: Sequence[Any]) -> dict[str, Any]:
    if any(not 0 <= index < len(arrays) for _, index in saved.constants):
        raise ContentProblem("the constants", "there are fewer than it takes")
    return {name: arrays[index] for name, index in saved.constants}


def _check_entry(
    call: CallSpec, results: ResultSpec, lowered: Lowered, constants: Mapping[str, Any]
) -> None:
    """Refuses a signature whose types are not those of the buffers of its graph."""
    definition = lowered.definition
    slots = {slot.name: slot for slot in definition.slots}
    types = {name: (slot.shape, slot.dtype) for name, slot in slots.items()}
    count = len(call.names)
    inputs, outputs = definition.inputs, definition.outputs
    if len(inputs) < count or tuple(constants) != inputs[count:]:
        raise ContentProblem("the inputs", f"they are not {count} leaves and its constants")
    if any(not stage.is_captured for stage in definition.stages):
        raise ContentProblem("the stages", "one of them is not a graph")
    given = [describe_physical(leaf) for leaf in call.signature.leaves]
    given += [(tuple(each.shape), each.dtype) for each in constants.values()]
    for name, kind in zip(inputs, given, strict=True):
        if types[name] != kind:
            raise ContentProblem(f"the input {name}", "its buffer is of another type")
    if len(outputs) != len(results.avals):
        raise ContentProblem("the results", f"they are not {len(outputs)} leaves")
    for name, aval in zip(outputs, results.avals, strict=True):
        if types[name] != describe_physical(aval):
            raise ContentProblem(f"the result {name}", "its buffer is of another type")
    _check_aliases(call, results, lowered)


def _check_proof(saved: SavedEntry, call: CallSpec) -> None:
    """Refuses a signature that neither was verified nor can be."""
    expectation = saved.expectation
    if (saved.verification is None) != (expectation is not None):
        raise ContentProblem("the verification", "it is there twice, or not at all")
    if expectation is not None and len(expectation.others.may_differ) != len(call.names):
        raise ContentProblem("the expectation", f"it is not of {len(call.names)} leaves")


def _check_in_place(lowered: Lowered, device: Device, source: str, place: str) -> None:
    """Refuses programs that overwrite what they are given where the device keeps it."""
    if device.updates_in_place or not any(region.in_place for region in lowered.regions):
        return
    raise SavedFileError(
        f"{source} was not saved in checking mode, and is loaded in it",
        where=f"{source}, {place}",
        why="its programs update donated state in place, and checking mode copies it",
        fix="load it without TRACEGRAPH_CHECK_REPLAY=1, or save it with it",
        anchor=ANCHOR,
    )


def _check_aliases(call: CallSpec, results: ResultSpec, lowered: Lowered) -> None:
    """Refuses results that are in a donated input's buffer and do not say so, or the reverse."""
    definition = lowered.definition
    residents = {slot.name for slot in definition.slots if slot.is_resident}
    inputs, outputs = definition.inputs, definition.outputs
    pairs = dict(results.aliases)
    held = {index for index, name in enumerate(outputs) if name in residents}
    is_known = len(pairs) == len(results.aliases) and pairs.keys() == held
    if not is_known or not set(pairs.values()) <= call.donated:
        raise ContentProblem("the aliases", "they are not the results that stay in the graph")
    if any(outputs[result] != inputs[argument] for result, argument in pairs.items()):
        raise ContentProblem("the aliases", "a result is not in the buffer of its argument")


def _raise_unknown(source: str, place: str, error: UnknownNameError) -> NoReturn:
    change = error.change or "is not there in this process"
    module = error.name.module
    raise SavedFileError(
        f"{source} needs `{error.name}`, which {change}",
        where=f"{source}, {place}",
        why="its trees and static values have objects of that name, and a file imports nothing",
        fix=f"import {module} before loading, or pass it: tg.load(path, nodes=[...])"
        if not error.change
        else f"load it with the {error.name.name} that it was saved with, or save it again",
        anchor=ANCHOR,
    )
