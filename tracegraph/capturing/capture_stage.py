"""CaptureStage: what a lowered and a compiled capture say of themselves, as `jax.stages` do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from tracegraph.lowering.late_executable import find_compiled
from tracegraph.lowering.lower import Lowered
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.tracing.prepared_call import PreparedCall


class CaptureStage:
    """A stage of a capture for one signature.

    Attributes:
        prepared: the call that it was made for.
        checked: the traced and optimised graph.
        lowered: device program, memory plan and graph definition.
    """

    prepared: PreparedCall
    checked: CheckedGraph
    lowered: Lowered

    @property
    def in_tree(self) -> Any:
        """The tree of the dynamic arguments, positional and by keyword."""
        return self.prepared.signature.tree

    @property
    def in_avals(self) -> Any:
        """The types of the dynamic arguments, in their tree."""
        leaves = self.prepared.signature.leaves
        return jax.tree.unflatten(self.in_tree, [_describe(leaf) for leaf in leaves])

    @property
    def out_tree(self) -> Any:
        """The tree of the results."""
        return self.checked.out_tree

    @property
    def out_info(self) -> Any:
        """The types of the results, in their tree."""
        outputs = self.checked.graph.outputs[: self.out_tree.num_leaves]
        return jax.tree.unflatten(self.out_tree, [_describe(each.aval) for each in outputs])

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The positions of the donated leaves, in their flat order."""
        return tuple(sorted(self.prepared.donated))

    def cost_analysis(self) -> dict[str, float]:
        """Returns XLA's estimates (flops, bytes accessed), summed over the compiled regions.

        Example:
            >>> tg.capture(lambda x: x * 2).lower(jnp.zeros(3)).cost_analysis()["flops"]
            3.0
        """
        total: dict[str, float] = {}
        for executable in list_executables(self.lowered):
            for name, value in (executable.cost_analysis() or {}).items():
                total[name] = total.get(name, 0.0) + value
        return total


def list_executables(lowered: Lowered) -> Iterator[jax.stages.Compiled]:
    """Yields XLA's program of each region that was compiled ahead of its calls."""
    found = (find_compiled(region.executable) for region in lowered.regions)
    yield from (each for each in found if each is not None)


def _describe(leaf: Any) -> jax.ShapeDtypeStruct:
    is_weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=is_weak)
