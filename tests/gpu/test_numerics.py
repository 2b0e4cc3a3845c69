"""`numerics="equivalent"` on a GPU: merged kernels give XLA's bits, the others are as exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import find_captured, jit_untried
from tests.oracles.tree_equality import assert_same
from tracegraph.capturing import fastest_variant
from tracegraph.lowering.kernels.matmuls import few_rows, few_rows_problem
from tracegraph.runtime.definition.library_nodes import MatmulNode
from tracegraph.runtime.definition.nodes import CopyNode

pytestmark = pytest.mark.usefixtures("gpu")

SHAPES = [(8, 8), (3,), (5, 7, 11), (1000,), (256,), (257,), (64, 64), (1, 1)] * 4
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3e38, 1e-38, 1.0], np.float32
)


@pytest.fixture(autouse=True)
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replacement wins: whether it is faster here is not what is tested."""
    monkeypatch.setattr(fastest_variant, "time_in_turns", lambda *_: [2e-5, 1e-5])
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "0")


def make_leaves(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    leaves = []
    for shape in SHAPES:
        leaf = rng.normal(size=shape).astype(np.float32)
        leaf.flat[: SPECIAL.size] = np.roll(SPECIAL, seed)[: leaf.size]
        leaves.append(jnp.asarray(leaf))
    return leaves


def descend(state: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients)


def adam(state: Any, gradients: Any) -> Any:
    parameters, means, squares, count = state
    count = count + 1
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradients)
    squares = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, squares, gradients)

    def move(p: Any, m: Any, v: Any) -> Any:
        m, v = m / (1 - 0.9**count), v / (1 - 0.999**count)
        return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.01 * p)

    return jax.tree.map(move, parameters, means, squares), means, squares, count


def clip(state: Any, gradients: Any) -> Any:
    def move(p: Any, g: Any) -> Any:
        g = jnp.clip(g, -0.5, 0.5)
        return jnp.where(jnp.abs(g) > 0.1, p - jnp.maximum(g, 0.2), jnp.exp(-p) + jax.lax.rsqrt(p))

    return jax.tree.map(move, state, gradients)


def mix(state: Any, gradients: Any) -> Any:
    masters, _ = state
    masters = jax.tree.map(lambda p, g: p - 0.1 * g, masters, gradients)
    return masters, jax.tree.map(lambda p: p.astype(jnp.bfloat16), masters)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "descend": (descend, lambda: make_leaves(1)),
    "adam": (
        adam,
        lambda: (make_leaves(1), make_leaves(2), make_leaves(3), jnp.float32(2)),
    ),
    "clip": (clip, lambda: make_leaves(1)),
    "mix": (
        mix,
        lambda: (make_leaves(1), [leaf.astype(jnp.bfloat16) for leaf in make_leaves(2)]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_merged_kernels_give_the_bits_of_xlas_kernels(name: str) -> None:
    function, make_state = CASES[name]
    gradients = make_leaves(4)
    merged: Any = tg.capture(function, donate_argnums=0, numerics="equivalent")
    plain: Any = tg.capture(function, donate_argnums=0)
    ours, theirs = make_state(), make_state()
    for _ in range(3):
        ours, theirs = merged(ours, gradients), plain(theirs, gradients)
    assert_same(ours, theirs)
    report = merged.explain(ours, gradients)
    assert "small kernels merged: used; 20 µs without, 10 µs with (" in report
    nodes = [each.get_graph_data(ours, gradients).nodes for each in (merged, plain)]
    assert len(nodes[0]) < len(nodes[1]) / 2


def test_casts_in_front_of_matmuls_are_merged_and_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where cublasLt computes them all, other kernels are left around them.
    monkeypatch.setattr(fastest_variant, "count_own_matmuls", lambda _: 0)

    def compute_loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            # Whatever tiles are chosen: no kernel of a matmul reads the weights as they are.
            rounded = jax.lax.optimization_barrier(weight.astype(jnp.bfloat16))
            x = jnp.tanh(x.astype(jnp.bfloat16) @ rounded).astype(jnp.float32)
        return jnp.sum(x)

    weights = list(jax.random.normal(jax.random.key(0), (12, 64, 64)) / 8)
    x = jax.random.normal(jax.random.key(1), (64, 64))
    # Their gradients read the weights again: all are there at once, merged or not.
    merged: Any = tg.capture(jax.grad(compute_loss), numerics="equivalent")
    plain: Any = tg.capture(jax.grad(compute_loss))
    for factor in (1, 2):
        assert_same(merged(weights, factor * x), plain(weights, factor * x))
    nodes = [each.get_graph_data(weights, x).nodes for each in (merged, plain)]
    assert len(nodes[0]) <= len(nodes[1]) - len(weights) + 1


def try_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leaves out all rules but some: each that is tried takes compilations."""
    rules = tuple(rule for rule in fastest_variant.RULES if rule.name in names)
    assert len(rules) == len(names)
    monkeypatch.setattr(fastest_variant, "RULES", rules)


@pytest.mark.usefixtures("untried")
def test_an_update_of_weights_is_added_by_the_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    try_only(monkeypatch, "updates in matmuls")

    def descend(weights: Any, x: Any, gradient: Any) -> Any:
        return weights - 0.1 * jnp.matmul(x.T, gradient, precision="highest")

    x, gradient, weights = (
        jax.random.normal(jax.random.key(seed), shape)
        for seed, shape in enumerate([(640, 4096), (640, 2048), (4096, 2048)])
    )
    right = np.asarray(weights, np.float64)
    right = right - 0.1 * np.asarray(x, np.float64).T @ np.asarray(gradient, np.float64)
    step: Any = tg.capture(descend, donate_argnums=0, numerics="equivalent")
    result = step(weights, x, gradient)
    np.testing.assert_allclose(np.asarray(result, np.float64), right, rtol=1e-4, atol=1e-4)
    assert "updates in matmuls: used; 20 µs without" in step.explain(result, x, gradient)
    (stage,) = find_captured(step).lowered.definition.stages
    (node,) = [node for node in stage.nodes if not isinstance(node, CopyNode)]
    assert (node.matmul.alpha, node.matmul.beta) == (pytest.approx(-0.1), 1.0)


def test_a_sum_that_xla_splits_is_left_to_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    try_only(monkeypatch)

    def multiply(x: Any, weights: Any) -> Any:
        return jnp.tanh(jnp.matmul(x, weights, precision="highest"))

    x = jax.random.normal(jax.random.key(0), (640, 4096))
    weights = jax.random.normal(jax.random.key(1), (4096, 2048)) / 64
    whole: Any = tg.capture(multiply, numerics="equivalent")
    split: Any = tg.capture(multiply)
    results = [np.asarray(each(x, weights), np.float64) for each in (whole, split)]
    assert "sums of matmuls in one piece: used; 20 µs without" in whole.explain(x, weights)
    nodes = [
        node for stage in find_captured(whole).lowered.definition.stages for node in stage.nodes
    ]
    assert [each.matmul.d.batch_count for each in nodes if isinstance(each, MatmulNode)] == [1]
    right = np.tanh(np.asarray(x, np.float64) @ np.asarray(weights, np.float64))
    ours, theirs = (np.abs(each - right).max() for each in results)
    assert ours <= 2 * theirs < 1e-4


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [4096, 512])
def test_sums_of_a_scatter_are_made_in_32_bits(rows: int, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 40, (4, 64)), jnp.int32)
    table = jnp.asarray(rng.normal(size=(rows, 32)), dtype)
    updates = jnp.asarray(rng.normal(size=(4, 64, 32)), dtype)

    def add(table: Any, tokens: Any, updates: Any) -> Any:
        return 2 * table + jnp.zeros_like(table).at[tokens].add(updates)

    captured: Any = tg.capture(add, numerics="equivalent")
    result = np.asarray(captured(table, tokens, updates), np.float64)
    wanted = 2 * np.asarray(table, np.float64)
    np.add.at(wanted, np.asarray(tokens), np.asarray(updates, np.float64))
    assert "scattered sums in float32" in captured.explain(table, tokens, updates)
    eps = float(jnp.finfo(dtype).eps)
    # Rounded once, and the doubled table before that.
    assert np.max(np.abs(result - wanted)) <= eps * np.max(np.abs(wanted))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_value_of_each_row_is_added_with_the_bits_of_a_scatter(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(64, 4096)), dtype)
    picks = jnp.asarray(rng.integers(-4096, 8192, 64), jnp.int32)
    values = jnp.asarray(rng.normal(size=64), dtype)

    def add(table: Any, picks: Any, values: Any) -> Any:
        return table.at[jnp.arange(64), picks].add(values, mode="drop")

    captured: Any = tg.capture(add, numerics="equivalent")
    assert_same(captured(table, picks, values), jax.jit(add)(table, picks, values))
    report = captured.explain(table, picks, values)
    assert "scatters of one value per row: " in report


def test_what_is_timed_is_the_two_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "0")
    leaves = [jnp.full((8, 8), index, jnp.float32) for index in range(400)]
    step: Any = tg.capture(descend, numerics="equivalent")
    result = step(leaves, leaves)
    assert_same(result, jax.jit(descend)(leaves, leaves))
    (line,) = [each for each in step.explain(leaves, leaves).splitlines() if "merged" in each]
    # 400 nodes of a microsecond each against two or three of a few.
    assert ": used; " in line


WIDTH, HIDDEN = 512, 1024


def normalise(x: Any, gain: Any) -> Any:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * gain


def decode(x: Any, layers: Any, table: Any) -> Any:
    for layer in layers:
        hidden = normalise(x, layer["gain"])
        heads = [hidden @ layer[name] for name in ("query", "key", "value")]
        x = x + jnp.tanh(heads[0] * heads[1] + heads[2]) @ layer["out"]
        hidden = normalise(x, layer["gain"])
        x = x + (jax.nn.silu(hidden @ layer["gate"]) * (hidden @ layer["up"])) @ layer["down"]
    return x, x @ table.T


def make_layers(dtype: Any, count: int) -> Any:
    rng = np.random.default_rng(0)

    def draw(rows: int, columns: int) -> Any:
        return jnp.asarray(rng.normal(size=(rows, columns)) * rows**-0.5, dtype)

    sizes = dict.fromkeys(["query", "key", "value", "out"], (WIDTH, WIDTH))
    sizes |= {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    layers = [{name: draw(*each) for name, each in sizes.items()} for _ in range(count)]
    gain = jnp.asarray(rng.normal(size=WIDTH) + 1, dtype)
    return [layer | {"gain": gain} for layer in layers], draw(4096, WIDTH)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, jnp.bfloat16), (3, jnp.float16), (4, jnp.float32), (8, jnp.bfloat16)]
)
def test_matmuls_of_few_rows_are_as_exact_as_xlas(
    rows: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_only(monkeypatch, "matmuls of few rows")
    layers, table = make_layers(dtype, 1)
    rng = np.random.default_rng(1)
    step: Any = tg.capture(decode, numerics="equivalent")
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (layers, table))
    plain = jit_untried(decode)
    # Enough replays, each with other bytes, that a load ahead of its time is seen.
    xs = [jnp.asarray(rng.normal(size=(rows, WIDTH)), dtype) for _ in range(30)]
    ours = [jax.tree.map(np.asarray, step(x, layers, table)) for x in xs]
    theirs = [plain(x, layers, table) for x in xs]
    with jax.default_matmul_precision("highest"):
        right = [plain(x.astype(jnp.float32), *wide) for x in xs]
    report = step.explain(xs[0], layers, table)
    assert "matmuls of few rows: used; 20 µs without, 10 µs with (" in report
    for own, other, exact in zip(ours, theirs, right, strict=True):
        for one, two, wanted in zip(own, other, exact, strict=True):
            error = np.abs(np.asarray(one, np.float32) - wanted).max()
            bound = np.abs(np.asarray(two, np.float32) - wanted).max()
            assert error <= 1.5 * bound + float(jnp.finfo(dtype).eps) * np.abs(wanted).max()
    nodes = step.get_graph_data(xs[0], layers, table).nodes
    kernels = [node.kernel.symbol for node in nodes if node.kernel is not None]
    # A matmul of float32 that XLA computes with more bits is left to it.
    least = 4 if dtype == jnp.float32 else 5
    assert len([symbol for symbol in kernels if symbol.startswith("few_rows")]) >= least


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("rows", "dtype"), [(1, jnp.bfloat16), (5, jnp.float16)])
def test_greedy_tokens_are_as_good_as_xlas(
    rows: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_only(monkeypatch, "matmuls of few rows")
    layers, table = make_layers(dtype, 1)

    def choose(x: Any, layers: Any, table: Any) -> Any:
        logits = decode(x, layers, table)[1]
        return logits.argmax(-1), logits.max(-1), logits

    def choose_only(x: Any, layers: Any, table: Any) -> Any:
        return choose(x, layers, table)[:2]

    step: Any = tg.capture(choose_only, numerics="equivalent")
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (layers, table))
    plain, rng = jit_untried(choose), np.random.default_rng(1)
    eps = float(jnp.finfo(dtype).eps)
    xs = [jnp.asarray(rng.normal(size=(rows, WIDTH)), dtype) for _ in range(20)]
    for x in xs:
        ours, theirs = (
            [np.asarray(each) for each in side(x, layers, table)] for side in (step, plain)
        )
        with jax.default_matmul_precision("highest"):
            exact = np.asarray(plain(x.astype(jnp.float32), *wide)[2])
        largest = exact.max(-1)
        error = np.abs(theirs[2].astype(np.float32) - exact).max()
        bound = 2 * error + 2 * eps * np.abs(exact).max()
        places = np.arange(rows)
        assert (largest - exact[places, ours[0]] <= bound).all()
        assert np.abs(ours[1].astype(np.float32) - largest).max() <= bound
    nodes = step.get_graph_data(xs[0], layers, table).nodes
    symbols = [node.kernel.symbol for node in nodes if node.kernel is not None]
    assert [symbol.startswith("largest") for symbol in symbols].count(True) == 1
    assert symbols[-1].startswith("largest")


def test_kernels_with_early_loads_wait_for_what_the_step_writes() -> None:
    def train(weights: Any, x: Any) -> Any:
        result = x @ weights
        return weights * 0.5, result

    rng = np.random.default_rng(2)
    weights = jnp.asarray(rng.normal(size=(WIDTH, HIDDEN)), jnp.float32)
    step: Any = tg.capture(train, donate_argnums=0, numerics="equivalent")
    exact = np.asarray(weights, np.float64)
    for _ in range(20):
        x = jnp.asarray(rng.normal(size=(1, WIDTH)), jnp.float32)
        weights, result = step(weights, x)
        wanted = np.asarray(x, np.float64) @ exact
        assert np.abs(np.asarray(result) - wanted).max() <= 1e-5 * np.abs(wanted).max()
        exact *= 0.5


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("rows", [1, 13])
def test_every_tiling_is_as_exact_as_xlas(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    try_only(monkeypatch, "matmuls of few rows")
    seen: list[tuple[int, int]] = []

    def choose_next(problem: few_rows_problem.FewRows, processors: int) -> Any:
        tilings = list(few_rows_problem._list_tilings(problem))
        others = (each for each in tilings if (each.width, each.split) not in seen)
        tiling = next(others, tilings[0])
        seen.append((tiling.width, tiling.split))
        return tiling

    monkeypatch.setattr(few_rows, "choose_tiling", choose_next)

    def chain(x: Any, matrices: Any) -> Any:
        results = []
        for matrix in matrices:
            x = x @ matrix
            results.append(x)
        return results

    rng = np.random.default_rng(3)
    # Other columns for each, so that each is a kernel by itself; 12 tilings at most.
    columns = [1024, *(1024 + 8 * index for index in range(12)), 1024]
    pairs = itertools.pairwise(columns)
    draws = [rng.normal(size=pair) * pair[0] ** -0.5 for pair in pairs]
    matrices = [jnp.asarray(draw, jnp.bfloat16) for draw in draws]
    step: Any = tg.capture(chain, numerics="equivalent")
    for _ in range(5):
        x = jnp.asarray(rng.normal(size=(rows, 1024)), jnp.bfloat16)
        ours = step(x, matrices)
        for before, matrix, own in zip((x, *ours), matrices, ours, strict=False):
            wanted = np.asarray(before, np.float64) @ np.asarray(matrix, np.float64)
            assert (
                np.abs(np.asarray(own, np.float64) - wanted).max() <= 0.005 * np.abs(wanted).max()
            )
    assert set(seen) == set(itertools.product((64, 128, 256), (1, 2, 4, 8)))
