"""A train step of small layers compiled for an H200: a kernel for each matmul of its rows."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.deviceless.pipeline import lower_with_own_kernels, make_replaced_request
from tests.deviceless.test_few_rows import COPY, LOAD, LOCAL, STORE
from tests.tracegraph.replacements.few_rows.recurrent import run_cells
from tracegraph.lowering.xla.machine_code import ACQBULK, _find_text, _read_operations
from tracegraph.replacements.few_rows.small_matmuls import SmallMatmuls
from tracegraph.replacements.match import Machine
from tracegraph.runtime.cuda.libraries.nvrtc import compile_source
from tracegraph.runtime.definition.graph_nodes import list_nested
from tracegraph.runtime.definition.nodes import KernelNode

pytest.importorskip("cuda.bindings.nvrtc")

COMPILE = functools.partial(compile_source, "9.0")
H200 = Machine("9.0", 132, COMPILE)
LAYERS, ROWS, WIDTH, HIDDEN = 3, 192, 128, 256
STEPS = 40


def run_layer(x: Any, layer: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * layer["gain"]
    return x + jax.nn.gelu(scaled @ layer["up"] + layer["bias"]) @ layer["down"]


def train(layers: Any, x: Any) -> Any:
    def compute_loss(layers: Any) -> Any:
        hidden = x
        for layer in layers:
            hidden = run_layer(hidden, layer)
        return (hidden * jnp.cos(x)).sum()

    loss, gradients = jax.value_and_grad(compute_loss)(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients), loss


def train_in_loop(layers: Any, x: Any) -> Any:
    @jax.checkpoint
    def apply(hidden: Any, layer: Any) -> Any:
        return run_layer(hidden, layer), None

    def compute_loss(layers: Any) -> Any:
        return (lax.scan(apply, x, layers)[0] * jnp.cos(x)).sum()

    loss, gradients = jax.value_and_grad(compute_loss)(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients), loss


def give(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def make_layer(*lead: int) -> Any:
    shapes = {"gain": (WIDTH,), "up": (WIDTH, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN, WIDTH)}
    return {name: give(*lead, *shape) for name, shape in shapes.items()}


def lower(function: Any, arguments: Any, rules: Any, device: Any) -> Any:
    request = make_replaced_request(function, arguments, rules, H200, (0,))
    (stage,) = lower_with_own_kernels(request, device, COMPILE).definition.stages
    return stage


def list_own(nodes: Any) -> list[KernelNode]:
    kernels = [node for node in list_nested(nodes) if isinstance(node, KernelNode)]
    return [node for node in kernels if node.code.symbol.startswith("small_matmul")]


@pytest.fixture(scope="module")
def stage(h200: Any) -> Any:
    arguments = [[make_layer()] * LAYERS, give(ROWS, WIDTH)]
    return lower(train, arguments, [SmallMatmuls()], h200)


def test_a_layer_has_four_kernels(stage: Any) -> None:
    # Two forward; behind them those of the derivatives of rows, also in front of the first gain.
    assert len(list_own(stage.nodes)) == 4 * LAYERS
    assert len({node.code for node in list_own(stage.nodes)}) <= 7


def test_the_machine_code_loads_weights_alone_before_it_waits(stage: Any) -> None:
    for code in {node.code for node in list_own(stage.nodes)}:
        operations = [operation for operation, _ in _read_operations(_find_text(code))]
        ahead = operations[: operations.index(ACQBULK)]
        assert COPY in ahead
        assert STORE not in ahead
        # And what all rows share of a norm, where its sums are factors.
        assert (LOAD in ahead) <= (len(code.early) > 1)
        # Nor is a register put into memory for want of space.
        assert not {*LOCAL} & {*operations}


def test_weights_that_are_updated_behind_a_kernel_are_loaded_early(stage: Any) -> None:
    own = [place for place, node in enumerate(stage.nodes) if node in list_own(stage.nodes)]
    chained = [(a, b) for a, b in stage.edges if a in own and b in own]
    assert len(chained) >= 3 * LAYERS
    assert stage.programmatic.issuperset(chained)
    written = {use.buffer for node in stage.nodes for use, is_written in node.uses if is_written}
    early = {use.buffer for node in list_own(stage.nodes) for use in node.early_loads}
    assert len(early & written) >= 2 * LAYERS


def test_layers_of_a_loop_have_them_too(h200: Any) -> None:
    arguments = [make_layer(LAYERS), give(ROWS, WIDTH)]
    stage = lower(train_in_loop, arguments, [SmallMatmuls()], h200)
    # Forward, again for the checkpoint, and backward.
    assert len(list_own(stage.nodes)) >= 5 * LAYERS


def train_cells(weights: Any, xs: Any) -> Any:
    gradients = jax.grad(lambda weights: (run_cells(weights, xs) ** 2).sum())(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def test_an_iteration_of_a_recurrent_layer_is_two_kernels(h200: Any) -> None:
    weights = {"given": give(64, 4 * WIDTH), "carried": give(WIDTH, 4 * WIDTH)}
    arguments = weights, give(STEPS, ROWS, 64)
    stage = lower(train_cells, arguments, [SmallMatmuls()], h200)
    own = list_own(stage.nodes)
    counts = Counter(node.code.symbol for node in own)
    # Of what the inputs give and of the cell; and of the state's gradient, but for the first one.
    assert sorted(counts.values()) == [STEPS - 1, STEPS, STEPS]
    # Stacks are written where they belong, and parts of matrices are cut out once.
    cells = [
        place for place, node in enumerate(stage.nodes) if counts.get(get_symbol(node)) == STEPS
    ]
    others = {*range(cells[-1])}.difference(cells)
    assert len(others) <= STEPS + 16


def get_symbol(node: Any) -> str:
    return node.code.symbol if isinstance(node, KernelNode) else ""
