"""Functions lowered for several described GPUs, and their graphs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tests.deviceless import topology
from tests.deviceless.building import ARENA_ADDRESS
from tests.fakes.compilers import NotedPhases, Target
from tracegraph.capturing.spread_graphs import lower_for_gpus
from tracegraph.constraints.spread import find_spread
from tracegraph.decorator import capture
from tracegraph.lowering.lower_spread import SpreadLowering
from tracegraph.lowering.overlap import Overlap
from tracegraph.runtime.cuda.libraries.nvrtc import compile_source
from tracegraph.runtime.definition.graph import GraphDefinition
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.definition.placement import Peers, place_definition
from tracegraph.tracing.checked_graph import check_trace, finish_checks, trace_call
from tracegraph.tracing.prepared_call import prepare_call

# Between the arenas of two GPUs, and between their signals and those of the next.
STRIDE = 1 << 36
SIGNALS = 0x6F00_0000_0000


def make_mesh(count: int, hosts: int = 1) -> Mesh:
    """Returns a mesh of described H200s, so many of each host, with one axis, ``i``."""
    return Mesh(np.array(topology.find_h200s(count, hosts)), ("i",))


def lower_over(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    donate_argnums: Sequence[int] = (),
    *,
    mode: Any = "whole",
) -> SpreadLowering:
    """Lowers a call whose arguments are types on described GPUs."""
    options = capture(function, donate_argnums=tuple(donate_argnums), mode=mode)._options
    given = {"has_values": False, "takes_spread": True, "device": topology.find_h200()}
    prepared = prepare_call(function, options, tuple(arguments), {}, **given)
    first = check_trace(prepared, trace_call(prepared))
    finish_checks(prepared, first)
    spread = find_spread(prepared.list_leaves(), first.checked.graph)
    assert spread is not None
    compile_kernel = functools.partial(compile_source, "9.0")
    target: Any = Target(spread.devices[0], takes_kernels=True, compile_kernel=compile_kernel)
    return lower_for_gpus(prepared, first, spread, target, NotedPhases(), Overlap())


def place_all(definition: GraphDefinition, count: int) -> list[GraphDefinition]:
    """Returns what each GPU does, with arenas and signals at made-up addresses."""
    offsets = {slot.name: slot.offset for slot in definition.slots}

    def locate(number: int, use: BufferUse) -> int:
        return ARENA_ADDRESS + number * STRIDE + offsets[use.buffer] + use.offset

    def find_signals(group: tuple[int, ...]) -> list[int]:
        return [SIGNALS + number * STRIDE for number in group]

    return [
        place_definition(definition, Peers(number, locate, find_signals)) for number in range(count)
    ]


def make_type(shape: Sequence[int], mesh: Mesh, *spec: Any, dtype: Any = np.float32) -> Any:
    """Returns the type of an array on a mesh."""
    sharding = jax.NamedSharding(mesh, jax.P(*spec))
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


@dataclasses.dataclass(frozen=True)
class Network:
    """A train step with its state whole on each GPU, or cut along its inner axis."""

    mesh: Mesh
    is_cut: bool

    def list_arguments(self) -> tuple[Any, ...]:
        """Returns state, inputs and targets."""
        cut = ("i",) if self.is_cut else ()
        state = {
            "w": make_type((64, 256), self.mesh, *((None, *cut) if cut else ())),
            "v": make_type((256, 8), self.mesh, *cut),
        }
        rows = () if self.is_cut else ("i",)
        return state, make_type((128, 64), self.mesh, *rows), make_type((128, 8), self.mesh, *rows)

    @staticmethod
    def train(params: Any, x: Any, y: Any) -> Any:
        """One step."""

        def loss(params: Any) -> Any:
            return jax.numpy.mean((jax.numpy.tanh(x @ params["w"]) @ params["v"] - y) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value
