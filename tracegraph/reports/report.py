"""Report: what `explain` returns, a summary with longer parts on request."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tracegraph.runtime.errors import ConfigError

# In the order in which they are printed.
_PARTS = "signature violations breaks gradients ir passes regions plan nodes notes"
PARTS = tuple(_PARTS.split())
NO_PARTS: Mapping[str, str] = MappingProxyType({})


class Report(str):
    """The report of a captured function: text, at most 40 lines of it before parts are shown.

    It prints as it is, and is searched and split like any text.

    Attributes:
        summary: the first lines alone.
        parts: the long parts by name: ``signature``, ``ir``, ``passes``, ``regions``, ``plan``,
            ``nodes`` and ``notes``; ``signature`` and ``violations`` of what cannot be captured;
            ``signature`` and ``breaks`` of what is captured in parts; ``gradients`` where an eager
            `jax.grad` has differentiated a call.

    Example:
        >>> report = tg.capture(lambda x: x * 2, name="double").explain(jnp.zeros(3))
        >>> print(report.show("nodes").removeprefix(report.summary))
        <BLANKLINE>
        <BLANKLINE>
        nodes
          graph definition `double`: nodes 1, edges 0, arena of 1,024 bytes
            stage 0: graph
              node 0: call region0(x) -> %1
    """

    summary: str
    parts: Mapping[str, str]

    # With one argument as well, so that copies and pickles are made as those of other texts.
    def __new__(cls, text: str, parts: Mapping[str, str] = NO_PARTS) -> Report:
        """Makes a report whose summary is all of its text."""
        report = super().__new__(cls, text)
        report.summary, report.parts = text, dict(parts)
        return report

    def __repr__(self) -> str:
        """The text itself, so that it can be read at a prompt."""
        return str(self)

    @property
    def ir(self) -> str:
        """The traced and optimised graph, one line per op."""
        return self.parts.get("ir", "")

    @property
    def plan(self) -> str:
        """The memory plan: offset, bytes and lifetime of the largest buffers."""
        return self.parts.get("plan", "")

    @property
    def nodes(self) -> str:
        """The nodes of the graph with what they read, write and wait for."""
        return self.parts.get("nodes", "")

    def show(self, parts: str) -> Report:
        """Returns the report with some parts after the summary.

        Args:
            parts: names of parts, separated by commas, or ``all``. Those that this report does not
                have are left out: a function that cannot be captured has no nodes.

        Raises:
            ConfigError: there is no part of this name.
        """
        names = read_parts(parts)
        texts = [_title(name, self.parts[name]) for name in names if name in self.parts]
        report = Report("\n\n".join([self.summary, *texts]), self.parts)
        report.summary = self.summary
        return report


def read_parts(parts: str) -> tuple[str, ...]:
    """Returns the names in a text such as ``ir,plan``, in the order of a report.

    Raises:
        ConfigError: a name is none of a part, or this is not a text.
    """
    words = parts.split(",") if isinstance(parts, str) else [repr(parts)]
    wanted = {word.strip() for word in words} - {""}
    if wanted == {"all"}:
        return PARTS
    if unknown := sorted(wanted.difference(PARTS)):
        raise ConfigError(
            f"a report has no part {', '.join(unknown)}",
            where="explain, `show`",
            why=f"the parts are {', '.join(PARTS)}",
            fix='write their names with commas, as in show="ir,plan", or show="all"',
            anchor="report-part",
        )
    return tuple(name for name in PARTS if name in wanted)


def take_show(function: Callable[..., Any], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the option ``show`` of a call of `explain`, and the keywords of the function.

    What the function itself takes is the function's: then the report has to be asked for its parts.
    """
    if "show" not in kwargs or _takes_show(function):
        return "", kwargs
    rest = {name: value for name, value in kwargs.items() if name != "show"}
    return kwargs["show"], rest


def _takes_show(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        # Callables written in C, which do not say what they take.
        return False
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(
        parameter.kind is parameter.VAR_KEYWORD
        or (parameter.name == "show" and parameter.kind in by_keyword)
        for parameter in parameters.values()
    )


def _title(title: str, text: str) -> str:
    return "\n".join([title, *indent(text.splitlines())])


def indent(lines: Iterable[str]) -> list[str]:
    """Returns lines two columns further to the right."""
    return [f"  {line}" if line else "" for line in lines]
