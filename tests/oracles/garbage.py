"""What only the garbage collector would free: objects of ours in cycles of references."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from typing import Any


def find_garbage(action: Callable[[], Any]) -> list[str]:
    """Returns the objects of the package that an action leaves to the collector.

    Args:
        action: makes objects and drops them; what it returns is dropped too.

    Returns:
        One line per object: its type, or the name of a function. Empty when everything went with
        its last name.
    """
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        action()
        gc.collect()
        return sorted({_describe(each) for each in gc.garbage if _is_ours(each)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _is_ours(found: Any) -> bool:
    owner = found if isinstance(found, types.FunctionType) else type(found)
    if isinstance(found, types.MethodType):
        owner = type(found.__self__)
    return str(owner.__module__).startswith("tracegraph.")


def _describe(found: Any) -> str:
    if isinstance(found, types.FunctionType | types.MethodType):
        return f"{found.__module__}.{found.__qualname__}"
    return f"{type(found).__module__}.{type(found).__qualname__}"
