"""Cached choices: what was chosen is found again; a file that is not that is a miss."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import pytest

from tracegraph.kernel_caching.cached_choice import RuleOutcomes, add_choice, find_choice
from tracegraph.kernel_caching.cached_lowering import CacheSlot
from tracegraph.replacements.report import Replacement
from tracegraph.runtime.saving.kernel_store import KernelStore

CHOSEN = (
    Replacement("sums", (0, 2), ("a.py:1 in f", "a.py:3 in f"), "", 12.5, 10.0),
    Replacement("sums", (1,), ("a.py:2 in f",), "its error is 1, where XLA's is 0.5"),
)


@pytest.fixture
def slot(tmp_path: pathlib.Path) -> CacheSlot:
    return make_slot(KernelStore(tmp_path / "kernels", 1 << 20), "abc")


def make_slot(store: KernelStore, key: str) -> CacheSlot:
    return CacheSlot(store, "step", "", lambda: key)


def read_file(slot: CacheSlot) -> tuple[str, Any]:
    (path,) = slot.store.path.glob("*.tgk")
    file = slot.store.find(path.stem)
    assert file is not None
    return path.stem, file.content


def test_what_was_stored_is_found_under_the_same_key_only(slot: CacheSlot) -> None:
    assert find_choice(slot) is None
    add_choice(slot, CHOSEN)
    assert find_choice(slot) == RuleOutcomes(CHOSEN)
    assert find_choice(make_slot(slot.store, "abd")) is None
    # The program itself is in another file.
    assert slot.store.find("abc") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda content: {**content, "key": "0" * 64},
        lambda content: {"key": content["key"]},
        lambda _: ["choice"],
        lambda content: {**content, "choice": {}},
        lambda content: {**content, "choice": {**content["choice"], "value": ["r", 99]}},
    ],
)
def test_a_file_that_is_no_choice_is_a_miss(slot: CacheSlot, change: Any, caplog: Any) -> None:
    add_choice(slot, CHOSEN)
    key, content = read_file(slot)
    slot.store.add(key, change(content), ())
    with caplog.at_level(logging.WARNING, "tracegraph"):
        assert find_choice(slot) is None
    assert "the kernel cache drops" in caplog.text
    assert slot.store.find(key) is None
