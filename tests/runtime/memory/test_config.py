"""Options of the allocators: what the text means, and the refusal of everything else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.oracles.error_lines import match
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.memory import config as config_module
from tracegraph.runtime.memory.config import OPTIONS, AllocatorConfig, parse_alloc_conf

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("backend:native", "backend", "native"),
        ("backend:cudaMallocAsync", "backend", "cudaMallocAsync"),
        ("provider:cuda", "provider", "cuda"),
        ("max_split_size_mb:20", "max_split_bytes", 20 * MIB),
        ("max_non_split_rounding_mb:32", "max_non_split_rounding_bytes", 32 * MIB),
        ("garbage_collection_threshold:0.8", "garbage_collection_threshold", 0.8),
        ("large_segment_size_mb:12", "large_segment_bytes", 12 * MIB),
        ("expandable_segments:True", "expandable_segments", True),
        ("expandable_segments:False", "expandable_segments", False),
        ("expandable_segments_reserve:0.5", "expandable_segments_reserve", 0.5),
        ("expandable_segments_reserve:40G", "expandable_segments_reserve", 40 << 30),
        ("release_lock_on_cudamalloc:True", "release_lock_on_cudamalloc", True),
        ("graph_capture_record_stream_reuse:True", "graph_capture_record_stream_reuse", True),
        ("per_process_memory_fraction:0", "per_process_memory_fraction", 0.0),
        ("per_process_memory_fraction:0.5", "per_process_memory_fraction", 0.5),
        ("per_process_memory_fraction:1", "per_process_memory_fraction", 1.0),
        ("throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom", True),
        ("pinned_use_cuda_host_register:True", "pinned_use_cuda_host_register", True),
        ("pinned_num_register_threads:128", "pinned_num_register_threads", 128),
        ("pinned_use_background_threads:True", "pinned_use_background_threads", True),
        ("pinned_reserve_segment_size_mb:64", "pinned_reserve_segment_bytes", 64 * MIB),
        ("pinned_max_round_threshold_mb:1", "pinned_max_round_bytes", MIB),
        ("pinned_max_cached_size_mb:0", "pinned_max_cached_bytes", 0),
        (" max_split_size_mb : 64 ", "max_split_bytes", 64 * MIB),
        ("max_split_size_mb:64,max_split_size_mb:96", "max_split_bytes", 96 * MIB),
    ],
)
def test_a_text_sets_one_field(text: str, field: str, value: Any) -> None:
    config = parse_alloc_conf(text)
    assert config == dataclasses.replace(AllocatorConfig(), **{field: value})
    assert type(getattr(config, field)) is type(value)
    assert config.text == text


def test_a_text_replaces_all_settings() -> None:
    text = "max_split_size_mb:64, roundup_power2_divisions:[64:8,>:1] ,throw_on_cudamalloc_oom:True"
    config = parse_alloc_conf(text)
    assert config.max_split_bytes == 64 * MIB
    assert config.throw_on_cudamalloc_oom
    assert config.find_divisions(84 * MIB) == 8
    for empty in ("", "  "):
        assert parse_alloc_conf(empty) == AllocatorConfig()


def test_divisions_of_a_single_value_hold_for_all_sizes() -> None:
    assert AllocatorConfig().find_divisions(84 * MIB) == 0
    config = parse_alloc_conf("roundup_power2_divisions:4")
    assert {config.find_divisions(nbytes) for nbytes in (1, MIB, 84 * MIB, 1 << 40)} == {4}


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("[64:8,128:2,256:2,512:2,1024:1,>:1]", {84: 8, 400: 2, 1: 8, 0: 8, 128: 2, 5000: 1}),
        ("[256:1,512:2,1024:4,>:8]", {255: 1, 511: 1, 512: 2, 1024: 4, 2047: 4, 2048: 8}),
        # An interval that is not named is not rounded.
        ("[64:8,256:2]", {64: 8, 128: 0, 256: 2, 512: 0}),
        ("[>:16]", {0: 16, 1: 16, 1 << 20: 16}),
        ("[ 1 : 4 , 32768 : 0 ]", {0: 4, 1: 4, 2: 0, 32768: 0, 1 << 20: 0}),
    ],
)
def test_divisions_of_a_list_hold_from_a_power_of_two(text: str, divisions: dict[int, int]) -> None:
    config = parse_alloc_conf(f"roundup_power2_divisions:{text}")
    found = {size: config.find_divisions(size * MIB) for size in divisions}
    assert found == divisions
    assert [interval for interval, _ in config.roundup_power2_divisions] == [
        1 << exponent for exponent in range(16)
    ]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("backend", "other", "native, cudaMallocAsync"),
        ("provider", "torch", "jax, cuda, host"),
        ("max_split_size_mb", "2", "20 or more"),
        ("max_split_size_mb", "19", "20 or more"),
        ("max_split_size_mb", "-20", "20 or more"),
        ("max_split_size_mb", "many", "20 or more"),
        ("max_split_size_mb", "2.5", "20 or more"),
        ("max_split_size_mb", "", "20 or more"),
        ("max_split_size_mb", "1234567890", "20 or more"),
        ("max_non_split_rounding_mb", "5", "20 or more"),
        ("garbage_collection_threshold", "1.2", "above 0 and below 1"),
        ("garbage_collection_threshold", "1", "above 0 and below 1"),
        ("garbage_collection_threshold", "0", "above 0 and below 1"),
        ("garbage_collection_threshold", "nan", "above 0 and below 1"),
        ("large_segment_size_mb", "8", "10 to 1024"),
        ("large_segment_size_mb", "21", "an even number"),
        ("large_segment_size_mb", "2048", "10 to 1024"),
        ("expandable_segments", "1", "True, False"),
        ("expandable_segments", "true", "True, False"),
        ("expandable_segments_reserve", "1.2", "at most 1.125"),
        ("expandable_segments_reserve", "0", "above 0"),
        ("expandable_segments_reserve", "0G", "above 0"),
        ("expandable_segments_reserve", "G", "above 0"),
        ("release_lock_on_cudamalloc", "none", "True, False"),
        ("graph_capture_record_stream_reuse", "yes", "True, False"),
        ("per_process_memory_fraction", "-0.1", "from 0 to 1"),
        ("per_process_memory_fraction", "1.1", "from 0 to 1"),
        ("throw_on_cudamalloc_oom", "0", "True, False"),
        ("pinned_use_cuda_host_register", "none", "True, False"),
        ("pinned_num_register_threads", "none", "power of two from 1 to 128"),
        ("pinned_num_register_threads", "1024", "power of two from 1 to 128"),
        ("pinned_num_register_threads", "3", "power of two from 1 to 128"),
        ("pinned_num_register_threads", "0", "power of two from 1 to 128"),
        ("pinned_use_background_threads", "none", "True, False"),
        ("pinned_reserve_segment_size_mb", "-1", "0 or more"),
        ("roundup_power2_divisions", "3", "a power of two"),
        ("roundup_power2_divisions", "0", "a power of two"),
        ("roundup_power2_divisions", "[64:3]", "a power of two"),
        ("roundup_power2_divisions", "[65:4]", "a power of two"),
        ("roundup_power2_divisions", "[65536:4]", "1 to 32768"),
        ("roundup_power2_divisions", "[64]", "a power of two"),
        ("roundup_power2_divisions", "[]", "a power of two"),
        ("roundup_power2_divisions", "[64:8", "a power of two"),
    ],
)
def test_a_wrong_value_is_refused(name: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_alloc_conf(f"{name}:{value}", source="a test")
    match(
        raised.value,
        f"allocator option `{name}` has the value {value!r}",
        "a test",
        "allowed: ",
        f"write {name}: ",
    )
    assert allowed in raised.value.why
    assert raised.value.anchor == "config"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("max_split_size", "max_split_size"),
        ("foo:1,bar:2", "foo"),
        ("max_split_size_mb:64,", ""),
        ("expandable_segments=True", "expandable_segments=True"),
        (":", ""),
        ("roundup_power2_divisions:4]", "roundup_power2_divisions"),
        ("max_split_size_mb:64 gc:1", "max_split_size_mb"),
    ],
)
def test_a_wrong_text_is_refused(text: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"option `{name}`"):
        parse_alloc_conf(text)


def test_an_unknown_option_is_told_all_options() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_alloc_conf("foo:1")
    match(
        raised.value,
        "there is no allocator option `foo`",
        "the allocator settings, entry 'foo:1'",
        "the options are backend, provider, max_split_size_mb",
        "write option:value",
    )


@pytest.mark.parametrize(
    "name", ["pinned_free_catch_all:True", "expandable_segments_reserve_by_class:[a:0.5]"]
)
def test_options_without_a_meaning_here_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not apply\n.*\n  why:   .*here\n"):
        parse_alloc_conf(name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("provider:jax,expandable_segments:True", "expandable_segments"),
        ("backend:cudaMallocAsync,provider:jax", "provider"),
        ("backend:cudaMallocAsync,provider:host", "provider"),
    ],
)
def test_options_that_exclude_each_other_are_refused(text: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"option `{name}` has the value .*\n.*\n.*beside"):
        parse_alloc_conf(text)


def test_the_driver_pool_warns_of_options_that_it_ignores() -> None:
    with pytest.warns(UserWarning, match="ignores max_split_size_mb, expandable_segments"):
        parse_alloc_conf("backend:cudaMallocAsync,max_split_size_mb:64,expandable_segments:True")
    parse_alloc_conf("backend:cudaMallocAsync,provider:cuda,pinned_num_register_threads:4")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("", 9 << 30), ("0.5", 4 << 30), ("1.125", 9 << 30), ("3G", 3 << 30), ("40G", 9 << 30)],
)
def test_the_address_range_is_at_most_nine_eighths(text: str, nbytes: int) -> None:
    config = parse_alloc_conf(text and f"expandable_segments_reserve:{text}")
    assert config.find_address_bytes(8 << 30) == nbytes


def test_every_option_is_in_the_table_and_sets_a_field() -> None:
    assert config_module.__doc__ is not None
    for name in OPTIONS:
        assert f"| ``{name}`` |" in config_module.__doc__
    assert config_module.__doc__.count("\n| ``") == len(OPTIONS)
    fields = {field.name for field in dataclasses.fields(AllocatorConfig)} - {"text"}
    assert {option.field for option in OPTIONS.values()} == fields
