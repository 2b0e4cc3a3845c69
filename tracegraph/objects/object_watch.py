"""ObjectWatch: are these still the objects of the last call, with the structure that they had?

Splitting a model into structure and arrays takes a millisecond. What can change the structure is
held by the attributes of its objects, by dicts and lists among them, and by the metadata of its
variables: while they hold the same things, the structure is the same. Arrays in variables may be
others; they are read at every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tracegraph.replaying.identities import Identities


class ObjectWatch:
    """Remembers the structure of objects and says whether it is unchanged.

    Args:
        nnx: the module `flax.nnx`.
        objects: what is watched; the watch keeps it alive.

    Attributes:
        variables: by the index of the object and the path in it.
    """

    def __init__(self, nnx: Any, objects: Sequence[Any]) -> None:
        self.variables: dict[tuple[Any, ...], Any] = {}
        self._views: list[Iterable[Any]] = []
        for path, node in nnx.iter_graph(list(objects)):
            if isinstance(node, nnx.Variable):
                self.variables[path] = node
            elif nnx.graph.is_graph_node(node) or isinstance(node, nnx.State):
                self._watch(vars(node))
            elif type(node) in (dict, list):
                self._watch(node)
        self._identities = Identities(self._list_items())

    def is_unchanged(self) -> bool:
        """True while all objects hold what they held."""
        return self._identities.are_of(self._list_items())

    def _watch(self, container: dict[Any, Any] | list[Any]) -> None:
        if isinstance(container, dict):
            self._views += (container.keys(), container.values())
        else:
            self._views.append(container)
        for each in container.values() if isinstance(container, dict) else container:
            if type(each) in (dict, list):
                self._watch(each)

    def _list_items(self) -> tuple[Any, ...]:
        items: list[Any] = []
        for view in self._views:
            items += view
        for variable in self.variables.values():
            metadata = variable.get_metadata()
            items += metadata
            items += metadata.values()
        return tuple(items)
