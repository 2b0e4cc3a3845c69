"""ObjectCalls: calls of a captured function with objects of flax.nnx.

Note [Objects]. The function that is captured takes the arrays of all objects as one donated dict,
and the other arguments with an `ObjectPlaceholder` where an object is. So the state is resident,
and the structure of the objects belongs to the signature. After a call the user's objects hold the
new arrays. As under `nnx.jit`, an object that is passed twice is one object inside; calls that
share objects in another way have another structure, and a graph of their own. A function that
leaves the structure as it is has its state updated in place. One that changes it, by a new Variable
or another attribute, returns all state with the new structure, and nnx changes the user's objects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from tracegraph.extra_parameter import name_parameter
from tracegraph.objects.graph_objects import (
    find_nnx,
    find_structure,
    flatten_to_objects,
    is_object,
    is_split,
    merge_objects,
    run_on_copies,
    split_objects,
)
from tracegraph.objects.object_watch import ObjectWatch
from tracegraph.objects.state_holder import StateHolder
from tracegraph.options import Options, list_keywords
from tracegraph.tracing.signature import name_positions

STATE = "nnx_state"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ObjectPlaceholder:
    """What stands for an object among the arguments.

    Attributes:
        structure: of the split object.
        names: of its arrays in the state.
    """

    structure: Any
    names: tuple[str, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call does to its objects.

    Attributes:
        structure: of the split objects afterwards, if it is as before; None if it is another.
        has_objects: True when the results hold objects.
    """

    structure: Any
    has_objects: bool


class SplitCall(NamedTuple):
    """A call with its objects taken out.

    Attributes:
        args: positional arguments, with places for objects.
        kwargs: keyword arguments, with places for objects.
        objects: the user's objects, by their index among the leaves of the call.
        places: what stands for them, by the same indices.
        state: their arrays, by name.
        paths: of each array: the number of the object, and the path in it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    objects: dict[int, Any]
    places: dict[int, ObjectPlaceholder]
    state: dict[str, Any]
    paths: dict[str, tuple[Any, ...]]


class Repeat(NamedTuple):
    """The last call, to be repeated on the same objects.

    Attributes:
        structure: of the call.
        call: with its objects taken out.
        watch: of the objects.
        variables: one per array of the state, in its order.
        state: what the call returned.
        outcome: the same.
    """

    structure: Any
    call: SplitCall
    watch: ObjectWatch
    variables: Sequence[Any]
    state: dict[str, Any]
    outcome: Outcome


class ObjectCalls:
    """Calls of one captured function that have objects among their arguments.

    Args:
        function: the user's function.
        options: how it is captured.
        capture: from a function and the keywords of `capture` to a captured function.

    Attributes:
        captured: the captured function of arrays, see Note [Objects].
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Options,
        capture: Callable[[Callable[..., Any], dict[str, Any]], Any],
    ) -> None:
        self._function = function
        given = list_keywords(options) | {"donate_argnames": options.donate_argnames | {STATE}}
        self.captured = capture(_make_pure(function), given)
        self._state = StateHolder()
        self._repeat: Repeat | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the captured function and updates the user's objects."""
        nnx = find_nnx()
        flat, structure = flatten_to_objects(nnx, (list(args), kwargs))
        leaves = [leaf for _, leaf in flat]
        repeat = self._repeat
        if repeat is not None and _is_repeated(nnx, repeat, leaves, structure):
            return self._call_again(nnx, repeat, leaves)
        self._repeat = None
        with nnx.update_context(self):
            call = self.split(args, kwargs, tag=self)
            returned = self._run(call.args, call.kwargs, self._state.take(call.state))
            result = self._merge(nnx, call, returned)
        state, outcome, _ = returned
        if outcome.structure is not None:
            self._remember(nnx, structure, call, state, outcome)
        del call
        self._state.hold(state)
        return result

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, tag: Any = None) -> SplitCall:
        """Takes the objects out of a call.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            tag: of the update that the call is part of; None where nothing is called.
        """
        nnx = find_nnx()
        flat, structure = flatten_to_objects(nnx, (list(args), kwargs))
        leaves = [leaf for _, leaf in flat]
        objects = {index: leaf for index, leaf in enumerate(leaves) if is_object(nnx, leaf)}
        split = split_objects(nnx, list(objects.values()), tag)
        names = name_positions(self._function, len(args))
        places: dict[int, ObjectPlaceholder] = {}
        state: dict[str, Any] = {}
        paths: dict[str, tuple[Any, ...]] = {}
        for number, (index, each) in enumerate(zip(objects, split, strict=True)):
            label = _name_leaf(names, flat[index][0])
            arrays, inner = jax.tree_util.tree_flatten_with_path(each)
            keys = [_read_keys(path) for path, _ in arrays]
            own = [".".join(map(str, (label, *each))) for each in keys]
            state.update(zip(own, (array for _, array in arrays), strict=True))
            paths.update(zip(own, ((number, *each) for each in keys), strict=True))
            leaves[index] = places[index] = ObjectPlaceholder(inner, tuple(own))
        new_args, new_kwargs = structure.unflatten(leaves)
        return SplitCall(tuple(new_args), new_kwargs, objects, places, state, paths)

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any], state: dict[str, Any]) -> Any:
        """Calls the captured function; returns new state, outcome and results."""
        return self.captured(*args, **kwargs, **{STATE: state})

    def _merge(self, nnx: Any, call: SplitCall, returned: Any) -> Any:
        """Updates the user's objects, split in this update; returns the user's result."""
        state, outcome, results = returned
        if outcome.structure is None:
            after, results = results
        else:
            after = outcome.structure.unflatten([state[name] for name in call.paths])
        return merge_objects(nnx, (after, results), self, is_inner=False)[1]

    def _remember(
        self, nnx: Any, structure: Any, call: SplitCall, state: dict[str, Any], outcome: Outcome
    ) -> None:
        """Remembers a call that left the structure as it was, if variables hold all its arrays."""
        watch = ObjectWatch(nnx, list(call.objects.values()))
        variables = [watch.variables.get(call.paths[name]) for name in state]
        if all(
            variable is not None and variable.get_raw_value() is array
            for variable, array in zip(variables, state.values(), strict=True)
        ):
            # The arrays that were given up are not kept.
            call = call._replace(state={})
            self._repeat = Repeat(structure, call, watch, variables, state, outcome)

    def _call_again(self, nnx: Any, repeat: Repeat, leaves: list[Any]) -> Any:
        """Calls with the same objects, whose structure is known, and perhaps other arrays."""
        self._repeat = None
        state = self._state.take_again(repeat.state, repeat.variables)
        for index, place in repeat.call.places.items():
            leaves[index] = place
        args, kwargs = repeat.structure.unflatten(leaves)
        returned = self._run(args, kwargs, state)
        del state
        new_state, outcome, result = returned
        if outcome != repeat.outcome or outcome.has_objects:
            with nnx.update_context(self):
                split_objects(nnx, list(repeat.call.objects.values()), self)
                result = self._merge(nnx, repeat.call, returned)
        else:
            _write_back(repeat.variables, new_state)
        if outcome == repeat.outcome:
            self._repeat = repeat._replace(state=new_state)
        self._state.hold(new_state)
        return result


def _write_back(variables: Sequence[Any], state: dict[str, Any]) -> None:
    # A function of its own: its names must not count as references, see `StateHolder`.
    for variable, array in zip(variables, state.values(), strict=True):
        if variable.get_raw_value() is not array:
            variable.set_raw_value(array)


def _is_repeated(nnx: Any, repeat: Repeat, leaves: list[Any], structure: Any) -> bool:
    objects = repeat.call.objects
    return (
        structure == repeat.structure
        and all(leaves[index] is value for index, value in objects.items())
        and not any(
            is_object(nnx, leaf) for index, leaf in enumerate(leaves) if index not in objects
        )
        and repeat.watch.is_unchanged()
    )


def _read_keys(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the path of an array in its object, without nnx's own keys."""
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def _name_leaf(names: Sequence[str], path: tuple[Any, ...]) -> str:
    """Returns the name of a leaf of a call, from its path in (args, kwargs)."""
    first = path[1]
    label = names[first.idx] if isinstance(first, jax.tree_util.SequenceKey) else first.key
    return f"{label}{jax.tree_util.keystr(path[2:])}"


def _is_place(value: Any) -> bool:
    return isinstance(value, ObjectPlaceholder)


def _make_pure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of arrays that is captured in the place of the user's function."""

    def pure(*args: Any, nnx_state: dict[str, Any], **kwargs: Any) -> Any:
        nnx = find_nnx()
        leaves, structure = jax.tree_util.tree_flatten((args, kwargs), is_leaf=_is_place)
        places = [leaf for leaf in leaves if _is_place(leaf)]
        before = [
            place.structure.unflatten([nnx_state[name] for name in place.names]) for place in places
        ]

        def fill(objects: Sequence[Any]) -> Any:
            remaining = iter(objects)
            return structure.unflatten(
                [next(remaining) if _is_place(leaf) else leaf for leaf in leaves]
            )

        after, result = run_on_copies(nnx, function, before, fill)
        has_objects = any(map(is_split, jax.tree_util.tree_leaves(result, is_leaf=is_split)))
        if find_structure(after) != find_structure(before):
            return {}, Outcome(None, has_objects), (after, result)
        flat, inner = jax.tree_util.tree_flatten(after)
        names = [name for place in places for name in place.names]
        return dict(zip(names, flat, strict=True)), Outcome(inner, has_objects), result

    name_parameter(pure, function, STATE)
    return pure
