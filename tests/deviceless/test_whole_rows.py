"""Attention over whole rows compiled for an H200: three kernels a layer, nothing moved for them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.deviceless.pipeline import lower_with_own_kernels, make_replaced_request
from tests.deviceless.test_few_rows import LOCAL
from tracegraph.lowering.xla.machine_code import _find_text, _read_operations
from tracegraph.replacements.attention.whole_rows import WholeRows
from tracegraph.replacements.match import Machine
from tracegraph.runtime.cuda.libraries.nvrtc import compile_source
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, list_nested
from tracegraph.runtime.definition.nodes import KernelNode

pytest.importorskip("cuda.bindings.nvrtc")

COMPILE = functools.partial(compile_source, "9.0")
H200 = Machine("9.0", 132, COMPILE)
LAYERS, BATCH, HEADS, WIDTH = 2, 16, 4, 64
SIZE = HEADS * WIDTH


def attend(x: Any, weights: Any) -> Any:
    query, key, value = (
        part.reshape(*x.shape[:2], HEADS, WIDTH).transpose(0, 2, 1, 3)
        for part in jnp.split(x @ weights, 3, axis=-1)
    )
    scores = query @ key.transpose(0, 1, 3, 2) * WIDTH**-0.5
    is_past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    mixed = jax.nn.softmax(jnp.where(is_past, scores, -1e9)) @ value
    return mixed.transpose(0, 2, 1, 3).reshape(x.shape)


def train(weights: Any, x: Any) -> Any:
    def compute_loss(weights: Any) -> Any:
        hidden = x
        for each in weights:
            hidden = hidden + attend(hidden, each)
        return (hidden.astype(jnp.float32) ** 2).mean()

    loss, gradients = jax.value_and_grad(compute_loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


@dataclasses.dataclass(frozen=True)
class Step:
    """A step compiled with the kernels, and without.

    Attributes:
        length: positions of a sequence.
        itemsize: bytes of an element.
        replaced: the nodes with the kernels.
        plain: the nodes without.
    """

    length: int
    itemsize: int
    replaced: list[KernelNode]
    plain: list[KernelNode]

    @property
    def own(self) -> list[KernelNode]:
        """The kernels of ours."""
        return [node for node in self.replaced if node.code.symbol.startswith("tiled_attention")]


@pytest.fixture(scope="module", params=[("bfloat16", 256), ("float32", 48)])
def step(h200: Any, request: pytest.FixtureRequest) -> Step:
    dtype, length = request.param
    weights = [jax.ShapeDtypeStruct((SIZE, 3 * SIZE), dtype)] * LAYERS
    arguments = [weights, jax.ShapeDtypeStruct((BATCH, length, SIZE), dtype)]

    def lower(rules: Any) -> list[KernelNode]:
        replaced = make_replaced_request(train, arguments, rules, H200)
        (stage,) = lower_with_own_kernels(replaced, h200, COMPILE).definition.stages
        return [node for node in stage.nodes if isinstance(node, KernelNode)]

    return Step(length, jnp.dtype(dtype).itemsize, lower([WholeRows()]), lower([]))


def test_a_layer_has_three_kernels_and_its_scores_are_nowhere(step: Step) -> None:
    assert len(step.own) == 3 * LAYERS
    # Products, softmax, both ways; splitting and joining.
    assert len(step.replaced) <= len(step.plain) - 9 * LAYERS
    scores = step.itemsize * BATCH * HEADS * step.length**2
    sizes = [
        {use.nbytes for node in nodes for use, _ in node.uses}
        for nodes in (step.replaced, step.plain)
    ]
    assert (scores in sizes[0], scores in sizes[1]) == (False, True)


def test_gradients_are_parts_of_one_array(step: Step) -> None:
    for node in step.own:
        written = {use for use, is_written in node.uses if is_written}
        if "columns" in node.code.symbol:
            (use,) = written
            assert use.nbytes == step.itemsize * BATCH * step.length * 3 * SIZE


def test_registers_are_enough(step: Step) -> None:
    for code in {node.code for node in step.own}:
        operations = {operation for operation, _ in _read_operations(_find_text(code))}
        assert not operations & {*LOCAL}


def train_in_loop(weights: Any, x: Any) -> Any:
    @jax.checkpoint
    def apply(hidden: Any, each: Any) -> Any:
        return hidden + attend(hidden, each), None

    def compute_loss(weights: Any) -> Any:
        return (lax.scan(apply, x, weights)[0].astype(jnp.float32) ** 2).mean()

    loss, gradient = jax.value_and_grad(compute_loss)(weights)
    return weights - 0.1 * gradient, loss


@pytest.mark.parametrize("layers", [LAYERS, 40])
def test_layers_of_a_loop_have_them_too(layers: int, h200: Any) -> None:
    arguments = [
        jax.ShapeDtypeStruct((layers, SIZE, 3 * SIZE), jnp.bfloat16),
        jax.ShapeDtypeStruct((BATCH, 64, SIZE), jnp.bfloat16),
    ]
    request = make_replaced_request(train_in_loop, arguments, [WholeRows()], H200)
    (stage,) = lower_with_own_kernels(request, h200, COMPILE).definition.stages
    nodes = [node for node in list_nested(stage.nodes) if isinstance(node, KernelNode)]
    symbols = [node.code.symbol for node in nodes]
    own = [symbol for symbol in symbols if symbol.startswith("tiled_attention")]
    assert len(own) == 3 * layers


def test_a_loop_without_a_known_end_has_them_in_its_body(h200: Any) -> None:
    def solve(x: Any, weights: Any) -> Any:
        def goes_on(carry: Any) -> Any:
            return (carry[0] < 50) & (jnp.abs(carry[1]).max() < 100)

        def advance(carry: Any) -> Any:
            return carry[0] + 1, carry[1] + attend(carry[1], weights)

        return lax.while_loop(goes_on, advance, (0, x))

    arguments = [
        jax.ShapeDtypeStruct((BATCH, 64, SIZE), jnp.bfloat16),
        jax.ShapeDtypeStruct((SIZE, 3 * SIZE), jnp.bfloat16),
    ]
    request = make_replaced_request(solve, arguments, [WholeRows()], H200)
    (stage,) = lower_with_own_kernels(request, h200, COMPILE).definition.stages
    (loop,) = [node for node in stage.nodes if isinstance(node, ConditionalNode)]
    nodes = [node for node in list_nested([loop]) if isinstance(node, KernelNode)]
    own = [node for node in nodes if node.code.symbol.startswith("tiled_attention")]
    assert len(own) >= 1
    assert all(node.begins_with_wait for node in own)
