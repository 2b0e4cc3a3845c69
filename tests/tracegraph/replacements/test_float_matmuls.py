"""Float32 matmuls on tensor cores: which are found, and that the kernel gives what they give."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.fakes.kernels_on_host import call_on_host
from tests.fakes.warpgroups import run_warpgroups_on_host
from tests.tracegraph.replacements.few_rows.test_rule import GPU, build, evaluate
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements import float_matmuls
from tracegraph.replacements.float_matmuls import FloatMatmuls
from tracegraph.replacements.rules import RULES
from tracegraph.replacements.splice import splice_matches

RULE = FloatMatmuls()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_matmuls, "XLA_OPERATIONS_A_US", 1.0)


def draw(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape).astype(np.float32))


def exact(function: Any) -> Any:
    """Returns a function whose matmuls have the highest precision."""

    def run(*args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*args)

    return run


def differentiate(weights: Any, x: Any) -> Any:
    return jax.grad(lambda weights: jnp.tanh(x @ weights).sum())(weights)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function with matmuls.

    Attributes:
        function: of arrays.
        shapes: of these.
        ways: for each kernel whether memory has its sides by depth.
    """

    function: Any
    shapes: tuple[tuple[int, ...], ...]
    ways: tuple[tuple[bool, bool], ...]


CASES = {
    "rows by columns": Case(jnp.matmul, ((64, 32), (32, 68)), ((True, False),)),
    "a transposed side": Case(lambda x, y: x.T @ y, ((32, 64), (32, 68)), ((False, False),)),
    "both transposed": Case(lambda x, y: x.T @ y.T, ((32, 64), (68, 32)), ((False, True),)),
    "a transposed result": Case(lambda x, y: (x @ y).T * 2, ((68, 32), (32, 64)), ((False, True),)),
    "one array twice": Case(lambda x: x @ x.T, ((64, 32),), ((True, True),)),
    "more axes": Case(
        lambda x, y: jnp.einsum("abd,def->abef", x, y), ((2, 32, 8), (8, 4, 16)), ((True, False),)
    ),
    "two axes of depth": Case(
        lambda x, y: jnp.einsum("abd,abe->de", x, y), ((2, 8, 64), (2, 8, 68)), ((False, False),)
    ),
    "a gradient": Case(differentiate, ((64, 68), (64, 64)), ((True, False), (False, False))),
    "depths in parts": Case(lambda x, y: (x @ y) ** 2, ((64, 256), (256, 64)), ((True, False),)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_what_the_matmul_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    arrays = [draw(*shape) for shape in case.shapes]
    graph = build(exact(case.function), *arrays)
    matches = RULE.find(graph, GPU)
    found: list[Any] = [match.compute for match in matches]
    texts = [each.kernel.source for each in found]
    for text, (left, right) in zip(texts, case.ways, strict=True):
        assert f"LEFT_BY_DEPTH = {int(left)};" in text
        assert f"RIGHT_BY_DEPTH = {int(right)};" in text
    replaced = splice_matches(graph, matches)
    verify_graph(replaced)
    assert "dot_general" not in [op.name for op in replaced.ops]

    def call(*args: Any) -> Any:
        return call_on_host(*args, run=lambda kernel, stored, _: launch(kernel, stored))

    def launch(kernel: Any, stored: Any) -> None:
        run_warpgroups_on_host(kernel, stored)

    monkeypatch.setattr(float_matmuls, "call_kernel", call)
    known = evaluate(graph, arrays)
    for match in matches:
        inputs = [known[value] for value in match.inputs]
        (result,) = match.compute(*inputs)
        (wanted,) = match.reference(*inputs)
        assert wanted.shape == result.shape == match.results[0].shape
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(wanted, known[match.results[0]], rtol=1e-5, atol=1e-4)


def test_the_reference_is_more_exact_than_one_sum() -> None:
    x, y = draw(64, 4000), draw(4000, 64)
    (match,) = RULE.find(build(exact(jnp.matmul), x, y), GPU)
    right = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    products = jnp.moveaxis(x[:, :, None] * y[None], 1, 0)
    plain, _ = lax.scan(lambda sums, each: (sums + each, None), jnp.zeros((64, 64)), products)
    (result,) = match.reference(x, y)
    errors = [np.abs(np.asarray(each) - right).max() for each in (result, plain)]
    assert errors[0] < errors[1] / 4


def test_parts_of_the_depths_are_added_up() -> None:
    (match,) = RULE.find(build(exact(jnp.matmul), draw(64, 256), draw(256, 64)), GPU)
    call: Any = match.compute
    assert call.partial == (4, 64, 64)
    assert match.terms == 256


OTHERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "the default precision": (jnp.matmul, (draw(64, 32), draw(32, 64))),
    "half": (exact(jnp.matmul), (draw(64, 32).astype(jnp.bfloat16),) * 2),
    "a batch": (exact(jnp.matmul), (draw(2, 64, 32), draw(2, 32, 64))),
    "a depth between lines": (
        exact(lambda x, y: jnp.einsum("adb,dc->abc", x, y)),
        (draw(4, 32, 16), draw(32, 64)),
    ),
    "depths in two orders": (
        exact(lambda x, y: jnp.einsum("mab,ban->mn", x, y)),
        (draw(64, 4, 8), draw(8, 4, 64)),
    ),
    "no depth": (exact(jnp.matmul), (draw(64, 0), draw(0, 64))),
    "no rows": (exact(jnp.matmul), (draw(0, 64), draw(64, 64))),
    "odd lines": (exact(jnp.matmul), (draw(64, 30), draw(30, 64))),
    "a wider result": (
        exact(lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32)),
        (draw(64, 32).astype(jnp.float16), draw(32, 64).astype(jnp.float16)),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_matmuls_stay(name: str) -> None:
    function, arrays = OTHERS[name]
    if name == "half":
        arrays = arrays[0], arrays[1].T
    assert RULE.find(build(function, *arrays), GPU) == []


def test_a_transposed_result_that_is_needed_both_ways_is_transposed_by_xla() -> None:
    def both(x: Any, y: Any) -> Any:
        product = x @ y
        return product, jnp.sin(product.T)

    (match,) = RULE.find(build(exact(both), draw(64, 32), draw(32, 68)), GPU)
    assert match.op.name == "dot_general"


def test_other_gpus_and_the_host_are_left_alone() -> None:
    graph = build(exact(jnp.matmul), draw(64, 32), draw(32, 64))
    assert len(RULE.find(graph, GPU)) == 1
    assert RULE.find(graph, None) == []
    for architecture in ("8.0", "10.0"):
        assert RULE.find(graph, dataclasses.replace(GPU, architecture=architecture)) == []


@pytest.mark.parametrize(
    ("sizes", "is_found"),
    [
        # Measured on an H100: twice as fast.
        ((640, 4096, 2048), True),
        ((4096, 640, 2048), True),
        ((640, 2048, 1024), True),
        ((1024, 1024, 1024), True),
        # Half of a tile or more is not the result's, or the start takes longer than the rest.
        ((64, 4096, 1024), False),
        ((4096, 4096, 16), False),
        ((256, 256, 256), False),
    ],
)
def test_what_would_be_no_faster_is_not_found(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, *, is_found: bool
) -> None:
    monkeypatch.undo()
    rows, depth, columns = sizes
    arguments = [
        jax.ShapeDtypeStruct(each, jnp.float32) for each in [(rows, depth), (depth, columns)]
    ]
    graph = build(exact(jnp.matmul), *arguments)
    assert bool(RULE.find(graph, dataclasses.replace(GPU, processors=132))) == is_found


def test_it_comes_before_the_updates_in_matmuls() -> None:
    names = [rule.name for rule in RULES]
    assert names.index(RULE.name) < names.index("updates in matmuls")
