"""What a call of a captured train step does besides its launch, in calls that can be counted.

On a CudaDevice over host memory; the driver is a fake whose own calls are not counted.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost, place
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.paths import ROOT
from tracegraph.replaying import tree_watch
from tracegraph.replaying.dict_tags import has_tags
from tracegraph.replaying.dict_watch import has_watchers
from tracegraph.runtime.streams.stream_capture import thread_state

LAYERS = tuple(f"{ROOT / name}/" for name in ("tracegraph", "runtime"))
# Read by the fake driver only: the real one reads parameters from memory.
FAKED = str(ROOT / "runtime" / "cuda" / "driver" / "parameters.py")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    # Another test of this process may have chosen a stream for its thread.
    monkeypatch.setattr(thread_state, "streams", [])
    return capture_for_gpu(monkeypatch)


def make_state(blocks: int) -> Any:
    """Returns a state as a model and its optimizer have: dicts in a list in a dict in a tuple."""
    block = {name: np.zeros(2, np.float32) for name in "abcdef"}
    parameters = {"table": np.zeros(2, np.float32), "blocks": [dict(block) for _ in range(blocks)]}
    return parameters, jax.tree.map(np.copy, parameters), np.float32(0)


def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    parameters, moments, count = state
    moments = jax.tree.map(lambda m: m + x.sum(), moments)
    parameters = jax.tree.map(lambda p, m: p + m * y.sum(), parameters, moments)
    return (parameters, moments, count + 1), parameters["table"].sum()


class Loop:
    """A train loop whose two inputs alternate between two batches."""

    def __init__(self, blocks: int) -> None:
        self.step = tg.capture(step, donate_argnums=0, verify=False)
        self.batches = [(place([i, 1]), place([i, 2, 3])) for i in (1, 2)]
        self.state, self.calls = make_state(blocks), 0
        self.loss: Any = None
        for _ in range(4):
            self.advance()

    def advance(self) -> None:
        batch = self.batches[self.calls & 1]
        self.calls += 1
        self.state, self.loss = self.step(self.state, *batch)


def count_calls(action: Callable[[], Any]) -> Counter[str]:
    """Returns how often each function of ours is entered."""
    found: Counter[str] = Counter()

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(LAYERS) and code.co_filename != FAKED
        if event == "call" and is_ours:
            found[code.co_name] += 1

    # A collection would run finalisers of what other tests left.
    gc.disable()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def test_a_call_enters_few_functions_however_many_leaves_there_are(device: CudaOnHost) -> None:
    small, large = Loop(1), Loop(8)
    few, many = count_calls(small.advance), count_calls(large.advance)
    # Up to a few words of objects are read without a function of ours.
    assert max(few.pop("_take", 0), many.pop("_take", 0)) <= 3
    assert few == many
    # The call itself, two inputs, the state, one result, the launch, the leaves that take turns.
    assert sum(few.values()) <= 30, few
    assert "_call_generally" not in few


def test_a_call_asks_the_driver_for_pointers_and_a_launch(device: CudaOnHost) -> None:
    loop, driver = Loop(2), device.driver
    before = len(driver.calls)
    loop.advance()
    names = Counter(call.name for call in driver.calls[before:])
    # The fake's launch does the work of its one kernel by itself.
    assert names == {"send": 3, "launch": 1}


def test_the_dicts_of_a_state_are_not_compared(
    device: CudaOnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, compared, is_told = Loop(2), [], has_watchers() or has_tags()
    compare = tree_watch._Items.are_same

    def are_same(items: Any) -> bool:
        # Their identities: a dict that is held here would not be returned again.
        compared.extend(id(each) for each in items._containers if isinstance(each, dict))
        return compare(items)

    monkeypatch.setattr(tree_watch._Items, "are_same", are_same)
    for _ in range(3):
        loop.advance()
    # Two trees of three dicts each, those passed and those that are returned.
    assert len(compared) == (0 if is_told else 3 * 12)
    # Changed in place: seen, and then watched again.
    loop.state[0]["blocks"][1]["a"] = np.full(2, 50, np.float32)
    loop.advance()
    assert float(loop.state[0]["blocks"][1]["a"][0]) > 50
    compared.clear()
    loop.advance()
    loop.advance()
    # What was changed is not returned again, so that one call returns new dicts.
    assert len(compared) == (0 if is_told else 12 + 6)


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_loop_computes_what_jit_does(device: CudaOnHost, blocks: int) -> None:
    loop, state, jitted = Loop(blocks), make_state(blocks), jax.jit(step)
    losses = []
    for index in range(loop.calls):
        state, loss = jitted(state, *loop.batches[index & 1])
        losses.append(float(loss))
    jax.tree.map(np.testing.assert_allclose, loop.state, state)
    np.testing.assert_allclose(float(loop.loss), losses[-1])
