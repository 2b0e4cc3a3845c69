"""ObjectFunction: a function that takes objects of flax.nnx, as one of their arrays.

The graphs take the state of all objects as a tree of arrays, and return what of it has changed: a
running mean, the count of a random stream. The user's objects are updated after each call, as the
function itself would have updated them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from tracegraph.graphed_callables.callable_errors import make_structure_error
from tracegraph.objects.graph_objects import find_nnx, flatten_to_objects, is_object


@dataclasses.dataclass(frozen=True)
class Hole:
    """What stands for an object among the arguments.

    Attributes:
        index: among the objects of the call.
    """

    index: int


@dataclasses.dataclass(frozen=True)
class ObjectFunctionCall:
    """A call with its objects taken out.

    Attributes:
        objects: the user's, in order.
        structure: of all of them together, which knows what they share.
        state: their arrays.
        rest: the arguments, with holes.
    """

    objects: tuple[Any, ...]
    structure: Any
    state: Any
    rest: Any

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the `ObjectFunction`."""
        return self.state, self.rest, self.structure

    def update(self, changed: dict[int, Any]) -> None:
        """Gives the user's objects the arrays that the function has changed."""
        if not changed:
            return
        leaves, tree = jax.tree.flatten(self.state)
        for index, leaf in changed.items():
            leaves[index] = leaf
        find_nnx().update(self.objects, jax.tree.unflatten(tree, leaves))


class ObjectFunction:
    """A function of arrays that runs one of objects.

    Args:
        function: the user's function.

    Attributes:
        function: the same.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function, updated=())
        # Its own parameters, not those of the function.
        del self.__dict__["__wrapped__"]

    def __call__(self, state: Any, rest: Any, structure: Any) -> tuple[Any, dict[int, Any]]:
        """Returns the function's result, and by their index the arrays of the state it changed."""
        nnx = find_nnx()
        # The merged objects may hold the state's own Variables, and change them.
        before = jax.tree.leaves(state)
        objects = nnx.merge(structure, state)
        args, kwargs = jax.tree.map(
            lambda leaf: objects[leaf.index] if isinstance(leaf, Hole) else leaf, rest
        )
        result = self.function(*args, **kwargs)
        found, after = nnx.split(objects)
        if found != structure:
            raise make_structure_error(self.function)
        pairs = zip(before, jax.tree.leaves(after), strict=True)
        return result, {i: new for i, (old, new) in enumerate(pairs) if new is not old}


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObjectFunctionCall:
    """Returns a call with its objects taken out; those that are shared are split once."""
    nnx = find_nnx()
    flat, tree = flatten_to_objects(nnx, (args, kwargs))
    objects: list[Any] = []
    leaves: list[Any] = []
    for _, leaf in flat:
        if is_object(nnx, leaf):
            leaves.append(Hole(len(objects)))
            objects.append(leaf)
        else:
            leaves.append(leaf)
    structure, state = nnx.split(tuple(objects))
    return ObjectFunctionCall(tuple(objects), structure, state, jax.tree.unflatten(tree, leaves))
