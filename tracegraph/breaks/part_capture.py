"""Captures a part of a function by the pipeline that captures whole functions, or computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.capturing.pipeline import Capture
from tracegraph.capturing.progress import Progress
from tracegraph.capturing.traced_pipeline import TracedPipeline
from tracegraph.constraints.frames import locate_function
from tracegraph.ir.graph import Graph, Origin
from tracegraph.jax_internals import (
    drop_unit_axes,
    eval_op_by_op,
    is_literal,
    make_function,
    open_jaxpr,
)
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.device import Device
from tracegraph.runtime.errors import InternalError
from tracegraph.runtime.jax_interop import to_plain
from tracegraph.tracing.prepared_call import PreparedCall, prepare_call
from tracegraph.tracing.trace import JaxTrace, build_traced


@dataclasses.dataclass(frozen=True)
class NewPart:
    """A part to be captured.

    Attributes:
        name: of its graph.
        jaxpr: closed; its inputs are the leaves of the arguments.
        out_tree: the tree that its results make.
        args: the values of this call: of earlier parts and arguments, then the donated trees.
        donated_count: how many of them are donated: the last ones.
        outputs: as of `capture`.
    """

    name: str
    jaxpr: Any
    out_tree: Any
    args: tuple[Any, ...]
    donated_count: int
    outputs: str


def trace_part(prepared: PreparedCall, jaxpr: Any) -> Graph:
    """Returns a part as a graph, before any pass.

    Args:
        prepared: the call of the function.
        jaxpr: closed.

    Raises:
        InternalError: it uses what another part has made, and not as an input.
    """
    _check_defined(prepared.options.name, jaxpr)
    origin = Origin(locate_function(prepared.function))
    # Only its graph is looked at.
    trace = JaxTrace(jaxpr, None, _bind_nothing, prepared.options.name, origin)
    return build_traced(trace, capturing_stream=prepared.options.stream.number).graph


def capture_part(
    prepared: PreparedCall, names: Sequence[str], part: NewPart, device: Device, pool: FunctionPool
) -> Capture:
    """Captures a part.

    Args:
        prepared: the call of the function.
        names: one per leaf of the part's arguments.
        part: what is captured.
        device: that it is for.
        pool: of the function.

    Raises:
        CaptureError: it cannot be captured; all reasons are named.
        VerificationError: the new graph differs from its reference.
        OutOfMemoryError: the pool cannot hold the graph.
    """
    count = len(part.args)
    options = dataclasses.replace(
        prepared.options,
        static_argnums=frozenset(),
        static_argnames=frozenset(),
        donate_argnums=frozenset(range(count - part.donated_count, count)),
        donate_argnames=frozenset(),
        name=part.name,
        outputs=part.outputs,
    )
    call = prepare_call(
        _make_stand_in(part.jaxpr),
        options,
        part.args,
        {},
        device=device.jax_device,
        has_values=True,
    )
    call = dataclasses.replace(call, names=tuple(names))
    where = locate_function(prepared.function)
    with drop_unit_axes(call.leaves), Progress(f"capturing `{part.name}`") as progress:
        pipeline = TracedPipeline(part.jaxpr, part.out_tree, where, call, device, pool, progress)
        return pipeline.capture(_ignore)


def compute_part(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Computes a part op by op; returns plain arrays, none of which is one of the values."""
    plain = [jnp.asarray(to_plain(value)) for value in values]
    results = eval_op_by_op(jaxpr, plain)
    types = [atom.aval for atom in open_jaxpr(jaxpr)[0].outvars]
    arrays = [_make_array(each, aval) for each, aval in zip(results, types, strict=True)]
    return [jnp.copy(each) if any(each is one for one in plain) else each for each in arrays]


def _make_array(value: Any, aval: Any) -> Any:
    """Returns a result as an array: a number that is written into the jaxpr is none."""
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value)
    return jnp.asarray(array.item() if aval.weak_type else array)


def _make_stand_in(jaxpr: Any) -> Callable[..., Any]:
    """Returns the function of a part: messages name its arguments."""
    run = make_function(jaxpr)

    def part(*args: Any) -> Any:
        return run(*jax.tree_util.tree_leaves(args))

    return part


def _check_defined(name: str, closed: Any) -> None:
    jaxpr, _ = open_jaxpr(closed)
    defined = {*map(id, jaxpr.invars), *map(id, jaxpr.constvars)}
    for equation in jaxpr.eqns:
        if not all(is_literal(atom) or id(atom) in defined for atom in equation.invars):
            raise InternalError(
                f"a part of `{name}` uses a value of another part that is not its input",
                where=f"capture of `{name}`, {equation.primitive.name}",
                why="such a value would be missing when the part is replayed",
            )
        defined.update(map(id, equation.outvars))


def _bind_nothing(*_leaves: Any) -> list[Any]:
    raise AssertionError("a part is traced by its own pipeline")


# No other call waits for a part.
def _ignore(_graph: CapturedGraph) -> None:
    return
