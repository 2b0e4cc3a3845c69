"""Graphs for a described H200, walked through as a profile does, on a driver without a GPU."""

from __future__ import annotations

import types
from typing import Any

import pytest

from tests.deviceless.building import ARENA_ADDRESS, LIBRARY_KINDS, FakeLibrary
from tests.deviceless.test_graph_data import BATCH, VECTOR, WEIGHTS, repeat, train
from tests.deviceless.test_partial import lower
from tests.fakes.fake_driver import FakeDriver
from tracegraph.capturing.progress import Progress
from tracegraph.graph_pictures.lines import NodeLines, find_buffer_lines
from tracegraph.graph_pictures.read_graph import list_sources, read_graph
from tracegraph.profiling.measure import Measured, _count_saved, _Walk
from tracegraph.profiling.peaks import find_peaks
from tracegraph.profiling.summary import summarise_profile
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader
from tracegraph.runtime.cuda.node_timer import CudaTimer
from tracegraph.runtime.device_properties import DeviceProperties
from tracegraph.runtime.node_timer import TimedGraph

H200 = DeviceProperties("NVIDIA H200", 9, 0, memory_clock_rate=3_201_000, memory_bus_width=6144)


@pytest.mark.parametrize(
    ("function", "arguments"), [(train, (WEIGHTS, BATCH)), (repeat, (VECTOR,))]
)
def test_every_node_is_timed_or_says_why_not(h200: Any, function: Any, arguments: Any) -> None:
    checked, lowered = lower(function, arguments, h200, mode="whole")
    definition = lowered.definition
    buffer_lines = find_buffer_lines(checked)
    lines = NodeLines(checked, lowered, buffer_lines)
    data, nodes = read_graph(definition, lines.find, buffer_lines), list_sources(definition)
    assert [(n.kind, n.name) for n in data.nodes] == [(n.kind, n.name) for n in nodes]
    driver = FakeDriver()
    context = driver.retain_primary_context(0)
    stream = driver.create_stream() if driver.set_current(context) is None else 0
    places = types.SimpleNamespace(
        driver=driver,
        order=types.SimpleNamespace(stream=stream, use_context=lambda: driver.use_context(context)),
        jax_device=types.SimpleNamespace(local_hardware_id=0),
    )
    arena: Any = types.SimpleNamespace(
        allocate_beside=lambda _: types.SimpleNamespace(address=0x7000_0000_0000)
    )
    buffers = {
        slot.name: types.SimpleNamespace(address=ARENA_ADDRESS + slot.offset)
        for slot in definition.slots
    }
    libraries: Any = dict.fromkeys(LIBRARY_KINDS, FakeLibrary(driver))
    saved = _count_saved(data, nodes)
    clock: Any = None
    graph = TimedGraph(definition, arena, buffers, (), clock, saved)
    live = set(driver.live_handles())
    timer: Any = CudaTimer(places, KernelLoader(driver, context), libraries, graph)  # pyright: ignore[reportArgumentType]
    with timer, Progress("profiling", is_quiet=True) as progress:
        timer.start()
        walk = _Walk(timer, data, nodes, progress)
        walk.visit_all()
    measured = Measured(walk.times, walk.sources, [1000.0], timer.floor_us, 0.0)
    profile = summarise_profile(
        data, nodes, [lines.find_place(n) for n in nodes], measured, find_peaks(H200), "cuda:0"
    )
    for node in profile.nodes:
        assert node.note or (node.warm_us and node.cold_us), node
        assert node.warm_us is not None or "condition" in node.note
    assert any(node.scope.startswith("jit(") for node in profile.nodes)
    assert any("test_graph_data.py:" in line.where for line in profile.by_line())
    assert profile.parts[0].path_us > 0
    matmuls = [node for node in profile.nodes if node.kind == "matmul"]
    assert all(node.operations and node.tensor_share != 0 for node in matmuls)
    del timer, walk
    assert set(driver.live_handles()) <= live
