"""CompiledRegion: a region with its executable, and the names of what that reads and defines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tracegraph.lowering.request import Region


@dataclasses.dataclass(frozen=True)
class CompiledRegion:
    """A region as XLA compiled it: its executable is the reference for the graph made from it.

    Attributes:
        name: the region's name.
        executable: a `jax.stages.Compiled`, or the plain function of an eager region; called with
            the values of ``inputs``, returns that of its one output bare, or a tuple.
        inputs: names of what it reads, as the request's regions name them, in its order.
        outputs: names of what it defines, the same way.
        in_place: how many of the first inputs are donated to it; the output at the same place is
            the new value.
        options: XLA's options that it was compiled with, over the defaults.
        float_atomics: instructions whose sums may differ in the last bits from run to run.

    More than six fields because it is all that a graph is checked against.
    """

    name: str
    executable: Callable[..., Any] = dataclasses.field(repr=False)
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_place: int = 0
    options: tuple[tuple[str, bool | str], ...] = ()
    float_atomics: tuple[str, ...] = ()


def record_region(
    region: Region,
    executable: Callable[..., Any],
    in_place: int = 0,
    options: tuple[tuple[str, bool | str], ...] = (),
) -> CompiledRegion:
    """Returns the record of a region that was compiled, with the names that its specs give.

    Args:
        region: as it was compiled.
        executable: what it became.
        in_place: how many of its first inputs are donated.
        options: XLA's options, over its defaults.
    """
    inputs = tuple(spec.name for spec in region.inputs)
    outputs = tuple(spec.name for spec in region.outputs)
    return CompiledRegion(region.name, executable, inputs, outputs, in_place, options)
