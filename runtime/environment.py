"""Environment variables: read here and nowhere else, typed, with their allowed values.

| Variable | Values (default first) | Meaning |
|---|---|---|
| ``TRACEGRAPH_CHECK_REPLAY`` | 0, 1 | host device: poison dead memory, vary the order of streams |
| ``TRACEGRAPH_PROGRESS`` | auto, 0, 1 | progress line of captures that take over a second |
"""

from __future__ import annotations

import os

from tracegraph.runtime.errors import ConfigError


def read_check_replay() -> bool:
    """Returns True when replays on the host device run in checking mode."""
    return _read_choice("TRACEGRAPH_CHECK_REPLAY", ("0", "1")) == "1"


def read_progress() -> str:
    """Returns when the progress line of a capture is shown: ``auto``, ``0`` or ``1``."""
    return _read_choice("TRACEGRAPH_PROGRESS", ("auto", "0", "1"))


def _read_choice(name: str, choices: tuple[str, ...]) -> str:
    """Returns the variable's value, or the first choice when it is not set."""
    value = os.environ.get(name, choices[0])
    if value in choices:
        return value
    raise ConfigError(
        f"environment variable {name} has the value {value!r}",
        where=f"{name} in the environment of this process",
        why=f"the allowed values are {', '.join(choices)}",
        fix=f"export {name}={choices[-1]}, or unset it",
        anchor="config",
    )
