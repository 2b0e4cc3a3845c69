"""The one way to import a module of ours at its first use: what only a GPU needs.

Note [Late imports]. A third of the package serves a GPU: the CUDA device and the reader of XLA's
programs. A process without a GPU never pays for importing it. The statement is at the top of a
module, as any import, so that the import law holds for it; an import inside a function, which
reads the same way to Python, would hide it there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class LateFunction:
    """A function of a module of ours that is imported once, at its first use; see `import_late`."""

    def __init__(self, module: str, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self._module = module
        self._found: Callable[..., Any] | None = None

    def load(self) -> Callable[..., Any]:
        """Imports the module, if that was not done, and returns the function."""
        found = self._found
        if found is None:
            found = self._found = getattr(importlib.import_module(self._module), self.__name__)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.load()(*args, **kwargs)


def import_late(module: str, name: str) -> LateFunction:
    """Returns a function that imports a module of ours, once, when it is called or loaded.

    Args:
        module: dotted name, as users import it.
        name: function of the module; the result calls it.

    Example:
        >>> from tracegraph.runtime.late_import import import_late
        >>> join = import_late("posixpath", "join")
        >>> join("a", "b")
        'a/b'
    """
    return LateFunction(module, name)
