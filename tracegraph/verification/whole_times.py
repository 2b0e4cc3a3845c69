"""How long whole graphs take on their device, several of the same arguments in turns."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.device import Device
from tracegraph.runtime.node_timer import TimedGraph
from tracegraph.runtime.replay import Replay
from tracegraph.verification.device_verification import place_values
from tracegraph.verification.host_verification import copy_inputs

# Rounds in which each graph is launched once; the later ones only while there is time.
MIN_ROUNDS, MAX_ROUNDS, MAX_SECONDS = 5, 50, 0.5


def time_in_turns(
    graphs: Sequence[CapturedGraph], leaves: Sequence[Any], device: Device
) -> list[float]:
    """Returns the median seconds of a launch of each graph; what slows one down slows all down.

    Args:
        graphs: of the same arguments, new and without users: they are launched.
        leaves: one value per dynamic leaf.
        device: that they are on.

    Raises:
        OutOfMemoryError: there is no memory for what the measurement needs.
    """
    with contextlib.ExitStack() as stack:
        launches = [_bind_launch(each, leaves, device, stack) for each in graphs]
        rounds = _repeat(launches)
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def bind_loading(replay: Replay, values: Sequence[Any], leaf_count: int) -> Callable[[], None]:
    """Returns what puts arguments into a graph again as each call of a user does.

    Args:
        replay: the graph; all of its inputs are loaded once, but for those that are lent.
        values: one array per input, constants last.
        leaf_count: how many of them are arguments.
    """
    kept = {slot.name for slot in replay.definition.slots if slot.is_resident}
    kept |= set(replay.definition.outputs)
    is_kept = [name in kept for name in replay.definition.inputs]
    writers = [
        (buffer.make_writer(), value)
        for buffer, value, is_copied in zip(replay.inputs, values, is_kept, strict=True)
        if not is_copied
    ]
    state = [(i, values[i]) for i in range(leaf_count) if is_kept[i]]
    replay.load([(i, value) for i, value in enumerate(values) if not replay.is_lent[i]])

    def load() -> None:
        replay.load(state)
        for write, value in writers:
            write(value)

    return load


def _bind_launch(
    graph: CapturedGraph, leaves: Sequence[Any], device: Device, stack: contextlib.ExitStack
) -> Callable[[], float]:
    """Returns what launches a graph once and returns its seconds."""
    replay = graph.replay
    place = copy_inputs if device.comparison is None else place_values
    load = bind_loading(replay, place(graph, leaves), len(leaves))
    timed = TimedGraph(
        replay.definition, replay.arena, replay.buffers, replay.stages, replay.clock, 0
    )
    timer = stack.enter_context(device.open_timer(timed))

    def launch() -> float:
        load()
        return 1e-6 * sum(timer.time_stage(index) for index in range(len(replay.stages)))

    return launch


def _repeat(launches: Sequence[Callable[[], float]]) -> list[list[float]]:
    """Returns the seconds of each launch, in rounds of one each."""
    # The first launch of a graph loads what the others find there.
    for launch in launches:
        launch()
    rounds: list[list[float]] = []
    end = time.perf_counter() + MAX_SECONDS
    while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and time.perf_counter() < end):
        rounds.append([launch() for launch in launches])
    return rounds
