"""Kernels of Pallas are traced, and no rule looks into their bodies."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.mosaic_kernels import double_exp
from tracegraph.ir.graph import Graph

X = jnp.ones((256, 128))


def call_mosaic(x: Any) -> Any:
    return double_exp(x) + 1


def list_graphs(graph: Graph) -> list[Graph]:
    inner = [each for op in graph.ops for _, each in op.subgraphs]
    return [graph, *(found for each in inner for found in list_graphs(each))]


@pytest.fixture
def traced() -> Graph:
    return tg.capture(call_mosaic).trace(X).graph


def test_a_kernel_of_mosaic_is_one_op(traced: Graph) -> None:
    names = [op.name for graph in list_graphs(traced) for op in graph.ops]
    assert {"mpmd_map", "core_map"} & set(names)
    assert [op.name for op in traced.ops][-1] == "add"


def test_what_a_body_refers_to_is_no_constant(traced: Graph) -> None:
    graphs = list_graphs(traced)
    assert len(graphs) > 2
    assert [each.constants for each in graphs] == [()] * len(graphs)


def test_a_trace_goes_with_its_last_name() -> None:
    function = tg.capture(call_mosaic)
    traced = weakref.ref(function.trace(X).graph)
    del function
    gc.collect()
    assert traced() is None
