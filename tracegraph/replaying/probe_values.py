"""ProbeValues: what the probes of a graph showed in its last replay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from tracegraph.probing.collect_probes import ProbeSpec
from tracegraph.tracing.static_leaves import wrap_static_leaves

# Orders the replays of all graphs, so that the last one of a function is found.
_turns = itertools.count(1)


class ProbeValues:
    """The values of the probes of one graph.

    Args:
        specs: of the probes, in the order of their values.

    Attributes:
        turn: number of the last replay among all graphs; 0 before the first.
        latest: the values of that replay, by name.
    """

    __slots__ = ("_specs", "latest", "turn")

    def __init__(self, specs: Sequence[ProbeSpec]) -> None:
        self._specs = specs
        self.turn = 0
        self.latest: dict[str, Any] = {}

    def show(self, parts: Iterable[ProbeValues]) -> None:
        """Shows what the probes of several graphs have shown, which one call has replayed."""
        self.latest = {name: value for each in parts for name, value in each.latest.items()}
        self.turn = next(_turns)

    def take(self, build: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that builds results with probes, keeps these and returns the others.

        Args:
            build: returns a pair: the results, and a tuple with one value per probe.
        """

        def build_and_keep() -> Any:
            results, values = build()
            self._keep(values)
            return results

        return build_and_keep

    def keep_leaves(self, leaves: Sequence[Any]) -> None:
        """Keeps the values of a replay that are given as flat results."""
        rest = iter(leaves)
        values = [
            each.tree.unflatten([next(rest) for _ in range(each.tree.num_leaves)])
            for each in self._specs
        ]
        self._keep(values)

    def _keep(self, values: Sequence[Any]) -> None:
        names = [each.name for each in self._specs]
        self.latest = dict(zip(names, values, strict=True))
        self.turn = next(_turns)


def join_trees(tree: Any, specs: Sequence[ProbeSpec]) -> Any:
    """Returns the structure of the pair that `ProbeValues.take` expects."""
    values = [_number(each.tree) for each in specs]
    return jax.tree_util.tree_structure((wrap_static_leaves(_number(tree)), tuple(values)))


def _number(tree: Any) -> Any:
    return jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
