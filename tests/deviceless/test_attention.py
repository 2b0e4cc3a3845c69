"""Attention of a decoder compiled for an H200: five kernels a layer, caches written in place."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deviceless.pipeline import make_replaced_request
from tests.deviceless.test_few_rows import (
    CONTEXT,
    COPY,
    H200,
    LAYERS,
    LOAD,
    LOCAL,
    STORE,
    WIDTH,
    decode,
    lower,
    make_arguments,
)
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.xla.machine_code import ACQBULK, _find_text, _read_operations
from tracegraph.replacements.rules import RULES
from tracegraph.runtime.definition.nodes import CopyNode, KernelNode

pytest.importorskip("cuda.bindings.nvrtc")


@pytest.fixture(scope="module")
def lowered(h200: Any) -> Lowered:
    return lower(make_replaced_request(decode, make_arguments(), RULES, H200, (0,)), h200)


def list_attention(lowered: Lowered) -> list[KernelNode]:
    (stage,) = lowered.definition.stages
    kernels = [node for node in stage.nodes if isinstance(node, KernelNode)]
    return [node for node in kernels if node.code.symbol.startswith("attention")]


def test_a_layer_has_five_kernels(lowered: Lowered) -> None:
    (stage,) = lowered.definition.stages
    own = [
        node
        for node in stage.nodes
        if isinstance(node, KernelNode) and node.code.symbol.startswith(("attention", "few_rows"))
    ]
    assert len(own) == 5 * LAYERS + 1
    # The row of the token, its position, the most probable token.
    assert len(stage.nodes) <= len(own) + 6


def test_caches_are_written_in_place_and_asked_for_before_the_wait(lowered: Lowered) -> None:
    (stage,) = lowered.definition.stages
    cache = 2 * CONTEXT * WIDTH
    for node in list_attention(lowered):
        assert {use.nbytes for use in node.early_loads} == {cache}
        written = [use for use, is_written in node.uses if is_written]
        assert {use.buffer for use in node.early_loads} <= {use.buffer for use in written}
        place = stage.nodes.index(node)
        into = [edge for edge in stage.edges if edge[1] == place]
        assert into
        assert stage.programmatic.issuperset(into)
    copies = [node for node in stage.nodes if isinstance(node, CopyNode)]
    assert not [node for node in copies if node.source.nbytes >= cache]


def test_the_machine_code_waits_before_it_loads_or_stores(lowered: Lowered) -> None:
    (code,) = {node.code for node in list_attention(lowered)}
    operations = [operation for operation, _ in _read_operations(_find_text(code))]
    ahead = operations[: operations.index(ACQBULK)]
    assert COPY in ahead
    assert not {LOAD, STORE, *LOCAL} & {*ahead}
    # No register is put into memory for want of space.
    assert not {*LOCAL} & {*operations}
    assert {LOAD, STORE} <= {*operations}
