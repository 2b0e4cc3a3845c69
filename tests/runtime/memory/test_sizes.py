"""Sizes of blocks and segments: the figures of PyTorch's caching allocator."""

from __future__ import annotations

import pytest

from tracegraph.runtime.memory.config import AllocatorConfig, parse_alloc_conf
from tracegraph.runtime.memory.sizes import (
    GIB,
    KIB,
    MIB,
    choose_segment_bytes,
    format_size,
    round_exact,
    round_size,
    round_to_division,
)

LIST_OF_DIVISIONS = "roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]"


@pytest.mark.parametrize(
    ("nbytes", "wanted"),
    [(0, 512), (1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)],
)
def test_a_request_is_rounded_to_512_bytes(nbytes: int, wanted: int) -> None:
    assert round_size(nbytes, AllocatorConfig()) == wanted


@pytest.mark.parametrize(
    ("nbytes", "divisions", "wanted"),
    [(1200, 4, 1280), (1024, 4, 1024), (1025, 4, 1280), (1793, 4, 2048), (5, 8, 8), (3, 2, 3)],
)
def test_powers_of_two_are_divided_in_equal_steps(nbytes: int, divisions: int, wanted: int) -> None:
    assert round_to_division(nbytes, divisions) == wanted


@pytest.mark.parametrize(
    ("conf", "mib", "wanted_mib"),
    [
        ("roundup_power2_divisions:4", 84, 96),
        (LIST_OF_DIVISIONS, 84, 88),
        (LIST_OF_DIVISIONS, 400, 512),
        (LIST_OF_DIVISIONS, 1500, 1500),
        ("", 84, 84),
    ],
)
def test_divisions_of_the_settings_apply(conf: str, mib: int, wanted_mib: int) -> None:
    assert round_size(mib * MIB, parse_alloc_conf(conf)) == wanted_mib * MIB


def test_small_requests_are_not_divided() -> None:
    config = parse_alloc_conf("roundup_power2_divisions:4")
    assert round_size(4 * 512, config) == 4 * 512
    assert round_size(1200, config) == 1536
    assert round_size(2049, config) == 2560


@pytest.mark.parametrize(
    ("nbytes", "wanted"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (12 * MIB, 12 * MIB),
    ],
)
def test_a_segment_is_as_large_as_in_torch(nbytes: int, wanted: int) -> None:
    assert choose_segment_bytes(nbytes, AllocatorConfig()) == wanted


def test_the_segment_of_large_blocks_can_be_set() -> None:
    config = parse_alloc_conf("large_segment_size_mb:64")
    assert choose_segment_bytes(2 * MIB, config) == 64 * MIB
    assert choose_segment_bytes(MIB, config) == 2 * MIB


@pytest.mark.parametrize(
    ("nbytes", "wanted"),
    [
        (0, 512),
        (513, 1024),
        (MIB, MIB),
        (MIB + 1, MIB + 32 * KIB),
        (128 * MIB, 128 * MIB),
        (128 * MIB + 1, 130 * MIB),
    ],
)
def test_an_arena_is_rounded_little(nbytes: int, wanted: int) -> None:
    assert round_exact(nbytes) == wanted


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1536, "1.50 KiB"), (20 * MIB, "20.00 MiB"), (3 * GIB, "3.00 GiB")],
)
def test_sizes_are_printed_with_their_unit(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
