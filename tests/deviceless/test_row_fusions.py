"""A train step of wide layers compiled for an H200: a kernel for each norm and its gradient."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.deviceless.pipeline import lower_with_own_kernels, make_replaced_request
from tests.tracegraph.replacements.row_fusions.ways import norm_by_hand, pick_targets
from tracegraph.lowering.tuning import Tuning
from tracegraph.replacements.library_matmuls import count_own_matmuls
from tracegraph.replacements.match import Machine
from tracegraph.replacements.matmul_updates import MatmulUpdates
from tracegraph.replacements.row_fusions.rule import RowFusions
from tracegraph.replacements.row_scatters import RowScatters
from tracegraph.runtime.cuda.libraries.nvrtc import compile_source
from tracegraph.runtime.definition.library_nodes import MatmulNode
from tracegraph.runtime.definition.nodes import KernelNode

pytest.importorskip("cuda.bindings.nvrtc")

COMPILE = functools.partial(compile_source, "9.0")
H200 = Machine("9.0", 132, COMPILE)
RULES = (RowScatters(), MatmulUpdates(), RowFusions())
LAYERS, ROWS, WIDTH, HIDDEN, WORDS = 2, 1280, 512, 1024, 4096
BF16 = jnp.bfloat16


def train(masters: Any, tokens: Any, targets: Any) -> Any:
    def compute_loss(weights: Any) -> Any:
        x = weights["table"][tokens]
        for layer in weights["layers"]:
            hidden = norm_by_hand(x, layer["gain"], layer["shift"]) @ layer["up"] + layer["bias"]
            x = x + jax.nn.gelu(hidden) @ layer["down"]
        return pick_targets(x @ weights["table"].T, targets).astype(jnp.float32).mean()

    weights = jax.tree.map(lambda leaf: leaf.astype(BF16), masters)
    loss, gradients = jax.value_and_grad(compute_loss)(weights)
    update = lambda p, g: p - 1e-3 * g.astype(jnp.float32)  # noqa: E731  as users write it
    return jax.tree.map(update, masters, gradients), loss


def give(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def make_arguments() -> Any:
    shapes = {"gain": (WIDTH,), "shift": (WIDTH,), "up": (WIDTH, HIDDEN), "bias": (HIDDEN,)}
    layer = {name: give(*shape) for name, shape in shapes.items()} | {"down": give(HIDDEN, WIDTH)}
    words = give(ROWS, dtype=jnp.int32)
    return {"table": give(WORDS, WIDTH), "layers": [layer] * LAYERS}, words, words


@pytest.fixture(scope="module")
def stage(h200: Any) -> Any:
    request = make_replaced_request(train, make_arguments(), RULES, H200, (0,))
    tuning = Tuning(uses_library=True)
    lowered = lower_with_own_kernels(request, h200, COMPILE, tuning)
    assert count_own_matmuls(lowered.definition) == 0
    (found,) = lowered.definition.stages
    return found


def test_norms_activations_and_the_loss_are_a_kernel_each(stage: Any) -> None:
    kernels = [node for node in stage.nodes if isinstance(node, KernelNode)]
    own = [node for node in kernels if node.code.symbol.startswith("row_fusion")]
    # In each layer a norm, an activation, and the gradient of each; and the loss.
    assert len(own) == 4 * LAYERS + 1
    assert all(node.begins_with_wait for node in own)
    # Layers share their code, but for the first one, which reads rows of the table.
    assert len({node.code.symbol for node in own}) < len(own)


def test_the_update_of_each_matrix_is_a_part_of_its_matmul(stage: Any) -> None:
    matmuls = [node.matmul for node in stage.nodes if isinstance(node, MatmulNode)]
    # A residual may be added by a matmul as well, with no factor.
    updates = [each for each in matmuls if each.beta == 1.0 and each.alpha != 1.0]
    assert len(updates) == 2 * LAYERS + 1
    # Forward, the gradient of the rows, and the update: of two matrices a layer, and of the table.
    assert len(matmuls) == 3 * (2 * LAYERS + 1)
    assert [matmul.alpha for matmul in updates] == pytest.approx([-1e-3] * 5, rel=1e-6)


def test_nothing_is_as_large_as_the_logits_but_them_and_their_gradient(stage: Any) -> None:
    nbytes = ROWS * WORDS * 2
    kernels = [node for node in stage.nodes if isinstance(node, KernelNode)]
    large = [node for node in kernels if any(use.nbytes == nbytes for use in node.ranges)]
    assert [node.code.symbol.startswith("row_fusion") for node in large] == [True]
