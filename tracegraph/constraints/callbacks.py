"""The rule `callback`: nothing inside a capture may call back into Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tracegraph.constraints.violation import Violation, locate_op
from tracegraph.ir.graph import Op

_CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "python_callback"})
_PRINTS = frozenset({"debug_print"})
_TRANSFERS = frozenset({"infeed", "outfeed"})
_CHECKS = frozenset({"check"})
_HOST_WORK = _CALLBACKS | _PRINTS | _TRANSFERS | _CHECKS
_WRAPPER_ATTRIBUTES = ("callback_func", "func", "__wrapped__")
_WRAPPING_MODULES = ("jax", "functools")
_DEEPEST_WRAPPER = 6


def find_callback_violation(op: Op, graph_name: str) -> Violation | None:
    """Finds an op that needs the host: a callback, a print, a check or a host transfer.

    Args:
        op: any op.
        graph_name: the captured function's name.

    Returns:
        The violation, or None.
    """
    if op.name not in _HOST_WORK and not callable(op.params.get("callback")):
        return None
    if op.name in _PRINTS:
        return _make_print_violation(op, graph_name)
    if op.name in _CHECKS:
        return _make_check_violation(op, graph_name)
    return _make_callback_violation(op, graph_name)


def has_callback(op: Op) -> bool:
    """True when the op, or an op inside it, needs the host."""
    if find_callback_violation(op, "") is not None:
        return True
    return any(has_callback(inner) for _, graph in op.subgraphs for inner in graph.ops)


def _make_callback_violation(op: Op, graph_name: str) -> Violation:
    name = name_callback(op.params.get("callback"))
    subject = "the host's part" if op.name in _TRANSFERS else "the callback"
    called = subject if name is None else f"{subject} `{name}`"
    return Violation(
        "callback",
        f"`{graph_name}` calls back into Python while it is being captured",
        locate_op(op),
        f"a CUDA graph replays device work only; {called} would never run again",
        'move the callback outside `capture`, or use mode="partial"',
        op,
    )


def _make_print_violation(op: Op, graph_name: str) -> Violation:
    text = str(op.params.get("fmt", ""))
    return Violation(
        "callback",
        f"`{graph_name}` prints a traced value while it is being captured",
        locate_op(op),
        f"printing {text!r} is work of the host; a CUDA graph replays device work only",
        'return the value and print it outside `capture`, or use mode="partial"',
        op,
    )


def _make_check_violation(op: Op, graph_name: str) -> Violation:
    return Violation(
        "callback",
        f"`{graph_name}` checks a traced value on the host while it is being captured",
        locate_op(op),
        "a check raises on the host; a CUDA graph replays device work only",
        "return the error as a value with jax.experimental.checkify.checkify, and throw it outside",
        op,
    )


def name_callback(callback: Any) -> str | None:
    """Returns the name of the user's function inside JAX's wrappers, or None.

    Args:
        callback: the parameter of a callback primitive.

    Returns:
        The innermost part of its qualified name, as ``log_loss`` or ``<lambda>``.
    """
    for function in _unwrap(callback, _DEEPEST_WRAPPER):
        if not str(getattr(function, "__module__", "")).startswith(_WRAPPING_MODULES):
            name = getattr(function, "__qualname__", type(function).__name__)
            return str(name).split(".")[-1]
    return None


def _unwrap(function: Any, depth: int) -> Iterator[Callable[..., Any]]:
    if depth == 0 or not callable(function):
        return
    yield function
    for attribute in _WRAPPER_ATTRIBUTES:
        yield from _unwrap(getattr(function, attribute, None), depth - 1)
    for cell in getattr(function, "__closure__", None) or ():
        yield from _unwrap(_read_cell(cell), depth - 1)


def _read_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None
