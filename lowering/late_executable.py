"""Executables that are compiled when they are asked for: a graph that was read has kernels only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax

from tracegraph.lowering.compiled_region import CompiledRegion


class LateRegions:
    """The executables of a graph's regions, compiled together at first use.

    Args:
        compile_regions: compiles them.
    """

    def __init__(self, compile_regions: Callable[[], tuple[CompiledRegion, ...]]) -> None:
        self._compile_regions = compile_regions
        self._regions: tuple[CompiledRegion, ...] | None = None
        self._lock = threading.Lock()

    def find(self, index: int) -> Callable[..., Any]:
        """Returns the executable of one region.

        Args:
            index: of the region.
        """
        with self._lock:
            if self._regions is None:
                self._regions = self._compile_regions()
            return self._regions[index].executable


class LateExecutable:
    """Stands for the executable of one region.

    Args:
        regions: of the same graph.
        index: of the region.
    """

    def __init__(self, regions: LateRegions, index: int) -> None:
        self._regions, self._index = regions, index

    def __call__(self, *arrays: Any) -> Any:
        """Runs what it stands for."""
        return self.find()(*arrays)

    def find(self) -> Callable[..., Any]:
        """Returns what it stands for; the first call compiles it."""
        return self._regions.find(self._index)


def find_compiled(executable: Any) -> jax.stages.Compiled | None:
    """Returns the compiled function of a region, or None for one that runs as Python.

    Args:
        executable: of a region.
    """
    found = executable.find() if isinstance(executable, LateExecutable) else executable
    return found if isinstance(found, jax.stages.Compiled) else None
