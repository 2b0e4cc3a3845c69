"""From the captures of a function to a file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from tracegraph.capturing.capture_lowering import lower_lifted
from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.capturing.partition import find_embedded
from tracegraph.capturing.pipeline import Capture
from tracegraph.capturing.variant import find_tuning
from tracegraph.constraints.constants import identify, list_embedded
from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.mismatch import print_leaf_type
from tracegraph.jax_internals import to_physical
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.saved_lowering import SaveProblem
from tracegraph.options import Options
from tracegraph.replaying.jit_call import JitCall
from tracegraph.replaying.spread_call import SpreadCall
from tracegraph.replaying.spread_graph import SpreadGraph
from tracegraph.runtime.definition.code_target import CodeTarget
from tracegraph.runtime.errors import SavedFileError, shorten_list
from tracegraph.runtime.jax_interop import unwrap_key
from tracegraph.runtime.saving.saved_file import write_file
from tracegraph.saving.embedded_arrays import find_left_out
from tracegraph.saving.held_arrays import name_arrays
from tracegraph.saving.saved_calls import pack_call, pack_results
from tracegraph.saving.saved_constants import SavedConstants, pack_constant
from tracegraph.saving.saved_function import SavedEntry, SavedFunction, encode_function
from tracegraph.saving.saved_parameters import (
    pack_options,
    pack_own_parameters,
    pack_parameters,
)
from tracegraph.saving.saved_target import describe_origin
from tracegraph.tracing.call_spec import make_call_spec, make_result_spec
from tracegraph.tracing.signature import Signature
from tracegraph.verification.expectation import expect_comparison
from tracegraph.verification.report import VerificationReport
from tracegraph.version import VERSION

ANCHOR = "cannot-save"
_FIX = "take that part out of the captured function, or capture it where it is used"
_FIX_ARRAYS = "let that function take the array as an argument, or save with constants=True"


@dataclasses.dataclass(frozen=True)
class Collected:
    """A captured function on its way to a file.

    Attributes:
        saved: all that is written of it beside its programs.
        lowered: the program of each signature.
        signatures: the same, as the function keeps them.
        target: that they are compiled for.
    """

    saved: SavedFunction
    lowered: tuple[Lowered, ...]
    signatures: tuple[Signature, ...]
    target: CodeTarget


def collect_captures(
    function: Callable[..., Any],
    options: Options,
    captures: Sequence[Capture],
    jax_device: Any,
    *,
    has_constants: bool,
) -> Collected:
    """Returns what a file holds of the captures of a function.

    Args:
        function: the user's.
        options: of its capture.
        captures: one per signature, released ones among them.
        jax_device: whose graphs are saved.
        has_constants: False to leave the bytes of closed-over arrays out.

    Raises:
        SavedFileError: a graph cannot be saved, or there is none.
    """
    name = options.name
    if options.debug_nans:
        raise make_save_error(name, "debug_nans=True calls it again where a result is invalid")
    pairs = [(_find_recipe(name, each), each) for each in captures]
    pairs = [pair for pair in pairs if pair[0].device.jax_device == jax_device]
    if not pairs:
        raise make_empty_error(name)
    recipes = [
        (recipe, each.verification) if has_constants else _leave_out(function, recipe, each)
        for recipe, each in pairs
    ]
    held = {
        id(each.array): each
        for recipe, _ in recipes
        for each in recipe.checked.graph.constants
        if f"%{each.name}" in recipe.lowered.definition.inputs
    }
    places = {key: index for index, key in enumerate(held)}
    labels = name_arrays(function, [each.array for each in held.values()])
    constants = tuple(
        pack_constant(label, to_physical(each.array, each.value.aval), has_data=has_constants)
        for label, each in zip(labels, held.values(), strict=True)
    )
    lists = [list_embedded(r.checked.graph, r.lowered.definition.inputs) for r, _ in recipes]
    embedded = [*{identify(each): each for arrays in lists for each in arrays}.values()]
    parts = zip(name_arrays(function, embedded), embedded, strict=True)
    entries: list[SavedEntry] = []
    kept: list[LoweredCapture] = []
    for recipe, verification in recipes:
        try:
            entry = _pack_entry(recipe, verification, places)
        except SaveProblem as problem:
            raise make_save_error(name, str(problem), recipe) from None
        # A device that was named and the default one may be the same.
        if all(entry.call != each.call for each in entries):
            entries.append(entry)
            kept.append(recipe)
    saved = SavedFunction(
        name,
        pack_parameters(function),
        pack_own_parameters(function),
        pack_options(options),
        SavedConstants(
            constants,
            tuple(pack_constant(name, unwrap_key(each), has_data=False) for name, each in parts),
            has_constants,
        ),
        tuple(entries),
    )
    return Collected(
        saved,
        tuple(recipe.lowered for recipe in kept),
        tuple(recipe.prepared.signature for recipe in kept),
        kept[0].device.target,
    )


def write_captures(
    path: str | os.PathLike[str], collected: Collected, *, extra: Any = None
) -> None:
    """Writes a captured function to a file, as a whole or not at all.

    Args:
        path: of the file.
        collected: what it is to hold.
        extra: JSON that a kind of function has beside it.

    Raises:
        SavedFileError: a graph cannot be saved, or the file cannot be written.
    """
    origin = describe_origin(collected.target, VERSION)
    try:
        encoded = encode_function(collected.saved, collected.lowered, origin)
    except SaveProblem as problem:
        raise make_save_error(collected.saved.name, str(problem)) from None
    write_file(path, {**encoded.tree, "extra": extra}, encoded.blobs)


def make_save_error(
    name: str, problem: str, recipe: LoweredCapture | None = None, *, fix: str = _FIX
) -> SavedFileError:
    """Returns the error of a function that no file can hold.

    Args:
        name: of the function.
        problem: what is in the way, a clause.
        recipe: of the signature that it is about.
        fix: what to do.
    """
    where = locate_caller()
    if recipe is not None:
        prepared = recipe.prepared
        leaves = [
            f"{name}: {print_leaf_type(leaf.shape, leaf.dtype, leaf.weak_type)}"
            for name, leaf in zip(prepared.names, prepared.signature.leaves, strict=True)
        ]
        where = f"{where}, the signature {', '.join(shorten_list(leaves, 3)) or 'without arrays'}"
    return SavedFileError(
        f"`{name}` cannot be saved: {problem}",
        where=where,
        why="a file holds kernels, types, trees and plain values, and nothing of a process",
        fix=fix,
        anchor=ANCHOR,
    )


def make_empty_error(name: str) -> SavedFileError:
    """Returns the error of a function without graphs."""
    return SavedFileError(
        f"`{name}` has nothing to save: no graph is captured on this device",
        where=locate_caller(),
        why="a file holds graphs, and a graph is made by the first call of its signature",
        fix=f"call `{name}` first with each of the signatures; with warm=False, then call "
        f"`{name}.wait_until_captured()`",
        anchor=ANCHOR,
    )


def _find_recipe(name: str, capture: Capture) -> LoweredCapture:
    """Returns what a graph was made from; raises for what is no graph of one device."""
    if isinstance(capture.graph, JitCall):
        raise make_save_error(name, "it runs as `jax.jit`, which was faster than its graphs")
    if isinstance(capture.graph, SpreadCall | SpreadGraph):
        raise make_save_error(name, "it runs on several devices")
    if capture.recipe is None:
        raise make_save_error(name, "it reads values in Python between its graphs")
    return capture.recipe


def _leave_out(
    function: Callable[..., Any], recipe: LoweredCapture, capture: Capture
) -> tuple[LoweredCapture, VerificationReport | None]:
    """Returns a capture whose program has no array of the user's: Note [Embedded arrays in a file].

    Another program than that of the capture is verified by the first call after loading.
    """
    try:
        lifted = [each.value for each in find_left_out(function, recipe.checked.graph)]
    except SaveProblem as problem:
        name = recipe.prepared.options.name
        raise make_save_error(name, str(problem), recipe, fix=_FIX_ARRAYS) from None
    embedded = find_embedded(recipe.checked.graph)
    if not any(each in embedded for each in lifted):
        return recipe, capture.verification
    lowered = lower_lifted(recipe, lifted, find_tuning(capture.replacements))
    return dataclasses.replace(recipe, lowered=lowered), None


def _pack_entry(recipe: LoweredCapture, verification: Any, places: dict[int, int]) -> SavedEntry:
    inputs = recipe.lowered.definition.inputs
    constants = {f"%{each.name}": each for each in recipe.checked.graph.constants}
    return SavedEntry(
        pack_call(make_call_spec(recipe.prepared)),
        pack_results(make_result_spec(recipe.checked, recipe.prepared.options)),
        tuple(
            (name, places[id(constants[name].array)])
            for name in inputs[len(recipe.prepared.names) :]
        ),
        verification,
        expect_comparison(recipe.checked, recipe.lowered) if verification is None else None,
    )
