"""What tests on a GPU record of the driver's calls, and what they make of it."""

from __future__ import annotations

import pytest

from tests.fakes.cuda_stages import LAUNCH
from tests.fakes.fake_bindings import FakeBindings
from tests.fakes.fake_driver import FakeDriver
from tests.gpu import diagnosis
from tests.gpu.driver_calls import CHANGES, Call, RecordedBindings, find_slow_nodes
from tracegraph.runtime.cuda.driver.driver import CudaDriver
from tracegraph.runtime.cuda.graphs.graph import CudaGraph
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader
from tracegraph.runtime.definition.graph import Stage


def test_slow_nodes_are_found() -> None:
    """The check itself, on calls that are made up."""
    add = Call("cuGraphAddKernelNode", 1, 5, (7, 1, 1, 1, 32, 1, 1, 0))
    early = [add, Call(CHANGES[1], 2, 6), Call("cuGraphUpload", 2)]
    assert find_slow_nodes(early) == ["node 0x6 changed before the first upload"]
    other = [add, Call("cuGraphUpload", 2), Call(CHANGES[0], 2, 5, (7, 2, 1, 1, 32, 1, 1, 0))]
    assert find_slow_nodes(other) == ["node 0x5 got another kernel or size"]
    same = [add, Call("cuGraphUpload", 2), Call(CHANGES[0], 2, 5, add.launch)]
    assert find_slow_nodes(same) == []


def test_calls_are_recorded_on_their_way(api: FakeBindings) -> None:
    api.results |= {"cuGraphAddKernelNode": (5,), "cuGraphInstantiateWithParams": (2,)}
    recorded = RecordedBindings(api)
    driver = CudaDriver(recorded)
    driver.add_kernel_node(1, LAUNCH)
    driver.instantiate(1, {})
    driver.patch_kernel_node(2, 5, LAUNCH).send()
    driver.upload(2, 7)
    driver.make_launcher(2, 7)()
    launch = (0xF00, 4, 3, 2, 128, 2, 1, 1024)
    assert recorded.calls == [
        Call("cuGraphAddKernelNode", 1, 5, launch),
        Call("cuGraphInstantiateWithParams", 2),
        Call(CHANGES[0], 2, 5, launch),
        Call("cuGraphUpload", 2),
        Call("cuGraphLaunch", 2),
    ]
    assert find_slow_nodes(recorded.calls) == ["node 0x5 changed before the first upload"]


@pytest.mark.parametrize("name", diagnosis.STAGES)
def test_each_stage_of_the_diagnosis_is_built(name: str) -> None:
    nodes = tuple(diagnosis.STAGES[name])
    stage = Stage(nodes, tuple((index, index + 1) for index in range(len(nodes) - 1)))
    driver = FakeDriver()
    kernels = KernelLoader(driver, driver.retain_primary_context(0))
    graph = CudaGraph(driver, stage, lambda use: 4096 + use.offset, kernels, {}, name)
    assert graph.node_count == len(nodes)
