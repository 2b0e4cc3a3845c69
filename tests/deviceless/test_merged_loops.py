"""Optimizers as XLA compiles them for an H200: their small kernels are merged into few.

The merged kernels run here, compiled for this machine, and compute what `jax.jit` does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.deviceless.pipeline import make_capture_request
from tests.fakes.compilers import make_compiler
from tests.fakes.kernels_on_host import run_on_host
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.kernels.loops.merged_loops import SYMBOL
from tracegraph.lowering.lower import Lowered, lower_request
from tracegraph.lowering.tuning import Tuning
from tracegraph.lowering.xla.machine_code import _find_text, _read_operations, waits_first
from tracegraph.runtime.cuda.libraries.nvrtc import compile_source
from tracegraph.runtime.definition.code_target import CompiledSource
from tracegraph.runtime.definition.nodes import KernelCode, KernelNode

SHAPES = [(3,), (8, 8), (5, 7, 2), (128,)] * 4
LARGE = (512, 512)


def descend(state: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients)


def adam(state: Any, gradients: Any, first: Any, second: Any) -> Any:
    parameters, means, squares = state
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradients)
    squares = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, squares, gradients)

    def update(p: Any, m: Any, v: Any) -> Any:
        return p - 1e-3 * (m / first / (jnp.sqrt(v / second) + 1e-8) + 0.01 * p)

    return jax.tree.map(update, parameters, means, squares), means, squares


def clip(state: Any, gradients: Any) -> Any:
    def update(p: Any, g: Any) -> Any:
        g = jnp.clip(g, -0.5, 0.5)
        return jnp.where(jnp.abs(g) > 0.1, p - jnp.maximum(g, 0.2), p)

    return jax.tree.map(update, state, gradients)


def mix(state: Any, gradients: Any) -> Any:
    """Weights in 16 bits, kept in 32."""
    masters, _ = state
    masters = jax.tree.map(lambda p, g: p - 0.1 * g.astype(jnp.float32), masters, gradients)
    return masters, jax.tree.map(lambda p: p.astype(jnp.bfloat16), masters)


def make_leaves(seed: int, dtype: Any = np.float32, shapes: Any = SHAPES) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.normal(size=shape), np.float32).astype(dtype) for shape in shapes]


def make_squares() -> list[Any]:
    return [each**2 for each in make_leaves(3)]


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "descend": (descend, lambda: (make_leaves(1), make_leaves(2))),
    "adam": (
        adam,
        lambda: (
            (make_leaves(1), make_leaves(2), make_squares()),
            make_leaves(4),
            np.float32(0.3),
            np.float32(0.1),
        ),
    ),
    # XLA drops their dimensions.
    "single": (
        descend,
        lambda: (make_leaves(1, shapes=[(1,), ()] * 8), make_leaves(2, shapes=[(1,), ()] * 8)),
    ),
    "clip": (clip, lambda: (make_leaves(1), make_leaves(2))),
    "mix": (
        mix,
        lambda: ((make_leaves(1), make_leaves(2, jnp.bfloat16)), make_leaves(3, jnp.bfloat16)),
    ),
}


def lower_both(
    function: Any, arguments: Sequence[Any], device: Any, compile_kernel: Any
) -> tuple[Lowered, Lowered]:
    """Returns the lowering of a function without and with merged kernels, compiled once."""
    request = make_capture_request(function, arguments, (0,))
    compiler = make_compiler(device, takes_kernels=True)
    plain = lower_request(request, compiler)
    target: Any = dataclasses.replace(compiler.target, compile_kernel=compile_kernel)  # pyright: ignore[reportArgumentType]
    again = Compiler(target, compiler._progress, tuning=Tuning(merges=True), compiled=plain.regions)
    return plain, lower_request(request, again)


def list_nodes(lowered: Lowered) -> list[KernelNode]:
    (stage,) = lowered.definition.stages
    return [node for node in stage.nodes if isinstance(node, KernelNode)]


def run_here(lowered: Lowered, arguments: Sequence[Any], sources: Sequence[str]) -> list[Any]:
    """Runs a program of merged kernels only; returns its flat results."""
    specs = {each.name: each for each in lowered.program.buffers}
    memory = {name: np.zeros(spec.nbytes, np.uint8) for name, spec in specs.items()}
    for given, leaf in zip(lowered.program.inputs, jax.tree.leaves(arguments), strict=True):
        data = np.ascontiguousarray(leaf)
        memory[given.buffer.name][:] = data.reshape(-1).view(np.uint8)
    for node in list_nodes(lowered):
        assert node.code.symbol == SYMBOL
        uses = [each for each, _ in node.uses]
        arrays = [memory[each.buffer][each.offset : each.offset + each.nbytes] for each in uses]
        run_on_host(sources[int(node.code.cubin)], node.shape.grid[1], arrays)
    outputs = [output.buffer for output in lowered.program.outputs]
    return [memory[each.name].view(each.dtype).reshape(each.shape) for each in outputs]


@pytest.mark.parametrize("name", CASES)
def test_merged_optimizers_compute_what_jit_computes(name: str, h200: Any) -> None:
    function, make_arguments = CASES[name]
    arguments, sources = make_arguments(), []

    def keep(source: str, options: tuple[str, ...]) -> CompiledSource:
        del options
        sources.append(source)
        return CompiledSource(str(len(sources) - 1).encode(), "")

    plain, merged = lower_both(function, arguments, h200, keep)
    assert len(list_nodes(plain)) >= len(SHAPES)
    assert len(list_nodes(merged)) == 1
    assert merged.plan.arena_bytes <= 1.1 * plain.plan.arena_bytes
    results = run_here(merged, arguments, sources)
    wanted = jax.tree.leaves(jax.jit(function)(*arguments))
    for result, right in zip(results, wanted, strict=True):
        assert result.dtype == right.dtype
        np.testing.assert_allclose(
            np.asarray(result, np.float32), np.asarray(right, np.float32), rtol=1e-5, atol=1e-6
        )


def test_nvrtc_takes_what_is_written_and_the_kernels_wait_first(h200: Any) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    arguments = CASES["mix"][1]()
    compile_kernel = functools.partial(compile_source, "9.0")
    _, merged = lower_both(mix, arguments, h200, compile_kernel)
    for node in list_nodes(merged):
        assert node.code.cubin.startswith(b"\x7fELF")
        assert node.begins_with_wait
        assert waits_first(KernelCode(SYMBOL, node.code.cubin))


# In machine code: what computes with floats.
ARITHMETIC = {0x009: "FMNMX", 0x020: "FMUL", 0x021: "FADD", 0x023: "FFMA", 0x108: "MUFU"}
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "exp": jnp.exp,
    "log": jnp.log,
    "rsqrt": jax.lax.rsqrt,
    "sqrt": jnp.sqrt,
    "divide": lambda x: 1.7 / x + x / 3.1,
    "multiply_add": lambda x: 1.3 * x + x * x - 0.7 * x,
    "maximum": lambda x: jnp.maximum(x, 0.3),
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "select": lambda x: jnp.where(x > 0.5, x, -x),
    "bfloat16": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) * 3,
    "float16": lambda x: (x * 1.1).astype(jnp.float16),
}


def count_arithmetic(node: KernelNode) -> Counter[str]:
    operations = [operation for operation, _ in _read_operations(_find_text(node.code))]
    return Counter(ARITHMETIC[each] for each in operations if each in ARITHMETIC)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_arithmetic_is_that_of_xlas_kernels(name: str, h200: Any) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    operation = OPERATIONS[name]

    def function(leaves: Any) -> Any:
        return [operation(leaf) for leaf in leaves]

    arguments = ([np.ones(number + 2, np.float32) for number in range(8)],)
    compile_kernel = functools.partial(compile_source, "9.0")
    plain, merged = lower_both(function, arguments, h200, compile_kernel)
    (ours,) = list_nodes(merged)
    theirs = list_nodes(plain)[0]
    found = count_arithmetic(ours)
    assert found == count_arithmetic(theirs)
    assert found or name in ("select", "float16")
    # Other options give other instructions: products that are added without being rounded.
    if name == "multiply_add":
        _, fused = lower_both(
            function, arguments, h200, lambda source, _: compile_source("9.0", source, ())
        )
        assert count_arithmetic(list_nodes(fused)[0])["FFMA"] > found["FFMA"]


def read_bits(x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


OTHERS: dict[str, Callable[[Any], Any]] = {
    # Of floats below zero the bits have the other order.
    "order of bits": lambda x: jnp.where(read_bits(x) < read_bits(-x), x, 2 * x),
    "bits of some": lambda x: jnp.where(x > 0.5, read_bits(x), 3),
    "value of bits": lambda x: read_bits(x).astype(jnp.float32) * 2,
    "exact": lambda x: jax.lax.exp(x, accuracy=jax.lax.AccuracyMode.HIGHEST),
    "transposed": lambda x: x + x.T,
    "rows": lambda x: x + x[0],
    "reversed": lambda x: x[::-1] * 2,
    "counted": lambda x: x + jnp.arange(8.0),
    "integers": lambda x: x.astype(jnp.int32) * 3,
    "narrow": lambda x: x.astype(jnp.bfloat16) * jnp.bfloat16(1.1),
    "sine": jnp.sin,
    "part": lambda x: x[:4] * 2,
    "shape": lambda x: x.reshape(4, 16) + jnp.arange(16.0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_known_loop_over_arrays_alike_stays(name: str, h200: Any) -> None:
    operation = OTHERS[name]

    def function(leaves: Any) -> Any:
        return [operation(leaf) for leaf in leaves]

    arguments = ([np.ones((8, 8), np.float32) * number for number in range(1, 11)],)
    plain, merged = lower_both(function, arguments, h200, lambda *_: CompiledSource(b"code", ""))
    assert not [node for node in list_nodes(merged) if node.code.symbol == SYMBOL]
    assert len(list_nodes(merged)) == len(list_nodes(plain)) >= 10


def test_large_arrays_and_what_is_no_loop_stay(h200: Any) -> None:
    def function(state: Any, gradients: Any) -> Any:
        small, large = state
        moved = [2 * each - other for each, other in zip(small, gradients, strict=True)]
        return moved, large - 0.1 * jnp.sum(large, axis=0)

    arguments = (make_leaves(1), np.ones(LARGE, np.float32)), make_leaves(2)
    plain, merged = lower_both(function, arguments, h200, lambda *_: CompiledSource(b"code", ""))
    before, after = list_nodes(plain), list_nodes(merged)
    ours = [node for node in after if node.code.symbol == SYMBOL]
    assert len(ours) == 1
    assert len(after) == len(before) - len(SHAPES) + 1


def test_weights_that_are_rounded_in_front_of_their_matmuls_are_rounded_at_once(h200: Any) -> None:
    @tg.amp.autocast(jnp.bfloat16)
    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    def function(weights: Any, x: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    arguments = ([np.ones((64, 64), np.float32)] * 12, np.ones((64, 64), np.float32))
    plain, merged = lower_both(function, arguments, h200, lambda *_: CompiledSource(b"code", ""))
    rounds = [node for node in list_nodes(merged) if node.code.symbol == SYMBOL]
    assert {node.shape.grid[1] for node in rounds} >= {12}
    assert len(list_nodes(merged)) <= len(list_nodes(plain)) - 11
    assert merged.plan.arena_bytes <= 1.1 * plain.plan.arena_bytes
