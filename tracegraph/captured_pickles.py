"""Pickles of captured functions: by name where a module has them, else the function and options.

Note [Decorated functions]. The name of a decorated function in its module is the captured function,
so a pickle cannot find the plain one by that name and refuses it. The captured function itself is
found by it, as functions are. `cloudpickle` takes functions of ``__main__`` by value, since the
process that loads them has another ``__main__``; a captured one goes the same way.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tracegraph.options import Options, list_keywords
from tracegraph.runtime.streams.handles import make_pickle_error


def list_given(options: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords that a copy is captured with: as they were read, an iterator once.

    Args:
        options: of the capture.
        given: its keywords; a stream that was not given is a new one in each copy.
    """
    return {**list_keywords(options), "stream": given["stream"]}


def reduce_captured(captured: Any, function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Returns what `pickle` stores of a captured function, for its ``__reduce_ex__``.

    Args:
        captured: the captured function.
        function: the user's function.
        given: the keywords of its capture.

    Raises:
        ConfigError: it has no name to be found by, and a pool or a stream of this process.
    """
    name = _find_name(captured)
    if name is not None and not (captured.__module__ == "__main__" and _is_cloudpickle(3)):
        return name
    for keyword in ("pool", "stream"):
        if given[keyword] is not None:
            raise make_pickle_error(f"`{captured.__name__}`, captured with {keyword}=,")
    return copyreg.__newobj__, (type(captured),), (function, given)  # pyright: ignore[reportAttributeAccessIssue]


def _find_name(captured: Any) -> str | None:
    """Returns the name by which its module has it, or None."""
    name = getattr(captured, "__qualname__", "<unknown>")
    found: Any = sys.modules.get(getattr(captured, "__module__", None) or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return name if found is captured else None


def _is_cloudpickle(depth: int) -> bool:
    # Also a copy of it inside another package. A pickler does not say of what kind it is.
    caller = sys._getframe(depth)
    return "cloudpickle" in caller.f_globals.get("__name__", "")
