"""Graph definitions written by hand, and replays of them on the host device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.runtime.arrays.array import ArrayState
from tracegraph.runtime.definition.graph import ArenaSize, BufferSlot, GraphDefinition, Stage
from tracegraph.runtime.definition.graph_nodes import Node
from tracegraph.runtime.definition.nodes import BufferUse, CallNode, CopyNode
from tracegraph.runtime.host.device import HostDevice
from tracegraph.runtime.memory.caching.caching_allocator import CachingAllocator
from tracegraph.runtime.memory.pool_id import new_pool_id
from tracegraph.runtime.memory.private_pool import PrivatePool
from tracegraph.runtime.memory.providers.host import HostProvider
from tracegraph.runtime.replay import Replay

SIZE = 4
FLOATS = jax.ShapeDtypeStruct((SIZE,), np.float32)


def compile_call(function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct) -> Any:
    """Returns an XLA executable, as lowering passes it on."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    typed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    return jax.jit(function, keep_unused=True, out_shardings=sharding).lower(*typed).compile()


def make_call(name: str, function: Callable[..., Any], reads: str, writes: str) -> CallNode:
    """Returns a compiled call on float32[4] buffers; one result comes bare, several as a tuple."""
    arguments = tuple(reads.split())
    executable = compile_call(function, *[FLOATS] * len(arguments))
    return CallNode(name, executable, arguments, tuple(writes.split()))


def make_stage(
    *nodes: Node, edges: Sequence[tuple[int, int]] = (), is_captured: bool = True
) -> Stage:
    """Returns a stage."""
    return Stage(nodes, tuple(edges), is_captured)


def make_definition(
    *stages: Stage,
    inputs: str = "x",
    outputs: str = "y",
    residents: Collection[str] = (),
    types: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    offsets: Mapping[str, int] | None = None,
    arena_bytes: int | None = None,
) -> GraphDefinition:
    """Returns a definition whose buffers are float32[4] and side by side, unless said otherwise."""
    nodes = [node for stage in stages for node in stage.nodes]
    found = [*inputs.split(), *(name for n in nodes for name in (*n.arguments, *n.results))]
    slots = []
    for index, name in enumerate(dict.fromkeys(found)):
        kind = (types or {}).get(name, FLOATS)
        offset = (offsets or {}).get(name, 4096 * index)
        is_resident = name in residents
        slots.append(
            BufferSlot(name, offset, kind.shape, np.dtype(kind.dtype), is_resident=is_resident)
        )
    return GraphDefinition(
        "f",
        ArenaSize(4096 * len(slots) if arena_bytes is None else arena_bytes),
        tuple(slots),
        stages,
        tuple(inputs.split()),
        tuple(outputs.split()),
    )


def make_copy(source: str, target: str, nbytes: int = 16) -> CopyNode:
    """Returns a copy of one whole buffer."""
    return CopyNode(f"update_{target}", BufferUse(source, 0, nbytes), BufferUse(target, 0, nbytes))


def make_replay(
    definition: GraphDefinition,
    state: ArrayState = ArrayState.FRESH,
    *,
    is_checking: bool = False,
    pool: PrivatePool | None = None,
) -> Replay:
    """Returns the definition on the host device, with a pool of its own unless one is given."""
    device = HostDevice(jax.devices()[0], is_checking=is_checking)
    return Replay(
        definition,
        device,
        pool or PrivatePool(new_pool_id(), CachingAllocator(HostProvider())),
        state,
    )


def take_results(replay: Replay) -> list[Any]:
    """Returns the results of the last replay, as a captured function does; always new leaves."""
    shown = replay.make_leaves({})
    replay.show(shown)
    return [
        shown.leaves[name] if name in shown.leaves else replay.make_taker(index)()
        for index, name in enumerate(replay.definition.outputs)
    ]


def replay_once(replay: Replay, *values: Any) -> list[np.ndarray]:
    """Loads the inputs, launches, and returns copies of the results."""
    replay.settle()
    replay.load(list(enumerate(values)))
    replay.launch()
    return replay.copy_outputs()
