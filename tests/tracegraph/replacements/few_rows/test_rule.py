"""Matmuls of few rows in models as users write them; the kernels run on this machine's threads."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.fakes.kernels_on_host import call_on_host
from tracegraph.ir.graph import Graph, Literal
from tracegraph.ir.verifier import verify_graph
from tracegraph.jax_internals import bind_op
from tracegraph.passes.pipeline import DEFAULT_PASSES, run_passes
from tracegraph.replacements.few_rows import kernels
from tracegraph.replacements.few_rows.rule import FewRowMatmuls
from tracegraph.replacements.match import Machine, Match, Rule
from tracegraph.replacements.rules import open_graph
from tracegraph.replacements.splice import splice_matches
from tracegraph.runtime.definition.code_target import CompiledSource
from tracegraph.tracing.trace import trace_function

WIDTH, HIDDEN, HEADS = 256, 192, 4
BF16 = jnp.bfloat16


def compile_nothing(source: str, options: tuple[str, ...]) -> CompiledSource:
    del options
    return CompiledSource(b"", f".version 8.8\n// {len(source)}")


# Few multiprocessors, so that few threads of this machine stand for a launch.
GPU = Machine("9.0", 4, compile_nothing)


def build(function: Any, *args: Any) -> Graph:
    graph = run_passes(trace_function(function, args, {}, name="f").graph, DEFAULT_PASSES)[0]
    return open_graph(graph)


def draw(*shape: int, dtype: Any = BF16, seed: int = 0) -> Any:
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, dtype)


def evaluate(graph: Graph, args: Any) -> dict[Any, Any]:
    """Returns every value of a graph, rounded as its op says."""
    given = dict(zip(graph.inputs, jax.tree.leaves(args), strict=True))
    given |= {constant.value: constant.array for constant in graph.constants}
    results = [result for op in graph.ops for result in op.results]

    def compute(*leaves: Any) -> list[Any]:
        known = dict(zip(given, leaves, strict=True))
        for op in graph.ops:
            operands = [
                each.value if isinstance(each, Literal) else known[each] for each in op.operands
            ]
            known.update(zip(op.results, bind_op(op, operands), strict=True))
        return [known[result] for result in results]

    # Compiled at once, which takes a fraction of compiling each op.
    compiled = jax.jit(compute, compiler_options={"xla_allow_excess_precision": False})
    return given | dict(zip(results, compiled(*given.values()), strict=True))


def check(
    monkeypatch: pytest.MonkeyPatch, function: Any, *args: Any, rule: Rule | None = None
) -> list[Match]:
    """Returns the matches of a function, after running the kernel of each."""
    graph = build(function, *args)
    matches = (rule or FewRowMatmuls()).find(graph, GPU)
    verify_graph(splice_matches(graph, matches))
    run_kernels(monkeypatch, evaluate(graph, args), matches)
    return matches


def run_kernels(
    monkeypatch: pytest.MonkeyPatch, known: Mapping[Any, Any], matches: Sequence[Match]
) -> None:
    """Runs the kernel of each match on the values of its graph, and compares what it returns."""
    monkeypatch.setattr(kernels, "call_kernel", call_on_host)
    for match in matches:
        given = [known[value] for value in match.inputs]
        found, wanted = match.compute(*given), jax.jit(match.reference)(*given)
        for value, one, right in zip(match.results, found, wanted, strict=True):
            assert (one.shape, one.dtype) == (value.shape, value.dtype)
            bound = float(jnp.finfo(value.dtype).eps) + 1e-5
            scale = np.abs(np.asarray(right)).max()
            assert np.isfinite(np.asarray(one, np.float32)).all()
            assert np.abs(np.asarray(one, np.float32) - np.asarray(right)).max() <= bound * scale
            # What the graph computes rounds more often.
            original = np.asarray(known[value], np.float32)
            assert np.abs(original - np.asarray(right)).max() <= 0.05 * scale


def describe(matches: list[Match]) -> list[str]:
    return [f"{len(match.inputs)} -> {len(match.results)}" for match in matches]


def normalise(x: Any, gain: Any) -> Any:
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * gain


def run_gated_layer(x: Any, gain: Any, gate: Any, up: Any, down: Any) -> Any:
    hidden = normalise(x, gain)
    return x + (jax.nn.silu(hidden @ gate) * (hidden @ up)) @ down


def make_gated(*lead: int) -> Any:
    gain = draw(WIDTH)
    return (
        draw(*lead, WIDTH),
        gain,
        draw(WIDTH, HIDDEN),
        draw(WIDTH, HIDDEN, seed=1),
        draw(HIDDEN, WIDTH),
    )


@pytest.mark.parametrize("lead", [(), (1,), (1, 1), (3,), (2, 2)])
def test_a_gated_layer_is_two_kernels(lead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    matches = check(monkeypatch, run_gated_layer, *make_gated(*lead))
    assert describe(matches) == ["4 -> 1", "3 -> 1"]


def test_queries_keys_and_values_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def project(x: Any, gain: Any, query: Any, key: Any, value: Any) -> Any:
        hidden = normalise(x, gain)
        heads = [(hidden @ each).reshape(1, -1, 64) for each in (query, key, value)]
        # What is needed in between comes first.
        return jnp.sin(heads[0]), jnp.cos(heads[1])[:, 0] @ draw(64, 8), heads[2][..., ::-1]

    args = draw(1, WIDTH), draw(WIDTH), draw(WIDTH, 256), draw(WIDTH, 128), draw(WIDTH, 128, seed=1)
    matches = check(monkeypatch, project, *args)
    assert describe(matches) == ["5 -> 3"]


def test_a_layer_with_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(x: Any, scale: Any, shift: Any, up: Any, bias: Any, down: Any, last: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        hidden = centred * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale + shift
        return jax.nn.gelu(hidden @ up + bias) @ down + last + x

    f32 = functools.partial(draw, dtype=jnp.float32)
    args = (
        f32(2, WIDTH),
        f32(WIDTH),
        f32(WIDTH, seed=1),
        f32(WIDTH, HIDDEN),
        f32(HIDDEN),
        f32(HIDDEN, WIDTH),
        f32(WIDTH, seed=2),
    )
    matches = check(monkeypatch, layer, *args)
    assert describe(matches) == ["5 -> 1", "4 -> 1"]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: x @ w.T, [(1, WIDTH), (HIDDEN, WIDTH)]),
        (lambda x, w: x @ w.T, [(3, WIDTH), (HIDDEN, WIDTH)]),
        (lambda x, w: w @ x, [(WIDTH,), (HIDDEN, WIDTH)]),
        (lambda x, w: w.T @ x, [(WIDTH,), (WIDTH, HIDDEN)]),
        (lambda x, w: jnp.einsum("bd,dhk->bhk", x, w), [(2, WIDTH), (WIDTH, 4, 64)]),
        (lambda x, w: jnp.einsum("bhk,hkd->bd", x, w), [(2, 4, 64), (4, 64, HIDDEN)]),
        (lambda x, w: (x @ w).astype(jnp.float32), [(1, 1, WIDTH), (WIDTH, HIDDEN)]),
        (
            lambda x, w: lax.dot(x, w, preferred_element_type=jnp.float32),
            [(1, WIDTH), (WIDTH, 128)],
        ),
    ],
)
def test_matmuls_as_they_are_written(
    function: Callable[..., Any], shapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    matches = check(monkeypatch, function, *(draw(*shape) for shape in shapes))
    assert describe(matches) == ["2 -> 1"]


def draw_bytes(*shape: int, dtype: Any) -> Any:
    values = np.random.default_rng(3).integers(-127, 128, shape)
    return jnp.asarray(values).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize(
    ("function", "shape", "inputs"),
    [
        (lambda x, w, s: (x @ w.astype(BF16)) * s, (WIDTH, 384), 3),
        (lambda x, w, s: x @ (w.astype(BF16) * s), (WIDTH, 384), 3),
        (lambda x, w, s: x @ (s[None] * w.astype(jnp.float32)).astype(BF16), (WIDTH, 384), None),
        (lambda x, w, s: x @ (w.astype(BF16) * s[:, None]).T, (384, WIDTH), 3),
        (lambda x, w, s: x @ w.astype(BF16).T + s, (384, WIDTH), 3),
    ],
)
def test_bytes_with_a_scale_for_each_column(
    function: Any, shape: Any, inputs: int | None, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = draw(2, WIDTH), draw_bytes(*shape, dtype=dtype), draw(384)
    (match,) = check(monkeypatch, function, *args)
    kinds = [str(each.aval.dtype) for each in match.inputs]
    # Where the weights are rounded in between, they are what XLA makes of them.
    assert (jnp.dtype(dtype).name in kinds) == (inputs is not None)
    assert inputs is None or len(kinds) == inputs


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("many rows", lambda: (jnp.dot, draw(17, WIDTH), draw(WIDTH, HIDDEN))),
        ("a small matrix", lambda: (jnp.dot, draw(1, 64), draw(64, 64))),
        (
            "integers",
            lambda: (jnp.dot, jnp.ones((1, WIDTH), jnp.int8), jnp.ones((WIDTH, 512), jnp.int8)),
        ),
        ("a batch", lambda: (jnp.matmul, draw(2, 1, WIDTH), draw(2, WIDTH, HIDDEN))),
        (
            "an algorithm",
            lambda: (
                functools.partial(jnp.dot, precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X3),
                draw(1, WIDTH, dtype=jnp.float32),
                draw(WIDTH, HIDDEN, dtype=jnp.float32),
            ),
        ),
        ("lines of odd length", lambda: (jnp.dot, draw(1, WIDTH), draw(WIDTH, HIDDEN + 1))),
    ],
)
def test_what_has_no_kernel_stays(function: str, args: Any) -> None:
    call, *operands = args()
    assert FewRowMatmuls().find(build(call, *operands), GPU) == [], function


def test_kernels_need_a_gpu_with_clusters() -> None:
    graph = build(jnp.dot, draw(1, WIDTH), draw(WIDTH, HIDDEN))
    assert len(FewRowMatmuls().find(graph, GPU)) == 1
    assert FewRowMatmuls().find(graph, None) == []
    assert FewRowMatmuls().find(graph, Machine("8.9", 128, compile_nothing)) == []


def test_a_matrix_that_depends_on_its_own_rows_matmul_ends_in_two_kernels() -> None:
    def function(x: Any, first: Any) -> Any:
        one = x @ first
        # Shares the rows, and comes after a result.
        return x @ (first * one[0, 0])

    graph = build(function, draw(1, WIDTH), draw(WIDTH, HIDDEN))
    matches = FewRowMatmuls().find(graph, GPU)
    verify_graph(splice_matches(graph, matches))
    assert len(matches) <= 1


def test_rows_of_an_op_with_several_results_and_of_one_without_operands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def function(x: Any, w: Any) -> Any:
        first, second = lax.split(x, (WIDTH, WIDTH), axis=1)
        rows = first * second + lax.iota(jnp.float32, WIDTH)[None]
        return lax.top_k(rows @ w, 3)[0]

    f32 = functools.partial(draw, dtype=jnp.float32)
    matches = check(monkeypatch, function, f32(1, 2 * WIDTH), f32(WIDTH, HIDDEN))
    assert describe(matches) == ["4 -> 1"]


def test_the_ops_of_a_model_become_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    args = make_gated(1)
    graph = build(run_gated_layer, *args)
    spliced = splice_matches(graph, FewRowMatmuls().find(graph, GPU))
    names = Counter(op.name for op in spliced.ops)
    assert names["ffi_call"] == 2
    assert not names.keys() & {"dot_general", "logistic", "rsqrt", "add", "mul", "reduce_sum"}
    del monkeypatch


def _make_linen() -> Any:
    linen = pytest.importorskip("flax.linen")

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            hidden = linen.RMSNorm(dtype=BF16)(x)
            hidden = linen.gelu(linen.Dense(HIDDEN, dtype=BF16)(hidden))
            return x + linen.Dense(WIDTH, dtype=BF16, use_bias=False)(hidden)

    layer = Layer()
    x = draw(1, 1, WIDTH)
    weights = jax.tree.map(lambda leaf: leaf.astype(BF16), layer.init(jax.random.key(0), x))
    return layer.apply, weights, x


def _make_nnx() -> Any:
    nnx = pytest.importorskip("flax.nnx")
    norm = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))
    up, down = (
        nnx.Linear(WIDTH, HIDDEN, rngs=nnx.Rngs(1)),
        nnx.Linear(HIDDEN, WIDTH, rngs=nnx.Rngs(2)),
    )
    definition, state = nnx.split((norm, up, down))

    def apply(state: Any, x: Any) -> Any:
        first, second, third = nnx.merge(definition, state)
        return x + third(jax.nn.relu(second(first(x))))

    return apply, state, draw(2, WIDTH, dtype=jnp.float32)


def _make_equinox() -> Any:
    equinox = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0))
    up, down = (
        equinox.nn.Linear(*sizes, key=key)
        for sizes, key in zip([(WIDTH, HIDDEN), (HIDDEN, WIDTH)], keys, strict=True)
    )
    arrays, rest = equinox.partition((up, down), equinox.is_array)

    def apply(arrays: Any, x: Any) -> Any:
        one, other = equinox.combine(arrays, rest)
        return x + jax.vmap(lambda row: other(jax.nn.silu(one(row))))(x)

    return apply, arrays, draw(2, WIDTH, dtype=jnp.float32)


@pytest.mark.parametrize("make", [_make_linen, _make_nnx, _make_equinox])
def test_libraries_of_layers(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    function, *args = make()
    assert len(check(monkeypatch, function, *args)) == 2
