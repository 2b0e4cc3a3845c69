"""How far a replacement is from what it replaces, measured on the values at its place.

Note [Errors in place]
The results of a whole train step are no measure: an optimizer that divides a gradient by its own
size turns the last bit of one that is nearly zero into a step in the other direction. So each
replacement is measured where it stands: XLA computes the function up to it, there both sides and a
reference that adds up in a wider type, and what is compared is how far either is from that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegraph.ir.graph import Graph, Literal, Operand
from tracegraph.jax_internals import bind_op
from tracegraph.replacements.match import Match


@dataclasses.dataclass(frozen=True)
class PlaceError:
    """The largest differences from the reference at one place, and what is allowed.

    Attributes:
        ours: of the replacement; infinite where only one side is finite.
        theirs: of XLA.
        rounding: half a unit in the last place of the largest result; of a sum in float32 times
            the root of the number of its terms, which is what rounding each of them comes to.
    """

    ours: float
    theirs: float
    rounding: float

    @property
    def is_allowed(self) -> bool:
        """True where the replacement is as right as XLA, or as its type can be."""
        return self.ours <= max(self.theirs, self.rounding)


def measure_options(
    graph: Graph,
    matches: Sequence[Match],
    arguments: Sequence[Any],
    options: Mapping[str, bool | str],
) -> list[PlaceError]:
    """Returns the errors of ops that stay, where XLA compiles with other options.

    Args:
        graph: that the matches were found in.
        matches: of it; what they compute is not looked at.
        arguments: one array per input; they are not changed.
        options: XLA's, over its defaults.
    """
    usual = measure_places(graph, matches, arguments)
    other = measure_places(graph, matches, arguments, options)
    return [
        dataclasses.replace(theirs, ours=ours.theirs)
        for theirs, ours in zip(usual, other, strict=True)
    ]


def measure_places(
    graph: Graph,
    matches: Sequence[Match],
    arguments: Sequence[Any],
    options: Mapping[str, bool | str] | None = None,
) -> list[PlaceError]:
    """Returns the errors of matches on the values of one call.

    Args:
        graph: that the matches were found in.
        matches: of it.
        arguments: one array per input; they are not changed.
        options: XLA's, over its defaults.
    """
    places = {id(match.op): match for match in matches}
    wanted = [id(op) for op in graph.ops if id(op) in places]

    def run(inputs: Sequence[Any], constants: Sequence[Any]) -> list[Any]:
        known = dict(zip(graph.inputs, inputs, strict=True))
        values = [constant.value for constant in graph.constants]
        known |= dict(zip(values, constants, strict=True))

        def read(operand: Operand) -> Any:
            return operand.value if isinstance(operand, Literal) else known[operand]

        found: dict[int, Any] = {}
        for op in graph.ops:
            theirs = bind_op(op, [read(operand) for operand in op.operands])
            known.update(zip(op.results, theirs, strict=True))
            if (match := places.get(id(op))) is not None:
                found[id(op)] = _compare(match, read)
            if len(found) == len(places):
                break
        return [found[key] for key in wanted]

    arrays = [constant.array for constant in graph.constants]
    compiled = jax.jit(run, compiler_options=dict(options or {}))
    rows = jax.device_get(compiled(list(arguments), arrays))
    errors = dict(zip(wanted, (PlaceError(*map(float, row)) for row in rows), strict=True))
    return [errors[id(match.op)] for match in matches]


def _compare(match: Match, read: Callable[[Operand], Any]) -> Any:
    """Returns the three numbers of a `PlaceError`."""
    given = [jnp.asarray(read(each), each.aval.dtype) for each in match.inputs]
    sides = match.compute(*given), [read(each) for each in match.results], match.reference(*given)
    rows = [
        jnp.stack(
            [_differ(one, right), _differ(other, right), _round(right, other.dtype, match.terms)]
        )
        for one, other, right in zip(*sides, strict=True)
        if right.size and jnp.issubdtype(right.dtype, jnp.floating)
    ]
    return jnp.max(jnp.stack(rows), axis=0) if rows else jnp.zeros(3, jnp.float32)


def _differ(one: Any, right: Any) -> Any:
    """Returns the largest difference; infinite where only one side is an infinity or a NaN."""
    is_finite = jnp.isfinite(right)
    one = one.astype(right.dtype)
    rest = [jnp.where(is_finite, 0, each) for each in (one, right)]
    distance = jnp.max(jnp.where(is_finite, jnp.abs(one - right), 0)).astype(jnp.float32)
    is_alike = jnp.array_equal(*rest, equal_nan=True) & ~jnp.isnan(distance)
    return jnp.where(is_alike, distance, jnp.inf)


def _round(right: Any, dtype: Any, terms: int) -> Any:
    """Returns what rounding makes of the largest result: see `PlaceError.rounding`."""
    largest = jnp.max(jnp.where(jnp.isfinite(right), jnp.abs(right), 0))
    # Partial sums are float32, and so is the reference: theirs are no better than that.
    units = math.sqrt(terms) if jnp.finfo(dtype).bits >= 32 else 1.0
    return largest.astype(jnp.float32) * float(jnp.finfo(dtype).eps) / 2 * units
