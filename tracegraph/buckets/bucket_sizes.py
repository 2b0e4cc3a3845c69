"""BucketSizes: the option `buckets` of `capture`, checked against the function."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tracegraph.buckets.errors import make_option_error

# Of one axis: its buckets, or a name with them.
AxisBuckets: TypeAlias = Sequence[int] | Mapping[str, Sequence[int]]
# The option: {argument: {axis: buckets}}.
Buckets: TypeAlias = Mapping[Any, Mapping[int, AxisBuckets]]


@dataclasses.dataclass(frozen=True)
class BucketedAxis:
    """One axis of one argument.

    Attributes:
        argument: a parameter's name, or a position where there is none.
        axis: of each array of the argument.
        size: name of the size that it has.
    """

    argument: str | int
    axis: int
    size: str

    def __str__(self) -> str:
        return f"axis {self.axis} of `{self.argument}`"


@dataclasses.dataclass(frozen=True)
class BucketSizes:
    """The bucketed axes of a function, and the buckets of each size.

    Note [Sizes]. Axes with the same tuple of buckets are one size: they have the same extent in
    every call, and are padded together. A name keeps two apart, as {0: {"rows": (1, 2, 4)}}; axes
    with the same name are one size.

    Attributes:
        axes: all bucketed axes.
        buckets: of each size by its name, ascending.
        positions: the function's positional parameters, in order.
    """

    axes: tuple[BucketedAxis, ...]
    buckets: Mapping[str, tuple[int, ...]]
    positions: tuple[str, ...]

    def list_combinations(self) -> list[dict[str, int]]:
        """Returns a bucket of each size, in every combination, the largest first.

        Example:
            >>> sizes = read_buckets(lambda x: x, {"x": {0: (1, 2), 1: (8,)}})
            >>> [tuple(each.values()) for each in sizes.list_combinations()]
            [(2, 8), (1, 8)]
        """
        descending = [reversed(each) for each in self.buckets.values()]
        return [
            dict(zip(self.buckets, each, strict=True)) for each in itertools.product(*descending)
        ]

    def find_axes(self, argument: str | int) -> dict[int, str]:
        """Returns the bucketed axes of an argument, each with its size."""
        return {each.axis: each.size for each in self.axes if each.argument == argument}

    def name_position(self, position: int) -> str | int:
        """Returns what an argument is called that is given by position."""
        return self.positions[position] if position < len(self.positions) else position


def read_buckets(function: Callable[..., Any], given: Any) -> BucketSizes:
    """Reads the option `buckets`.

    Args:
        function: what is captured.
        given: ``{argument: {axis: (1, 2, 4)}}``.

    Raises:
        ConfigError: it has another form, or names what the function does not have.
    """
    if not isinstance(given, Mapping) or not given:
        raise make_option_error(
            function, f"buckets={given!r} is not a mapping", "it maps arguments to axes"
        )
    positions, names = _read_parameters(function)
    axes: list[BucketedAxis] = []
    buckets: dict[str, tuple[int, ...]] = {}
    unnamed: dict[tuple[int, ...], str] = {}
    for key, entries in given.items():
        argument = _find_argument(function, key, positions, names)
        if not isinstance(entries, Mapping) or not entries:
            raise make_option_error(
                function, f"buckets[{key!r}] is {entries!r}", "it maps axes to sizes"
            )
        for axis, value in entries.items():
            if not isinstance(axis, int) or isinstance(axis, bool) or axis < 0:
                raise make_option_error(
                    function, f"buckets[{key!r}] has the axis {axis!r}", "axes count from 0"
                )
            name, sizes = _read_size(function, key, axis, value)
            if name is None:
                name = unnamed.setdefault(sizes, f"axis {axis} of `{argument}`")
            if buckets.setdefault(name, sizes) != sizes:
                raise make_option_error(
                    function, f"the size {name!r} has two tuples of buckets", "a name is one size"
                )
            axes.append(BucketedAxis(argument, axis, name))
    if len({(each.argument, each.axis) for each in axes}) < len(axes):
        raise make_option_error(function, "an axis is named twice", "an axis has one size")
    return BucketSizes(tuple(axes), buckets, positions)


def _read_parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], set[str] | None]:
    """Returns the positional parameters, and the names of all; None where any name is taken."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return (), None
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return tuple(positional), None
    return tuple(positional), {p.name for p in parameters}


def _find_argument(
    function: Callable[..., Any], key: Any, positions: tuple[str, ...], names: set[str] | None
) -> str | int:
    if isinstance(key, int) and not isinstance(key, bool) and key >= 0:
        if key < len(positions):
            return positions[key]
        if names is None:
            return key
    if isinstance(key, str) and (names is None or key in names):
        return key
    known = ", ".join(sorted(names or positions)) or "none"
    raise make_option_error(
        function, f"buckets names the argument {key!r}", f"the arguments are {known}"
    )


def _read_size(
    function: Callable[..., Any], key: Any, axis: int, value: Any
) -> tuple[str | None, tuple[int, ...]]:
    name = None
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, value),) = value.items()
    is_list = isinstance(value, tuple | list | range) and len(value) > 0
    sizes = tuple(value) if is_list else ()
    is_number = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes)
    if not sizes or not is_number or list(sizes) != sorted(set(sizes)):
        raise make_option_error(
            function,
            f"buckets[{key!r}][{axis}] is {value!r}",
            "buckets are whole numbers from 1 on, each larger than the one before",
        )
    return name, sizes
