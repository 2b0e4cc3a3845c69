"""Programs as users write them, compiled for an H200: one graph, in about the memory of XLA."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.deviceless.building import check_built, find_excess_bytes, find_faults
from tests.deviceless.pipeline import lower_for_gpu, make_capture_request
from tracegraph.lowering import compile_gpu
from tracegraph.lowering.lower import Lowered
from tracegraph.runtime.definition.graph_nodes import list_nested
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode, KernelNode

LAYERS, WIDTH, ROWS = 12, 64, 16
# Nodes of each kind that are inside of loops, too.
PROGRAMS = {"decode": {"while": 0}, "diffrax": {"while": 1, "if": 1}}


def find_program(name: str) -> Any:
    missing = [n for n in ("flax", "optax", "diffrax") if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    models = importlib.import_module("benchmarks.whole_models")
    (program,) = [each for each in models.PROGRAMS if each.name == name]
    return program.make(True)


def count_kinds(lowered: Lowered) -> Counter[str]:
    (stage,) = lowered.definition.stages
    assert find_faults(lowered.definition) == []
    check_built(lowered.definition)
    return Counter(node.kind for node in list_nested(stage.nodes))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_benchmark_is_one_graph(name: str, h200: Any) -> None:
    setup = find_program(name)
    request = make_capture_request(setup.function, (setup.state, *setup.batch), (0,))
    kinds = count_kinds(lower_for_gpu(request, h200))
    assert {kind: kinds[kind] for kind in PROGRAMS[name]} == PROGRAMS[name]


def train(state: Any, x: Any) -> tuple[Any, Any]:
    def apply(h: Any, layer: Any) -> tuple[Any, None]:
        return h + jnp.tanh(h @ layer["w"]) * layer["scale"], None

    def compute_loss(state: Any) -> Any:
        return (lax.scan(jax.checkpoint(apply), x, state)[0] ** 2).mean()

    loss, gradient = jax.value_and_grad(compute_loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), loss


@pytest.mark.parametrize("is_donated", [True, False])
def test_a_scan_over_layers_copies_no_weights(is_donated: bool, h200: Any) -> None:
    state = {
        "w": np.ones((LAYERS, WIDTH, WIDTH), np.float32),
        "scale": np.ones((LAYERS, WIDTH), np.float32),
    }
    x = np.ones((ROWS, WIDTH), np.float32)
    request = make_capture_request(train, (state, x), (0,) if is_donated else ())
    lowered = lower_for_gpu(request, h200)
    assert count_kinds(lowered)["while"] == 0
    assert find_excess_bytes(lowered) <= 1.05
    (stage,) = lowered.definition.stages
    copies = [node for node in stage.nodes if isinstance(node, CopyNode)]
    # XLA of JAX 0.11 stacks by memcpys what each layer saves, which is smaller.
    assert sum(node.target.nbytes >= 4 * WIDTH * WIDTH for node in copies) <= 1
    # Kernels read each layer's weights in the state itself.
    kernels = [node for node in stage.nodes if isinstance(node, KernelNode)]
    uses = [use for node in kernels for use in node.parameters if isinstance(use, BufferUse)]
    names = Counter(use.buffer for use in uses if use.nbytes == 4 * WIDTH * WIDTH)
    assert max(names.values()) >= LAYERS


def test_what_a_scan_stacks_is_not_filled_ahead(h200: Any) -> None:
    option = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
    if option not in compile_gpu.legal_compile_options():
        pytest.skip(f"this XLA has no {option}")

    def stack(x: Any) -> Any:
        return lax.scan(lambda h, _: (jnp.sin(h @ h), h), x, None, length=1000)[1]

    lowered = lower_for_gpu(make_capture_request(stack, (np.ones((32, 32), np.float32),)), h200)
    (stage,) = lowered.definition.stages
    assert count_kinds(lowered)["while"] == 1
    outside = [node for node in stage.nodes if isinstance(node, KernelNode | FillNode)]
    written = [use for node in outside for use in node.ranges]
    assert all(use.nbytes < 1000 * 32 * 32 * 4 for use in written)
