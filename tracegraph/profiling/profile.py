"""Profile: a captured graph, measured; prints as a report."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable

from tracegraph.profiling.graph_times import GraphTimes
from tracegraph.profiling.picture import draw_html, draw_picture
from tracegraph.profiling.profile_text import write_text
from tracegraph.runtime.errors import ConfigError


class Profile(GraphTimes):
    """The times of a captured graph; prints as a report by the user's lines.

    `GraphedFunction.profile` makes it; its fields are those of `GraphTimes`.
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture, or all of it as JSON.

        The picture has the time from left to right and a lane for each node that may run beside
        others; the critical path is red. It needs no other file and no program but a browser.

        Args:
            path: ends in ``.svg``, ``.html`` or ``.json``; a file of this name is replaced.

        Raises:
            ConfigError: the path ends in something else.
        """
        writers: dict[str, Callable[[], str]] = {
            ".svg": lambda: draw_picture(self),
            ".html": lambda: draw_html(self),
            ".json": lambda: json.dumps(self.to_dict(), indent=1) + "\n",
        }
        target = pathlib.Path(path)
        write = writers.get(target.suffix.lower())
        if write is None:
            raise ConfigError(
                f"`path` is {os.fspath(path)!r}",
                where="argument `path` of Profile.save",
                why="the end of the name says what is written",
                fix='pass a name like "profile.html", "profile.svg" or "profile.json"',
                anchor="config",
            )
        target.write_text(write(), encoding="utf-8")

    def __str__(self) -> str:
        return write_text(self)
