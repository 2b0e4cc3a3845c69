"""One more parameter: of the function that is captured in the place of the user's function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def name_parameter(pure: Callable[..., Any], function: Callable[..., Any], name: str) -> None:
    """Gives a function the name and the parameters of another one, and a last one of its own.

    Args:
        pure: that is captured; it takes the parameter by keyword.
        function: that it calls. Without a signature, as some builtins are, it lends its name only.
        name: of the parameter.

    Example:
        >>> def pure(*args, state): ...
        >>> name_parameter(pure, lambda x, **kwargs: x, "state")
        >>> print(inspect.signature(pure))
        (x, *, state, **kwargs)
    """
    functools.update_wrapper(pure, function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return
    extra = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
    is_last = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - is_last, extra)
    vars(pure)["__signature__"] = inspect.Signature(parameters)
