"""Priorities follow the slack of a node, and reach the driver."""

from __future__ import annotations

import random

import pytest

from tests.runtime.cuda_stages import build, kernel
from tests.runtime.fake_driver import FakeDriver
from tracegraph.runtime.cuda.priorities import find_priorities, find_slacks
from tracegraph.runtime.graph import Stage


def make_stage(count: int, edges: list[tuple[int, int]]) -> Stage:
    nodes = tuple(kernel(f"k{index}", "x", "y") for index in range(count))
    return Stage(nodes, tuple(edges))


def list_chains(stage: Stage, start: int) -> list[list[int]]:
    """Returns every way from a node to an end: slow, and plainly right."""
    followers = [second for first, second in stage.edges if first == start]
    if not followers:
        return [[start]]
    return [[start, *rest] for each in followers for rest in list_chains(stage, each)]


@pytest.mark.parametrize("seed", range(20))
def test_slacks_are_those_of_all_chains(seed: int) -> None:
    generator = random.Random(seed)
    count = generator.randrange(1, 9)
    pairs = [(one, other) for other in range(count) for one in range(other)]
    stage = make_stage(count, [pair for pair in pairs if generator.random() < 0.35])
    chains = [chain for start in range(count) for chain in list_chains(stage, start)]
    longest = max(map(len, chains))
    wanted = [longest - max(len(c) for c in chains if index in c) for index in range(count)]
    assert find_slacks(stage) == wanted


def test_the_longest_chain_goes_first() -> None:
    chain = [(index, index + 1) for index in range(40)]
    stage = make_stage(43, [*chain, (0, 41), (38, 42)])
    priorities = find_priorities(stage, 0, -5)
    assert priorities[:41] == [-5] * 41
    # 39 nodes of slack are more than the driver has levels for; one is one level.
    assert priorities[41:] == [0, -4]


def test_priorities_reach_the_driver() -> None:
    driver = FakeDriver()
    graph = build(driver, make_stage(3, [(0, 1)]))
    added = [call for call in driver.calls if call.name == "add_kernel_node"]
    assert [call.arguments[-1] for call in added] == [-5, -5, -4]
    assert graph.node_count == 3
