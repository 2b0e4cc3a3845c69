"""SpreadGpus: several GPUs that replay one definition together, a graph on each.

Note [Launches of several GPUs]
Kernels of one GPU wait on the device for those of the others, so all graphs are launched before
anything may wait for one. Two graphs that were launched in different orders on two GPUs would wait
for each other for ever; so one lock of the process holds off all other launches of this kind. If a
GPU cannot be launched, the kernels on the others are told to stop.

GPUs of other processes have graphs there. With these only joint collectives exchange anything, see
Note [Joint collectives] in ``lowering/cut_collectives.py``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tracegraph.runtime.arena import Arena
from tracegraph.runtime.arrays.array import Array, ArrayState
from tracegraph.runtime.arrays.spread_buffer import (
    GlobalType,
    SpreadBuffer,
    SpreadContext,
    SpreadResult,
)
from tracegraph.runtime.cuda.context import CudaContext
from tracegraph.runtime.cuda.device import find_cuda_device
from tracegraph.runtime.cuda.joint_collectives import JointStage
from tracegraph.runtime.cuda.peer_memory import PeerMemory, find_peer_memory
from tracegraph.runtime.definition.collective_nodes import JointCollectiveNode
from tracegraph.runtime.definition.graph import (
    ExecutableGraph,
    GraphDefinition,
    Instance,
    ReplayClock,
    Stage,
)
from tracegraph.runtime.definition.nodes import BufferUse
from tracegraph.runtime.definition.placement import (
    Peers,
    list_exchanged,
    list_groups,
    place_definition,
)
from tracegraph.runtime.environment import read_launch_blocking
from tracegraph.runtime.memory.private_pool import PrivatePool


class SpreadGpus:
    """Some GPUs as one device of a replay.

    Args:
        jax_devices: in the order of XLA's partitions.
        whole: the sharding of what each of them holds whole.
        types: of the static inputs and the results, by the names of their buffers.
        pools: of this process's GPUs but the first, whose pool the replay itself has.

    Attributes:
        jax_device: the sharding ``whole``.
    """

    def __init__(
        self,
        jax_devices: Sequence[Any],
        whole: Any,
        types: Mapping[str, GlobalType],
        pools: Sequence[PrivatePool],
    ) -> None:
        self.jax_device, self._types, self._pools = whole, types, tuple(pools)
        self._jax_devices = tuple(jax_devices)
        # Those of this process, by their numbers.
        self._gpus = {
            number: find_cuda_device(each)
            for number, each in enumerate(jax_devices)
            if each.process_index == jax.process_index()
        }
        self._contexts = {number: gpu.context for number, gpu in self._gpus.items()}
        self._context = SpreadContext([*self._contexts.values()])

    def bind_buffers(
        self, definition: GraphDefinition, arena: Arena, clock: ReplayClock
    ) -> Mapping[str, SpreadBuffer]:
        """Returns every slot with a part on each GPU, filled with bytes that show when read."""
        arenas = [arena, *(Arena(pool, definition.arena_size) for pool in self._pools)]
        bound = [
            gpu.bind_buffers(definition, each, clock)
            for gpu, each in zip(self._gpus.values(), arenas, strict=True)
        ]
        return {name: self._join(name, [each[name] for each in bound], clock) for name in bound[0]}

    def _join(self, name: str, parts: Sequence[Any], clock: ReplayClock) -> SpreadBuffer:
        # What is no input and no result has no value over all GPUs.
        found = self._types.get(name, GlobalType(parts[0].aval, self.jax_device))
        return SpreadBuffer(parts, found.aval, found.sharding, clock, self._context)

    def instantiate(
        self,
        definition: GraphDefinition,
        buffers: Mapping[str, SpreadBuffer],
        fresh: Sequence[str],
    ) -> Instance:
        """Builds the graph of each GPU; its collectives know where the others have their parts.

        Raises:
            UnsupportedError: a GPU cannot reach another.
        """
        reached = list_exchanged(definition)
        memories = {
            group: find_peer_memory([self._contexts[number] for number in group])
            for group in list_groups(definition)
            if group[0] in self._gpus
        }
        places = {number: index for index, number in enumerate(self._gpus)}

        def locate(number: int, use: BufferUse) -> int:
            return buffers[use.buffer].parts[places[number]].address + use.offset

        def find_signals(group: tuple[int, ...]) -> Sequence[int]:
            return memories[group].addresses

        instances = []
        for number, gpu in self._gpus.items():
            placed = place_definition(definition, Peers(number, locate, find_signals))
            place = places[number]
            own: dict[str, Any] = {name: each.parts[place] for name, each in buffers.items()}
            instances.append(gpu.instantiate(placed, own, fresh, reached=reached))
        own_stages = zip(*(each.stages for each in instances), strict=True)
        contexts, meeting = [*self._contexts.values()], [*memories.values()]
        joined = tuple(
            SpreadStage(parts, contexts, meeting)
            if stage.is_captured
            else self._make_joint_stage(stage, locate)
            for stage, parts in zip(definition.stages, own_stages, strict=True)
        )
        takers = {
            name: _make_taker(buffers[name], [each.takers[name] for each in instances])
            for name in instances[0].takers
        }
        return Instance(joined, takers)

    def _make_joint_stage(
        self, stage: Stage, locate: Callable[[int, BufferUse], int]
    ) -> ExecutableGraph:
        (node,) = stage.nodes
        assert isinstance(node, JointCollectiveNode)
        return JointStage(node, self._jax_devices, self._contexts, locate)


def _make_taker(buffer: SpreadBuffer, takers: Sequence[Callable[[], Any]]) -> Callable[[], Array]:
    """Returns what makes one array of the parts that the GPUs have made."""
    clock = ReplayClock(buffer.clock.lock)
    make_result = functools.partial(
        SpreadResult,
        buffer.name,
        aval=buffer.aval,
        sharding=buffer.jax_device,
        clock=clock,
        context=buffer.context,
    )

    def take() -> Array:
        result = make_result(arrays=[each() for each in takers])
        return Array(result, clock.generation, ArrayState.FRESH)

    return take


_launching = threading.Lock()


class SpreadStage:
    """The graphs of one stage on all GPUs, see Note [Launches of several GPUs].

    Args:
        stages: of each GPU.
        contexts: the same.
        memories: through which their kernels meet.

    Attributes:
        launch: enqueues all of them.
    """

    handles = None

    def __init__(
        self,
        stages: Sequence[ExecutableGraph],
        contexts: Sequence[CudaContext],
        memories: Sequence[PeerMemory],
    ) -> None:
        launches = tuple(stage.launch for stage in stages)
        self.launch = _make_launch(launches, tuple(contexts), tuple(memories))


def _make_launch(
    launches: tuple[Callable[[], None], ...],
    contexts: tuple[CudaContext, ...],
    memories: tuple[PeerMemory, ...],
) -> Callable[[], None]:
    is_blocking = read_launch_blocking()

    def launch() -> None:
        begun = 0
        with _launching:
            try:
                for each in launches:
                    each()
                    begun += 1
            except BaseException:
                if begun:
                    _stop(memories)
                raise
        if is_blocking:
            _synchronize(contexts)

    return launch


def _stop(memories: Sequence[PeerMemory]) -> None:
    for memory in memories:
        memory.stop()


def _synchronize(contexts: Sequence[CudaContext]) -> None:
    for context in contexts:
        context.synchronize()
