"""The sections of ``docs/errors.md``, which is inside the package for users."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import re
from importlib.resources.abc import Traversable

from tracegraph.runtime.errors import ConfigError

# In a checkout the folder `docs/` is found through the package's path, as `lowering/` is.
_FOLDER = "tracegraph.docs"
_PAGE = "errors.md"
_HEAD = re.compile(r"^## (.+)$", re.MULTILINE)
_SENTENCE = re.compile(r".*?[.:](?=\s|$)", re.DOTALL)


@functools.cache
def read_sections() -> dict[str, str]:
    """Returns the text of each section of the page by its name, in the page's order."""
    parts = _HEAD.split(_find_page().read_text(encoding="utf-8"))
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def list_errors() -> str:
    """Returns one line for each error: its name, and the first sentence of its section."""
    sections = read_sections()
    width = max(map(len, sections))
    return "\n".join(
        f"{name:{width}}  {_find_first_sentence(text)}" for name, text in sections.items()
    )


def describe_error(name: str) -> str:
    """Returns the section of an error: what it means, a failing and a repaired example.

    Args:
        name: as the last line of the error's message has it.

    Raises:
        ConfigError: there is no such section.
    """
    sections = read_sections()
    if name not in sections:
        raise _make_unknown_error(name, list(sections))
    return f"{name}\n\n{sections[name]}\n\nPage: {_find_page()}"


def _find_page() -> Traversable:
    return importlib.resources.files(_FOLDER) / _PAGE


def _find_first_sentence(text: str) -> str:
    found = _SENTENCE.match(text)
    return " ".join((found.group() if found else text).split()).rstrip(".:")


def _make_unknown_error(name: str, names: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, names)
    return ConfigError(
        f"there is no error `{name}`",
        where="command line, error NAME",
        why=f"near names are {', '.join(near)}" if near else "no name is near it",
        fix="python -m tracegraph error, which lists all names",
        anchor="command-line",
    )
