"""Making: one callable on its way to its graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tracegraph.constraints.leaf_kinds import is_array
from tracegraph.graphed_callables.callable_errors import make_unused_error
from tracegraph.graphed_callables.callable_graphs import CallableGraphs
from tracegraph.graphed_callables.graph_pair import GraphPair, Recipe
from tracegraph.graphed_callables.graphed_callable import GraphedCallable, GraphedModule
from tracegraph.graphed_callables.module_function import ModuleFunction, fix_numbers
from tracegraph.graphed_callables.object_function import ObjectFunction, split_call
from tracegraph.graphed_callables.residuals import find_unused, is_inexact
from tracegraph.objects.graph_objects import has_objects
from tracegraph.tracing.signature import is_leaf_tree


class Making:
    """One callable on its way to its graphs: what one phase returns is kept for the next.

    Args:
        function: the user's callable.
        args: positional arguments of its sample.
        kwargs: keyword arguments of its sample.
        recipe: how graphs are captured.

    Attributes:
        result: what the user gets.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        recipe: Recipe,
    ) -> None:
        self._function = function
        args, kwargs = tuple(args), dict(kwargs)
        is_module = not is_leaf_tree(jax.tree.structure(function))
        called, name = function, getattr(function, "__name__", type(function).__name__)
        if is_module:
            called, name = type(function).__call__, type(function).__name__
            args = (function, *args)
        if has_objects((args, kwargs)):
            called = ObjectFunction(called)
            args, kwargs = split_call(args, kwargs).args, {}
        elif is_module:
            called, args = ModuleFunction(called), (fix_numbers(function), *args[1:])
        graphs = CallableGraphs(called, name, recipe, recipe.prepare(called, name, args, kwargs))
        args, kwargs = graphs.normalize(args, kwargs)
        self._graphs, self._call = graphs, (args, kwargs)
        make = GraphedModule if is_module else GraphedCallable
        self.result: Any = make(function, graphs)
        # Once the forward graph has run: its pair, residuals and results.
        self._pair: GraphPair | None = None
        self._residuals: list[Any] = []
        self._results: list[Any] = []

    def capture_forward(self) -> None:
        """Captures the forward graph for the gradients of all arguments that have one."""
        leaves, tree = jax.tree.flatten(self._call)
        wanted = [i for i, leaf in enumerate(leaves) if _has_gradient(leaf)]
        if not wanted:
            args, kwargs = self._call
            self._graphs.call(args, kwargs)
            return
        found = self._graphs.call_forward(tree, leaves, tuple(wanted))
        self._results, self._residuals, self._pair = found

    def check_used(self) -> None:
        """Checks that results depend on all arguments that have gradients.

        Raises:
            CaptureError: they do not on some.
        """
        if self._pair is None:
            return
        forward = self._pair.forward.find()
        unused = find_unused(forward.checked.graph, len(self._results))
        if unused:
            names = [forward.names[index] for index in unused]
            raise make_unused_error(self._function, self._graphs.name, names)

    def capture_backward(self) -> None:
        """Captures the backward graph, on the residuals of the forward graph's replay."""
        if self._pair is None or not self._pair.pullback.differentiable:
            return
        results = [self._results[index] for index in self._pair.pullback.differentiable]
        self._pair.replay_backward(self._residuals, [jnp.ones_like(each) for each in results])
        # Those of the other callables need the memory.
        self._residuals, self._results = [], []


def _has_gradient(leaf: Any) -> bool:
    # A number of Python is rarely differentiated.
    return is_array(leaf) and hasattr(leaf, "dtype") and is_inexact(leaf.dtype)
