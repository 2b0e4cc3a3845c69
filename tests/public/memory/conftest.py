"""Shared by the tests of tg.memory: what other tests leave behind does not count."""

from __future__ import annotations

import gc

import jax
import pytest

import tracegraph as tg
from tests.fakes.devices import forget_other_allocators


@pytest.fixture(scope="module", autouse=True)
def nothing_allocated() -> None:
    """JAX keeps what it compiled, and with a callback whatever that holds: a graph, for example.

    Modules of tests keep functions that they have captured.
    """
    if tg.memory.memory_reserved():
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()
        for each in gc.get_objects():
            if isinstance(each, tg.GraphedFunction):
                each.release()
        gc.collect()
        tg.memory.empty_cache()
        gc.freeze()
    assert tg.memory.memory_allocated() == 0


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of other folders leave the allocators of their fake devices behind."""
    forget_other_allocators(monkeypatch)
