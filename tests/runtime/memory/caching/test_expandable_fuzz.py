"""Random operations on expandable segments against the slow model: all that the fuzz compares."""

from __future__ import annotations

import pytest

from tests.oracles.expandable_lockstep import ExpandableLockstep
from tests.runtime.memory.caching.test_allocator_fuzz import CAPACITY_BYTES, RandomProgram
from tracegraph.runtime.memory.config import parse_alloc_conf

SETTINGS = (
    "",
    ",graph_capture_record_stream_reuse:True",
    ",max_split_size_mb:20",
    ",garbage_collection_threshold:0.4,per_process_memory_fraction:0.8",
    ",large_segment_size_mb:12,roundup_power2_divisions:4",
)
SEEDS = range(10)
OPERATIONS_PER_SEED = 3000


class ExpandableProgram(RandomProgram):
    def __init__(self, seed: int, settings: str) -> None:
        super().__init__(seed, "")
        config = parse_alloc_conf(f"expandable_segments:True{settings}")
        self.lockstep: ExpandableLockstep = ExpandableLockstep(config, CAPACITY_BYTES)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_operations_agree_with_the_model(seed: int) -> None:
    ExpandableProgram(seed, SETTINGS[seed % len(SETTINGS)]).run(OPERATIONS_PER_SEED)
