"""The two functions that are captured of a callable: forward with residuals, and backward.

Note [Residuals]. What the forward graph keeps for the backward graph is chosen by JAX: the forward
function calls `jax.vjp`, and the leaves of the pullback are the residuals. So the policies of
`jax.checkpoint` hold. A residual that is an argument, a result or an array that the function closes
over is no result of the forward graph: it is passed on as it is, and never copied. The others are
fresh results, which JAX keeps as long as a pullback needs them; the backward graph reads them in
place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tracegraph.constraints.leaf_kinds import is_array
from tracegraph.constraints.trace_errors import make_result_violation
from tracegraph.constraints.violation import make_capture_error
from tracegraph.ir.graph import Graph, Value
from tracegraph.tracing.static_leaves import wrap_static_leaves

# Where a residual comes from.
ARGUMENT, RESULT, FRESH, CONSTANT = range(4)


@dataclasses.dataclass(frozen=True)
class Pullback:
    """What a forward function's trace says of its pullback; it holds no traced value.

    Attributes:
        tree: of the pullback, whose leaves are the residuals.
        sources: of each residual: one of the kinds above, and the index among these.
        constants: the arrays that the function closes over and the pullback reads.
        out_tree: of the function's results.
        results: their types, flat.
    """

    tree: Any
    sources: tuple[tuple[int, int], ...]
    constants: tuple[Any, ...]
    out_tree: Any
    results: tuple[jax.ShapeDtypeStruct, ...]

    @functools.cached_property
    def differentiable(self) -> tuple[int, ...]:
        """The indices of the flat results that have tangents and take cotangents."""
        return tuple(i for i, each in enumerate(self.results) if is_inexact(each.dtype))

    def join_residuals(
        self, leaves: Sequence[Any], results: Sequence[Any], fresh: Sequence[Any]
    ) -> list[Any]:
        """Returns the residuals of a call.

        Args:
            leaves: the flat arguments of the forward function.
            results: its flat results.
            fresh: the residuals that it returned.
        """
        kinds = (leaves, results, fresh, self.constants)
        return [kinds[kind][index] for kind, index in self.sources]


class ForwardFunction:
    """A function that also returns what its pullback needs, see Note [Residuals].

    Args:
        function: the user's function.
        wanted: the indices of the flat arguments whose gradients the pullback returns.

    Attributes:
        pullback: of the latest trace.
    """

    pullback: Pullback

    def __init__(self, function: Callable[..., Any], wanted: tuple[int, ...]) -> None:
        self._function, self._wanted = function, wanted
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[list[Any], list[Any], Any]:
        """Returns the flat results, the fresh residuals, and static leaves; it is traced."""
        leaves, tree = jax.tree.flatten((args, kwargs))

        def call(*values: Any) -> Any:
            filled = list(leaves)
            for index, value in zip(self._wanted, values, strict=True):
                filled[index] = value
            args, kwargs = jax.tree.unflatten(tree, filled)
            return self._check(wrap_static_leaves(self._function(*args, **kwargs)))

        result, pull = jax.vjp(call, *[leaves[index] for index in self._wanted])
        results, out_tree = jax.tree.flatten(wrap_static_leaves(result))
        residuals, pull_tree = jax.tree.flatten(pull)
        # JAX passes on the traced value itself, so that its identity says where it comes from.
        known = {id(leaf): (ARGUMENT, index) for index, leaf in enumerate(leaves)}
        known |= {id(each): (RESULT, index) for index, each in enumerate(results)}
        fresh: list[Any] = []
        constants: list[Any] = []
        for residual in residuals:
            if id(residual) in known:
                continue
            is_traced = isinstance(residual, Tracer)
            kept = fresh if is_traced else constants
            known[id(residual)] = (FRESH if is_traced else CONSTANT, len(kept))
            kept.append(residual)
        sources = tuple(known[id(residual)] for residual in residuals)
        types = tuple(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in results)
        self.pullback = Pullback(pull_tree, sources, tuple(constants), out_tree, types)
        # Returned, so that those that Python makes anew are noticed as in every capture.
        statics = wrap_static_leaves(out_tree.unflatten([None] * len(results)))
        return results, fresh, statics

    def _check(self, result: Any) -> Any:
        for path, leaf in jax.tree_util.tree_leaves_with_path(result):
            if is_array(leaf):
                continue
            kind, path = type(leaf), jax.tree_util.keystr(path)
            name = getattr(self, "__name__", type(self._function).__name__)
            text = f"{kind.__module__}.{kind.__qualname__}"
            violation = make_result_violation(self._function, name, text, path)
            raise make_capture_error([violation], graph_name=name)
        return result


class BackwardFunction:
    """The pullback of a forward function, as a function of residuals and cotangents.

    Args:
        pullback: of the forward function.
        name: of the graph.
    """

    def __init__(self, pullback: Pullback, name: str) -> None:
        self._pullback = pullback
        self.__name__ = name

    def __call__(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the gradients of the wanted arguments; traceable.

        Args:
            residuals: as `Pullback.join_residuals` returns them.
            cotangents: one for each result that has a tangent.
        """
        known = self._pullback
        filled: list[Any] = [np.zeros(each.shape, jax.dtypes.float0) for each in known.results]
        for index, cotangent in zip(known.differentiable, cotangents, strict=True):
            filled[index] = cotangent
        pull = jax.tree.unflatten(known.tree, residuals)
        cotangents = jax.tree.unflatten(known.out_tree, filled)
        return tuple(pull(wrap_static_leaves(cotangents)))


def find_unused(graph: Graph, count: int) -> list[int]:
    """Returns the indices of the inputs with gradients that none of the first results depends on.

    Args:
        graph: of a forward function.
        count: of its results; the outputs after them are residuals.
    """
    needed = {each.number for each in graph.outputs[:count] if isinstance(each, Value)}
    for op in reversed(graph.ops):
        if any(result.number in needed for result in op.results):
            needed.update(each.number for each in op.operands if isinstance(each, Value))
    return [
        index
        for index, value in enumerate(graph.inputs)
        if is_inexact(value.aval.dtype) and value.number not in needed
    ]


def is_inexact(dtype: Any) -> bool:
    """True for a dtype whose values have gradients.

    Example:
        >>> is_inexact(jnp.float32), is_inexact(jnp.int32), is_inexact(jax.random.key(0).dtype)
        (True, False, False)
    """
    return jnp.issubdtype(dtype, np.inexact)
