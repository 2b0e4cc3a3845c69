"""PreparedCall: a call that was bound, checked and flattened, on its way to a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tracegraph.constraints.arguments import check_arguments
from tracegraph.constraints.violation import to_error
from tracegraph.options import Options
from tracegraph.tracing.signature import (
    BoundCall,
    Signature,
    bind_call,
    make_signature,
    name_leaves,
)


class PreparedCall(NamedTuple):
    """A call on its way to a capture.

    Attributes:
        call: its arguments, static and dynamic apart.
        signature: trees and types of its dynamic arguments.
        leaves: one value per dynamic leaf.
        names: one unique name per dynamic leaf.
    """

    call: BoundCall
    signature: Signature
    leaves: list[Any]
    names: list[str]


def prepare_call(
    function: Callable[..., Any],
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: Any,
    has_values: bool,
) -> PreparedCall:
    """Binds, checks and flattens a call.

    Args:
        function: the user's function.
        options: how it is captured.
        args: positional arguments.
        kwargs: keyword arguments.
        device: JAX's device that the graph is for.
        has_values: False when a `jax.ShapeDtypeStruct` may stand in for an array.

    Raises:
        CaptureError: an argument cannot be an input of a graph; all such arguments are named.
    """
    call = bind_call(function, options, args, kwargs)
    names, argument_leaves = name_leaves(function, options, call)
    abstract = jax.ShapeDtypeStruct
    violations = check_arguments(
        [x for x in argument_leaves if has_values or not isinstance(x.value, abstract)],
        device=device,
    )
    if violations:
        raise to_error(violations, graph_name=options.name)
    leaves, tree = jax.tree_util.tree_flatten((call.args, call.kwargs))
    return PreparedCall(call, make_signature(call, leaves, tree), leaves, names)
