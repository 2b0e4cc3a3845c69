"""GraphedCallable and GraphedModule: what `tg.make_graphed_callables` returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from tracegraph.constraints.frames import hide_own_frames
from tracegraph.graphed_callables.callable_graphs import CallableGraphs
from tracegraph.graphed_callables.module_function import ModuleFunction, fix_numbers
from tracegraph.graphed_callables.object_function import ObjectFunction, split_call
from tracegraph.graphed_callables.primitives import call_differentiated
from tracegraph.jax_internals import eval_trace, is_eager_vjp, trace_state
from tracegraph.runtime.memory.pool_id import PoolId

P = ParamSpec("P")
R = TypeVar("R")


class GraphedCallable(Generic[P, R]):
    """A function whose calls, and whose gradients in eager code, are replays of graphs.

    Made by `tg.make_graphed_callables`; called like the function, with arguments of the shapes and
    dtypes of its samples.

    Args:
        function: the user's function.
        graphs: of the function.

    Example:
        >>> square = tg.make_graphed_callables(lambda x: x * x, (jnp.zeros(3),))
        >>> print(jax.grad(lambda x: square(x).sum())(jnp.arange(3.0)))
        [0. 2. 4.]
    """

    __wrapped__: Callable[P, R]
    __name__: str

    def __init__(self, function: Callable[P, R], graphs: CallableGraphs) -> None:
        self._graphs = graphs
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Replays the graph; where JAX traces or maps, calls the function itself.

        Args:
            *args: as the function takes them, of the samples' shapes and dtypes.
            **kwargs: the same.

        Returns:
            What the function returns, in fresh arrays.

        Raises:
            ReplayError: an argument has another shape, dtype or structure than its sample.
        """
        return call_graphed(self._graphs, args, kwargs)

    def __repr__(self) -> str:
        return f"<GraphedCallable {self._graphs.name}, {self._graphs.count_graphs()} graphs>"

    def reset(self) -> None:
        """Drops the graphs: the next calls capture again. Pullbacks that are held stay valid.

        Example:
            >>> square = tg.make_graphed_callables(lambda x: x * x, (jnp.zeros(3),))
            >>> square.reset()
            >>> square
            <GraphedCallable <lambda>, 0 graphs>
        """
        self._graphs.reset()

    def pool(self) -> PoolId:
        """Returns the id of the pool that the graphs share; other captures join it by ``pool=``."""
        return self._graphs.share_pool()


@jax.tree_util.register_pytree_with_keys_class
class GraphedModule:
    """A module whose calls are replays of graphs: a tree with the module's own arrays as leaves.

    Made by `tg.make_graphed_callables` of a callable that is a tree itself, as the modules of
    equinox are. JAX differentiates it and maps over it as over the module, and an optimizer that
    updates its leaves returns one with the same graphs.

    Args:
        module: the user's module, or a tree of the same structure.
        graphs: of the module's call, which takes the module as its first argument.

    Attributes:
        module: the user's module with the present leaves.

    Example:
        >>> scale = jax.tree_util.Partial(jnp.multiply, jnp.float32(3))
        >>> graphed = tg.make_graphed_callables(scale, (jnp.zeros(2),))
        >>> print(graphed(jnp.ones(2)))
        [3. 3.]
        >>> print(jax.grad(lambda module: module(jnp.ones(2)).sum())(graphed).module.args)
        (Array(2., dtype=float32),)
    """

    def __init__(self, module: Any, graphs: CallableGraphs) -> None:
        self.module, self._graphs = module, graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays the graph; where JAX traces or maps, calls the module itself.

        Args:
            *args: as the module takes them, of the samples' shapes and dtypes.
            **kwargs: the same.

        Returns:
            What the module returns, in fresh arrays.

        Raises:
            ReplayError: an argument, or a leaf of the module, is not like its sample.
        """
        return call_graphed(self._graphs, (self.module, *args), kwargs)

    def __repr__(self) -> str:
        return f"<GraphedModule {self._graphs.name}, {self._graphs.count_graphs()} graphs>"

    def reset(self) -> None:
        """Drops the graphs, of all modules that share them: the next calls capture again."""
        self._graphs.reset()

    def pool(self) -> PoolId:
        """Returns the id of the pool that the graphs share; other captures join it by ``pool=``."""
        return self._graphs.share_pool()

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], CallableGraphs]:
        """Returns the module as the one child, and the graphs."""
        return ((jax.tree_util.GetAttrKey("module"), self.module),), self._graphs

    @classmethod
    def tree_unflatten(cls, graphs: CallableGraphs, children: tuple[Any]) -> GraphedModule:
        """Returns a module with other leaves and the same graphs."""
        return cls(children[0], graphs)


def call_graphed(graphs: CallableGraphs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a callable as Note [Differentiation] says."""
    is_eager = trace_state.value is eval_trace
    # Without jit JAX has other settings; the function is then called op by op, as under `jax.jit`.
    is_graphed = (is_eager or is_eager_vjp()) and not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    if not is_graphed:
        return graphs.user_function(*args, **kwargs)
    run = graphs.call if is_eager else functools.partial(call_differentiated, graphs)
    try:
        if isinstance(graphs.function, ModuleFunction):
            args = (fix_numbers(args[0]), *args[1:])
        elif isinstance(graphs.function, ObjectFunction):
            split = split_call(args, kwargs)
            result, changed = run(split.args, {})
            split.update(changed)
            return result
        return run(*graphs.normalize(args, kwargs))
    except Exception as error:
        hide_own_frames(error)
        raise
