"""The matches of a rule that are exact enough, measured while a candidate with them is lowered."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from tracegraph.capturing.variant import Variant
from tracegraph.ir.origins import locate_origin
from tracegraph.replacements.match import Match
from tracegraph.replacements.place_errors import PlaceError
from tracegraph.replacements.report import Replacement
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import CudaError, OutOfMemoryError, UnsupportedError
from tracegraph.runtime.jax_interop import carry_settings, leave_host, to_plain
from tracegraph.tracing.prepared_call import PreparedCall

NO_MEMORY = "no memory is left to time it"


@dataclasses.dataclass(frozen=True)
class MeasuredMatches:
    """What became of the matches of one rule.

    Attributes:
        exact: those that are exact enough, by number.
        dropped: a report of the others.
    """

    exact: Mapping[int, Match]
    dropped: list[Replacement]


def measure_beside(
    measure: Callable[[], MeasuredMatches], make_candidate: Callable[[], Variant]
) -> tuple[MeasuredMatches, Callable[[], Variant]]:
    """Measures in a thread while the candidate with all matches is lowered.

    What fails beside the other, for want of memory perhaps, is done again by itself.

    Args:
        measure: of all matches.
        make_candidate: lowers the function with all of them.

    Returns:
        What was measured, and what gives the candidate.
    """
    # It keeps a candidate, but no failure: that one is made again where its error is expected.
    give_candidate = functools.cache(make_candidate)
    with ThreadPoolExecutor(1, "tracegraph-places") as threads:
        measuring = threads.submit(carry_settings(measure))
        with contextlib.suppress(UnsupportedError, OutOfMemoryError, jax.errors.JaxRuntimeError):
            give_candidate()
    measured = measuring.result()
    if any(each.dropped == NO_MEMORY for each in measured.dropped):
        measured = measure()
    return measured, give_candidate


def measure_matches(
    prepared: PreparedCall,
    device: Device,
    measure_errors: Callable[[Sequence[Match], Sequence[Any]], Sequence[PlaceError]],
    name: str,
    found: Sequence[Match],
) -> MeasuredMatches:
    """Returns which matches are exact enough on the values of a call.

    Args:
        prepared: the call.
        device: that it is captured for.
        measure_errors: of matches, on arrays of the arguments; see `measure_places`.
        name: of the rule.
        found: the matches.
    """
    arguments = [leave_host(to_plain(leaf)) for leaf in prepared.leaves]
    try:
        with jax.default_device(device.jax_device):
            errors = measure_errors(found, arguments)
    except (UnsupportedError, CudaError) as error:
        return _drop_all(name, found, f"{error.what}; {error.fix}")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _drop_all(name, found, NO_MEMORY)
    exact = {number: found[number] for number, error in enumerate(errors) if error.is_allowed}
    dropped = [
        Replacement(name, (number,), locate_matches([found[number]]), _describe(error))
        for number, error in enumerate(errors)
        if not error.is_allowed
    ]
    return MeasuredMatches(exact, dropped)


def _drop_all(name: str, found: Sequence[Match], why: str) -> MeasuredMatches:
    return MeasuredMatches({}, [Replacement(name, (), locate_matches(found), why)])


def locate_matches(matches: Sequence[Match]) -> tuple[str, ...]:
    """Returns the user's line of each match."""
    return tuple(locate_origin(match.op.origin) for match in matches)


def _describe(error: PlaceError) -> str:
    return f"its error is {error.ours:.2g}, where XLA's is {error.theirs:.2g}"
