"""The one way to import a module of ours at its first use: what only a GPU needs.

Note [Late imports]. A third of the package serves a GPU: the CUDA device and the reader of XLA's
programs. A process without a GPU never pays for importing it. The statement is at the top of a
module, as any import, so that the import law holds for it; an import inside a function, which
reads the same way to Python, would hide it there.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


def import_late(module: str, name: str) -> Callable[..., Any]:
    """Returns a function that imports a module of ours, once, when it is called.

    Args:
        module: dotted name, as users import it.
        name: function of the module; the result calls it.

    Example:
        >>> from tracegraph.runtime.late_import import import_late
        >>> join = import_late("posixpath", "join")
        >>> join("a", "b")
        'a/b'
    """

    @functools.cache
    def find() -> Callable[..., Any]:
        return getattr(importlib.import_module(module), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return find()(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call
