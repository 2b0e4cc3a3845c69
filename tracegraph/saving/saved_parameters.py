"""The parameters of a captured function, and a function that has the same and computes nothing."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tracegraph.lowering.saved_lowering import SaveProblem
from tracegraph.options import Options
from tracegraph.reports.differences import print_value
from tracegraph.runtime.saving.record_codec import ContentProblem
from tracegraph.runtime.streams.stream import Stream
from tracegraph.saving.plain_values import Names, pack_static, unpack_value
from tracegraph.tracing.spellings import read_own_parameters

_Kind = inspect.Parameter
_KINDS = {
    kind.name: kind
    for kind in (
        _Kind.POSITIONAL_ONLY,
        _Kind.POSITIONAL_OR_KEYWORD,
        _Kind.VAR_POSITIONAL,
        _Kind.KEYWORD_ONLY,
        _Kind.VAR_KEYWORD,
    )
}


@dataclasses.dataclass(frozen=True)
class SavedParameter:
    """One parameter.

    Attributes:
        name: as the function has it.
        kind: Python's word for how it is given.
        has_default: True if it can be left out.
        default: packed; None where it is not known.
        text: the default as it is printed; empty where it is known.
    """

    name: str
    kind: str
    has_default: bool
    default: Any = None
    text: str = ""


@dataclasses.dataclass(frozen=True)
class SavedOptions:
    """The options of `capture` that a call needs.

    Attributes:
        static_argnums: positions of static arguments.
        static_argnames: names of them.
        donate_argnums: positions of donated arguments.
        donate_argnames: names of them.
        static_leaves: what becomes of leaves that are no arrays.
    """

    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]
    static_leaves: str


class UnknownDefault:
    """Stands for a default that no file holds; no argument is equal to it.

    Args:
        text: as the default is printed.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def pack_parameters(function: Callable[..., Any]) -> tuple[SavedParameter, ...]:
    """Returns the parameters that a call of a function is checked against."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        # Some callables written in C have none: they take whatever comes.
        parameters = inspect.signature(_take_all).parameters.values()
    return tuple(map(_pack, parameters))


def pack_own_parameters(function: Callable[..., Any]) -> tuple[SavedParameter, ...]:
    """Returns the parameters of a function itself, not of one that it wraps."""
    return tuple(map(_pack, read_own_parameters(function)))


def unpack_parameters(
    saved: Sequence[SavedParameter], names: Names
) -> tuple[inspect.Parameter, ...]:
    """Returns the parameters of a function.

    Raises:
        ContentProblem: no function has such parameters.
        UnknownNameError: a default names what this process does not have.
    """
    try:
        parameters = [_unpack(each, names) for each in saved]
        return tuple(inspect.Signature(parameters).parameters.values())
    except (ValueError, TypeError) as error:
        raise ContentProblem("the parameters", str(error)) from None


def make_stand_in(name: str, parameters: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    """Returns a function with these parameters, for what looks at parameters only.

    Args:
        name: of the captured function.
        parameters: of it.
    """

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{name} has no source, and is called with {args}, {kwargs}")

    stand_in.__name__ = stand_in.__qualname__ = name
    vars(stand_in)["__signature__"] = inspect.Signature(parameters)
    return stand_in


def pack_options(options: Options) -> SavedOptions:
    """Returns the options that a call needs."""
    return SavedOptions(
        tuple(sorted(options.static_argnums)),
        tuple(sorted(options.static_argnames)),
        tuple(sorted(options.donate_argnums)),
        tuple(sorted(options.donate_argnames)),
        options.static_leaves,
    )


def unpack_options(saved: SavedOptions, name: str, outputs: str) -> Options:
    """Returns the options of a loaded function.

    Args:
        saved: as they came from a file.
        name: of the function.
        outputs: how long results live.
    """
    return Options(
        frozenset(saved.static_argnums),
        frozenset(saved.static_argnames),
        frozenset(saved.donate_argnums),
        frozenset(saved.donate_argnames),
        mode="whole",
        outputs=outputs,
        pool=None,
        stream=Stream(),
        verify=False,
        name=name,
        static_leaves=saved.static_leaves,
        control_flow="allow",
        prefer="graph",
        numerics="xla",
        debug_nans=False,
        warm=True,
    )


def _take_all(*args: Any, **kwargs: Any) -> None:
    """Has the parameters of a function that is known by none."""


def _pack(parameter: inspect.Parameter) -> SavedParameter:
    name, kind = parameter.name, parameter.kind.name
    if parameter.default is parameter.empty:
        return SavedParameter(name, kind, has_default=False)
    try:
        return SavedParameter(name, kind, True, pack_static(parameter.default))
    except SaveProblem:
        return SavedParameter(name, kind, True, None, print_value(parameter.default))


def _unpack(saved: SavedParameter, names: Names) -> inspect.Parameter:
    if saved.kind not in _KINDS:
        raise ContentProblem("the parameters", f"none is {saved.kind[:80]!r}")
    default: Any = inspect.Parameter.empty
    if saved.has_default:
        known = unpack_value(saved.default, names)
        default = UnknownDefault(saved.text) if saved.text else known
    return inspect.Parameter(saved.name, _KINDS[saved.kind], default=default)
