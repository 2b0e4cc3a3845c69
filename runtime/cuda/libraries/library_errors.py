"""Errors of NVIDIA's Python bindings become ours, with the call and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tracegraph.runtime.errors import CudaError


def call_library(
    failure: type[Exception],
    call: str,
    place: str,
    function: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """Calls the bindings of a library.

    Args:
        failure: what they raise.
        call: the library's name of the function.
        place: what it is called for.
        function: of the bindings.
        arguments: of the function.

    Raises:
        CudaError: the call failed, or the library could not be loaded.
    """
    try:
        return function(*arguments)
    except (failure, RuntimeError) as error:
        raise CudaError(
            f"{call} failed: {error}",
            where=f"{place}, arguments ({', '.join(map(str, arguments))})",
            why="the library refused the call, or it could not be loaded",
            fix="check the driver and the CUDA wheels; if they are right, report this text",
            anchor="cuda",
        ) from error
