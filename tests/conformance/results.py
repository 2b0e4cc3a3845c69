"""What became of a case; imports no JAX, so that a process that only counts starts at once."""

from __future__ import annotations

import dataclasses
import enum


class Outcome(enum.Enum):
    """What became of a case; ``docs/conformance.md`` explains each."""

    PASSED = "passed"
    TOLERANCE = "tolerance"
    REFUSED = "refused"
    DIFFERING = "differing"
    ERROR = "error"
    JIT_FAILS = "jit fails"


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one case.

    Attributes:
        group: the primitive.
        name: the case.
        outcome: its class.
        rule: of a refusal, error class and section of ``docs/errors.md``; else empty.
        reason: what was said or what differs; empty when passed.
        has_two_inputs: False when the case has no second input with other values.
    """

    group: str
    name: str
    outcome: Outcome
    rule: str = ""
    reason: str = ""
    has_two_inputs: bool = True
