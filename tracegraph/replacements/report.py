"""Replacement: what became of the matches of one rule in one capture."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Replacement:
    """Matches of one rule, and whether they were replaced.

    Attributes:
        rule: its name.
        matches: which of its matches, by their numbers.
        places: the user's line of each.
        dropped: why they were not replaced; an empty text where they were.
        before_us: a replay without them, in microseconds; None where nothing was timed.
        after_us: a replay with them.
    """

    rule: str
    matches: tuple[int, ...]
    places: tuple[str, ...]
    dropped: str = ""
    before_us: float | None = None
    after_us: float | None = None

    @property
    def is_used(self) -> bool:
        """True where the graph has the replacement."""
        return not self.dropped

    def __str__(self) -> str:
        first, *others = self.places
        more = f" and {len(others)} more" if others else ""
        verdict = "used" if self.is_used else f"not used: {self.dropped}"
        times = ""
        if self.before_us is not None and self.after_us is not None:
            times = f"; {self.before_us:.0f} µs without, {self.after_us:.0f} µs with"
        # A long place may be cut off.
        return f"{self.rule}: {verdict}{times} ({first}{more})"
