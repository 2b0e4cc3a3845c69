"""Masks on indices as users write them hide tiles of the kernels; other masks hide none."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import pytest

from tests.tracegraph.replacements.attention.masks import MASKS, hide
from tests.tracegraph.replacements.attention.test_whole_rows import (
    attend,
    attend_by_jax,
    attend_dropped,
    differentiate,
    find,
    make,
    run,
)

__all__ = ["run"]


def list_hiding(function: Any, *args: Any) -> list[bool]:
    """Returns for each kernel whether it leaves out tiles."""
    _, (backward, forward) = find(differentiate(function), *args)
    calls: Any = (backward.compute, forward.compute)
    kernels = (*calls[0].kernels, calls[1].kernel)
    return ["COUNTS[]" in each.source for each in kernels]


@pytest.mark.parametrize("name", MASKS)
def test_masks_on_indices_hide_tiles(name: str) -> None:
    args = make("q", "k", "v", rows=96)
    assert list_hiding(functools.partial(attend, edit=MASKS[name]), *args) == [True] * 3


def test_attention_of_jax_hides_tiles() -> None:
    assert list_hiding(attend_by_jax, *make("q", "k", "v", rows=96)) == [True] * 3


def test_blocks_that_see_everything_have_no_tables() -> None:
    args = make("q", "k", "v", rows=32)
    assert list_hiding(functools.partial(attend, edit=MASKS["future"]), *args) == [False] * 3


def test_other_masks_hide_none() -> None:
    args = make("q", "k", "v", rows=96)
    is_seen = jnp.asarray([True] * 20 + [False] * 76)

    def hide_loaded(query: Any, key: Any, value: Any) -> Any:
        return attend(query, key, value, lambda scores: hide(scores, is_seen))

    assert list_hiding(hide_loaded, *args) == [False] * 3
    assert list_hiding(attend_dropped, *args) == [False] * 3
    assert list_hiding(attend, *args) == [False] * 3


@pytest.mark.parametrize("name", ["triangles", "little"])
def test_results_are_as_exact_as_xlas(name: str, run: Any) -> None:
    function = functools.partial(attend, edit=MASKS[name])
    assert len(run(differentiate(function), *make("q", "k", "v", rows=48))) == 2
