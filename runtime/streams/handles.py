"""Handles: objects that stand for something of this process, which no copy can double."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from tracegraph.runtime.errors import ConfigError


def make_pickle_error(what: str) -> ConfigError:
    """Returns the error for what cannot leave its process.

    Args:
        what: names it, as ``a Stream``.
    """
    return ConfigError(
        f"{what} cannot be pickled",
        where="pickle",
        why="streams, events and pools belong to the process that made them",
        fix="pickle what it was made for without it, and make a new one where that is loaded",
        anchor="pickle",
    )


class Handle:
    """A stream, an event or a pool: a copy is the same object, and a pickle is refused.

    Example:
        >>> import copy
        >>> side = tg.Stream()
        >>> copy.deepcopy({"side": side})["side"] is side
        True
    """

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        _raise_pickle_error(f"a {type(self).__name__}")


def _raise_pickle_error(what: str) -> NoReturn:
    raise make_pickle_error(what)
