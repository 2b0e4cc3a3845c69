"""Kernels of Pallas are traced, and no rule looks into their bodies."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas
from jax.experimental.pallas import mosaic_gpu

import tracegraph as tg
from tracegraph.ir.graph import Graph

X = jnp.ones((256, 128))


def call_mosaic(x: Any) -> Any:
    def body(source: Any, target: Any) -> None:
        rows = pallas.ds(lax.axis_index("m") * 128, 128)
        target[rows, :] = jnp.exp(source[rows, :]) * 2

    kernel = mosaic_gpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(2,), grid_names=("m",)
    )
    return kernel(x) + 1


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
