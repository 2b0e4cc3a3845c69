"""Attention over a cache on a GPU: as exact as XLA's, step after step into the same caches."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import compute_exactly, jit_untried
from tests.tracegraph.replacements.attention.ways import (
    WAYS,
    attend_grouped,
    draw,
    rotate_halves,
)
from tracegraph.capturing import fastest_variant

pytestmark = pytest.mark.usefixtures("gpu", "untried")


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replacement wins: whether it is faster here is not what is tested."""
    monkeypatch.setattr(fastest_variant, "time_in_turns", lambda *_: [2e-5, 1e-5])
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "0")


def compare(one: Any, other: Any, exact: Any) -> None:
    for ours, theirs, right in zip(*map(jax.tree.leaves, (one, other, exact)), strict=True):
        wanted = np.asarray(right, np.float32)
        error = np.abs(np.asarray(ours, np.float32) - wanted).max()
        bound = np.abs(np.asarray(theirs, np.float32) - wanted).max()
        rounding = float(jnp.finfo(theirs.dtype).eps) * np.abs(wanted).max()
        assert error <= 1.5 * bound + rounding + 1e-5


def widen(tree: Any) -> Any:
    def widen_leaf(leaf: Any) -> Any:
        return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(widen_leaf, tree)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_as_exact_as_xlas(way: str) -> None:
    function, make = WAYS[way]
    args = make()
    step: Any = tg.capture(function, numerics="equivalent")
    ours = step(*args)
    assert "attention over a cache: used; 20 µs without, 10 µs with (" in step.explain(*args)
    exact = compute_exactly(function, *widen(args))
    compare(ours, jit_untried(function)(*args), exact)


@pytest.mark.parametrize(
    ("heads", "groups", "width", "length"), [(32, 8, 64, 512), (12, 4, 128, 300), (3, 3, 256, 77)]
)
def test_caches_grow_step_by_step(heads: int, groups: int, width: int, length: int) -> None:
    attend = functools.partial(attend_grouped, rotate_halves)

    def step(caches: Any, query: Any, new: Any, position: Any) -> Any:
        mixed, *written = attend(query, new, caches, position)
        return written, jnp.tanh(mixed), position + 1

    captured: Any = tg.capture(step, donate_argnums=0, numerics="equivalent")
    plain = jit_untried(step)
    shape = (2, length, groups, width)
    ours, theirs, exact = ([jnp.zeros(shape, jnp.bfloat16)] * 2 for _ in range(3))
    ours = jax.tree.map(jnp.copy, ours)
    exact = widen(exact)
    places = jnp.int32(length // 2)
    tokens = [
        (
            draw(2, 1, heads, width, seed=seed),
            [draw(2, 1, groups, width, seed=100 * part + seed) for part in (1, 2)],
        )
        for seed in range(30)
    ]
    for query, new in tokens:
        ours, mixed, later = captured(ours, query, new, places)
        theirs, other, _ = plain(theirs, query, new, places)
        with jax.default_matmul_precision("highest"):
            exact, right, _ = plain(exact, *widen((query, new)), places)
        compare((ours, mixed), (theirs, other), (exact, right))
        places = later
    nodes = captured.get_graph_data(ours, *tokens[0], places).nodes
    symbols = [node.kernel.symbol for node in nodes if node.kernel is not None]
    assert len([symbol for symbol in symbols if symbol.startswith("attention")]) == 1
    # What comes before it and behind it: angles, the next position, the activation.
    assert len(nodes) <= 6
