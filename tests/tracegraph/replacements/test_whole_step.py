"""A decoder's step with all rules, one after another: the replaced graph runs on this machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.fakes.kernels_on_host import call_on_host
from tests.tracegraph.replacements.attention.ways import attend_grouped, draw, rotate_halves
from tests.tracegraph.replacements.few_rows.test_rule import build, compile_nothing, evaluate
from tracegraph.ir.graph import Graph, Literal, Op
from tracegraph.ir.verifier import verify_graph
from tracegraph.jax_internals import bind_op
from tracegraph.lowering.kernels.own_kernel import read_listing
from tracegraph.replacements.few_rows import rule as few_rows_rule
from tracegraph.replacements.match import Machine
from tracegraph.replacements.rules import RULES
from tracegraph.replacements.splice import splice_matches
from tracegraph.runtime.definition.nodes import LaunchShape

WIDTH, HIDDEN, HEADS, GROUPS, LENGTH = 64, 96, 4, 2, 40
EACH = WIDTH // HEADS


def normalise(x: Any, gain: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * gain


def decode(state: Any, layers: Any, table: Any) -> Any:
    caches, position, token = state
    x, written = table[token][:, None], []
    for layer, cache in zip(layers, caches, strict=True):
        hidden = normalise(x, layer["gain"])
        query, *new = (
            (hidden @ layer[name]).reshape(*x.shape[:2], -1, EACH) for name in ("q", "k", "v")
        )
        mixed, *pair = attend_grouped(rotate_halves, query, new, cache, position)
        written.append(pair)
        x = x + mixed.reshape(x.shape) @ layer["out"]
        hidden = normalise(x, layer["gain"])
        x = x + (jax.nn.silu(hidden @ layer["gate"]) * (hidden @ layer["up"])) @ layer["down"]
    logits = x[:, 0] @ table.T
    return (written, position + 1, logits.argmax(-1).astype(jnp.int32)), logits


def make_arguments(batch: int, count: int) -> Any:
    sizes = {"q": (WIDTH, WIDTH), "out": (WIDTH, WIDTH), "down": (HIDDEN, WIDTH)}
    sizes |= dict.fromkeys(["k", "v"], (WIDTH, GROUPS * EACH))
    sizes |= dict.fromkeys(["gate", "up"], (WIDTH, HIDDEN))
    layers = [
        {name: draw(*shape, seed=seed) * shape[0] ** -0.5 for name, shape in sizes.items()}
        | {"gain": 1 + draw(WIDTH, seed=seed) / 8}
        for seed in range(count)
    ]
    cache = (batch, LENGTH, GROUPS, EACH)
    caches = [[draw(*cache, seed=2 * seed + part) for part in (0, 1)] for seed in range(count)]
    state = caches, jnp.int32(29), jnp.arange(batch, dtype=jnp.int32)
    return state, layers, draw(48, WIDTH)


def replace(graph: Graph) -> Graph:
    for rule in RULES:
        found = rule.find(graph, Machine("9.0", 4, compile_nothing))
        graph = splice_matches(graph, found)
        verify_graph(graph)
    return graph


def run_kernel(op: Op, operands: list[Any]) -> list[Any]:
    """Runs the kernel of a custom call, as its listing has it."""
    params = dict(op.params["attributes"])
    shape = LaunchShape(
        (int(params["grid_x"]), int(params["grid_y"]), int(params["grid_z"])),
        (int(params["block_x"]), int(params["block_y"]), int(params["block_z"])),
        shared_bytes=int(params["shared_mem_bytes"]),
    )
    listing = params["kernel_data"]
    text = listing if isinstance(listing, str) else listing.decode()
    kernel = read_listing(text.encode(), params["name"], shape)
    assert kernel is not None
    aliases = dict(op.params["input_output_aliases"] or ())
    results = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in op.results]
    return [jnp.asarray(each) for each in call_on_host(kernel, None, results, operands, aliases)]


def run_graph(graph: Graph, args: Any) -> list[Any]:
    known: dict[Any, Any] = dict(zip(graph.inputs, jax.tree.leaves(args), strict=True))
    known |= {constant.value: constant.array for constant in graph.constants}
    for op in graph.ops:
        given = [e.value if isinstance(e, Literal) else known[e] for e in op.operands]
        run = run_kernel if op.name == "ffi_call" else bind_op
        known.update(zip(op.results, run(op, given), strict=True))
    return [known[each] for each in graph.outputs]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        few_rows_rule, "SIZES", dataclasses.replace(few_rows_rule.SIZES, matrix_bytes=0)
    )


def list_kernels(graph: Graph) -> list[str]:
    calls = [dict(op.params["attributes"]) for op in graph.ops if op.name == "ffi_call"]
    return [call["name"].rpartition("_")[0] for call in calls]


def test_each_layer_is_five_kernels() -> None:
    replaced = replace(build(decode, *make_arguments(batch=1, count=3)))
    layer = ["few_rows", "attention", "few_rows", "few_rows", "few_rows"]
    assert list_kernels(replaced) == [*layer * 3, "few_rows", "largest"]


def test_a_replaced_step_computes_the_same() -> None:
    args = make_arguments(batch=2, count=1)
    graph = build(decode, *args)
    replaced = replace(graph)
    known = evaluate(graph, args)
    wanted = [known[value] for value in graph.outputs]
    exact = jax.tree.leaves(decode(*jax.tree.map(widen, args)))
    for ours, theirs, right in zip(run_graph(replaced, args), wanted, exact, strict=True):
        right = np.asarray(right, np.float32)
        error = np.abs(np.asarray(ours, np.float32) - right).max()
        bound = np.abs(np.asarray(theirs, np.float32) - right).max()
        # Each is rounded to 16 bits on its way.
        assert error <= bound + 2.0**-8 * np.abs(right).max()


def widen(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
