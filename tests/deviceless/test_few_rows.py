"""A decoder compiled for an H200: few kernels a layer, started early, in front of their weights."""

from __future__ import annotations

import functools
import os
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.deviceless.pipeline import (
    lower_with_own_kernels,
    make_capture_request,
    make_replaced_request,
)
from tests.deviceless.topology import find_assembler
from tests.fakes.kernels_on_host import run_compiler
from tracegraph.lowering.kernels.matmuls import few_rows, few_rows_problem
from tracegraph.lowering.kernels.matmuls.few_rows_problem import FewRows, MatrixSegment
from tracegraph.lowering.kernels.own_kernel import OPTIONS, write_listing
from tracegraph.lowering.kernels.row_functions import Form, RowFunction, RowOperand
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.request import CaptureRequest
from tracegraph.lowering.xla.machine_code import ACQBULK, _find_text, _read_operations
from tracegraph.passes.inline_calls import InlineCalls
from tracegraph.replacements.few_rows.rule import FewRowMatmuls
from tracegraph.replacements.match import Machine
from tracegraph.runtime.cuda.libraries.nvrtc import compile_source
from tracegraph.runtime.definition.nodes import KernelCode, KernelNode
from tracegraph.tracing.trace import trace_function

pytest.importorskip("cuda.bindings.nvrtc")

LAYERS, WIDTH, HIDDEN, VOCABULARY, HEADS, CONTEXT = 2, 512, 1024, 2048, 8, 64
COMPILE = functools.partial(compile_source, "9.0")
H200 = Machine("9.0", 132, COMPILE)
# In machine code: loads from memory, stores to it, and copies from memory to shared memory.
LOAD, STORE, COPY, LOCAL = 0x181, 0x186, 0x1AE, (0x183, 0x187)


def normalise(x: Any, gain: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * gain


def attend(query: Any, keys: Any, values: Any, position: Any) -> Any:
    scores = jnp.einsum("hd,thd->ht", query, keys).astype(jnp.float32) * query.shape[-1] ** -0.5
    is_past = jnp.arange(CONTEXT) <= position
    shares = jax.nn.softmax(jnp.where(is_past, scores, -1e9)).astype(query.dtype)
    return jnp.einsum("ht,thd->hd", shares, values)


def decode(state: Any, weights: Any) -> Any:
    caches, position, token = state
    x, written = weights["table"][token][None], []
    for block, cache in zip(weights["blocks"], caches, strict=True):
        hidden = normalise(x, block["gain"])
        query, *new = ((hidden @ block[name]).reshape(HEADS, -1) for name in ("q", "k", "v"))
        places = (position, 0, 0)
        pair = tuple(
            lax.dynamic_update_slice(kept, each[None], places)
            for kept, each in zip(cache, new, strict=True)
        )
        written.append(pair)
        x = x + attend(query, *pair, position).reshape(1, WIDTH) @ block["out"]
        hidden = normalise(x, block["gain"])
        x = x + (jax.nn.silu(hidden @ block["gate"]) * (hidden @ block["up"])) @ block["down"]
    logits = normalise(x, weights["gain"]) @ weights["head"]
    return (written, position + 1, logits[0].argmax().astype(jnp.int32)), logits


def make_arguments() -> Any:
    def give(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    square, wide = give(WIDTH, WIDTH), give(WIDTH, HIDDEN)
    names = {"q": square, "k": square, "v": square, "out": square, "gate": wide, "up": wide}
    block = names | {"down": give(HIDDEN, WIDTH), "gain": give(WIDTH)}
    cache = give(CONTEXT, HEADS, WIDTH // HEADS)
    number = jax.ShapeDtypeStruct((), np.int32)
    head = {"table": give(VOCABULARY, WIDTH), "head": give(WIDTH, VOCABULARY), "gain": give(WIDTH)}
    return ([(cache, cache)] * LAYERS, number, number), head | {"blocks": [block] * LAYERS}


def lower(request: CaptureRequest, device: Any) -> Lowered:
    return lower_with_own_kernels(request, device, COMPILE)


@pytest.fixture(scope="module")
def both(h200: Any) -> tuple[Lowered, Lowered]:
    """The lowering without and with replacements."""
    plain = make_capture_request(decode, make_arguments(), (0,))
    replaced = make_replaced_request(decode, make_arguments(), [FewRowMatmuls()], H200, (0,))
    return lower(plain, h200), lower(replaced, h200)


def list_own(lowered: Lowered) -> list[KernelNode]:
    (stage,) = lowered.definition.stages
    kernels = [node for node in stage.nodes if isinstance(node, KernelNode)]
    return [node for node in kernels if node.code.symbol.startswith("few_rows")]


def test_a_layer_has_four_kernels_of_ours_and_half_as_many_in_all(both: Any) -> None:
    plain, replaced = both
    assert len(list_own(replaced)) == 4 * LAYERS + 1
    assert len({node.code for node in list_own(replaced)}) == 5
    (before,), (after,) = (each.definition.stages for each in (plain, replaced))
    assert len(after.nodes) <= 0.6 * len(before.nodes)


def test_each_starts_early_and_loads_its_weights_before_it_waits(both: Any) -> None:
    _, lowered = both
    (stage,) = lowered.definition.stages
    sizes = {2 * WIDTH * columns for columns in (WIDTH, HIDDEN, VOCABULARY)}
    for place, node in enumerate(stage.nodes):
        if node not in list_own(lowered):
            continue
        assert isinstance(node, KernelNode)
        assert {use.nbytes for use in node.early_loads} <= sizes
        into = [edge for edge in stage.edges if edge[1] == place]
        early = [edge for edge in into if isinstance(stage.nodes[edge[0]], KernelNode)]
        assert stage.programmatic.issuperset(early)


def test_the_machine_code_waits_before_it_loads_anything_else(both: Any) -> None:
    _, lowered = both
    for code in {node.code for node in list_own(lowered)}:
        operations = [operation for operation, _ in _read_operations(_find_text(code))]
        ahead = operations[: operations.index(ACQBULK)]
        assert COPY in ahead
        assert not {LOAD, STORE} & {*ahead}
        # Nor is a register put into memory for want of space.
        assert not {*LOCAL} & {*operations}
        assert {LOAD, STORE} <= {*operations}


def test_a_greedy_token_needs_no_logits(h200: Any) -> None:
    def choose(x: Any, gain: Any, head: Any) -> Any:
        logits = normalise(x, gain) @ head
        return logits.argmax(-1).astype(jnp.int32), logits.max(-1)

    sizes = (3, WIDTH), (WIDTH,), (WIDTH, VOCABULARY)
    arguments = [jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in sizes]
    lowered = lower(make_replaced_request(choose, arguments, [FewRowMatmuls()], H200), h200)
    (stage,) = lowered.definition.stages
    head, last = stage.nodes
    assert isinstance(head, KernelNode)
    assert isinstance(last, KernelNode)
    assert last.code.symbol.startswith("largest")
    # A candidate of eight bytes for each block's columns, a quarter of three rows of logits.
    written = sum(use.nbytes for use, is_written in head.uses if is_written)
    assert written == 3 * 2 * VOCABULARY // 4
    assert stage.programmatic == {(0, 1)}
    operations = {operation for operation, _ in _read_operations(_find_text(last.code))}
    assert not {*LOCAL} & operations


def test_weights_that_a_step_updates_are_not_loaded_early(h200: Any) -> None:
    def train(weights: Any, x: Any) -> Any:
        return weights * 2, x @ weights

    arguments = [jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in [(512, 512), (1, 512)]]
    request = make_replaced_request(train, arguments, [FewRowMatmuls()], H200, (0,))
    lowered = lower(request, h200)
    (node,) = list_own(lowered)
    (stage,) = lowered.definition.stages
    place = stage.nodes.index(node)
    assert node.begins_with_wait
    assert not [edge for edge in stage.programmatic if edge[1] == place]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_weights_of_bytes_are_loaded_as_they_are(dtype: Any, h200: Any) -> None:
    def multiply(x: Any, weights: Any, scale: Any) -> Any:
        return x @ (weights.astype(x.dtype) * scale)

    shapes = {(2, 512): jnp.bfloat16, (512, 1024): dtype, (1024,): jnp.bfloat16}
    arguments = [jax.ShapeDtypeStruct(*each) for each in shapes.items()]
    lowered = lower(make_replaced_request(multiply, arguments, [FewRowMatmuls()], H200), h200)
    (node,) = list_own(lowered)
    (stage,) = lowered.definition.stages
    assert len(stage.nodes) == 1
    assert 512 * 1024 in {use.nbytes for use in node.early_loads}
    operations = {operation for operation, _ in _read_operations(_find_text(node.code))}
    assert not {*LOCAL} & operations


def test_an_older_assembler_takes_the_ptx_that_xla_is_given(h200: Any, tmp_path: Any) -> None:
    del h200
    assembler = find_assembler()
    if assembler is None:
        pytest.skip("needs the assembler of PTX: it comes with the wheels of make deviceless")
    x, matrix = (jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in [(1, 512), (512, 1024)])
    graph = trace_function(jnp.dot, (x, matrix), {}, name="f").graph
    (found,) = FewRowMatmuls().find(InlineCalls().apply(graph), H200)
    call: Any = found.compute
    kernel = call.kernel
    listing = write_listing(kernel, COMPILE(kernel.source, OPTIONS).ptx)
    (tmp_path / "kernel.ptx").write_text(listing)
    command = [assembler, "-arch=sm_90a", str(tmp_path / "kernel.ptx"), "-o", os.devnull]
    run_compiler(command)
    assert ".version 8.0\n" in listing


def find_odd_copies(text: bytes) -> set[int]:
    """Returns the forms of instructions that copy, less the one that a GPU has for our kernels.

    See Note [Addresses of copies].
    """
    words = (word for word, _ in struct.iter_unpack("<QQ", text))
    forms = {word & 0xFFF for word in words if word & 0x1FF == COPY}
    assert forms
    return forms - {0xFAE}


@pytest.mark.parametrize(("rows", "is_transposed"), [(1, False), (13, False), (13, True)])
def test_copies_are_instructions_that_there_are(
    rows: int, is_transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = RowFunction((RowOperand(0, Form.FULL),), (), (0,))
    finish = RowFunction((), (), (0,), sums=1)
    for index in range(8 if is_transposed else 12):
        sizes = rows, 1024 + 8 * index, ("BF16", "BF16")
        segment = MatrixSegment(1024 + 8 * (index + 1), (1,), finish, ("BF16",))
        problem = FewRows(*sizes, start, "BF16", (segment,), is_transposed=is_transposed)
        tiling = list(few_rows_problem._list_tilings(problem))[index]
        monkeypatch.setattr(few_rows, "choose_tiling", lambda *_, tiling=tiling: tiling)
        kernel = few_rows.write_few_rows(problem, 132)
        code = KernelCode(kernel.symbol, COMPILE(kernel.source, OPTIONS).cubin)
        assert find_odd_copies(_find_text(code)) == set()


def test_a_copy_that_no_gpu_has_is_seen(both: Any) -> None:
    text = bytearray(_find_text(list_own(both[1])[0].code))
    place = next(at for at in range(0, len(text), 16) if text[at : at + 2] == b"\xae\x7f")
    text[place + 1] = 0x7D
    assert find_odd_copies(bytes(text)) == {0xDAE}
