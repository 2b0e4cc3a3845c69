"""Sums of matmuls that XLA splits for an H200 stay whole where they are to."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.deviceless.pipeline import make_capture_request
from tests.fakes.compilers import make_compiler
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.lower import lower_request
from tracegraph.lowering.tuning import KEEP_SUMS, UNTUNED, Tuning, join_options
from tracegraph.runtime.definition.nodes import KernelNode


def multiply(x: Any, weights: Any, other: Any) -> Any:
    """One matmul of few tiles and long sums, and one of many tiles."""
    hidden = jnp.matmul(x, weights, precision="highest")
    return hidden, jnp.matmul(hidden.T, other, precision="highest")


ARGUMENTS = (
    np.ones((640, 4096), np.float32),
    np.ones((4096, 2048), np.float32),
    np.ones((640, 4096), np.float32),
)


def lower(*, device: Any, tuning: Tuning) -> Any:
    request = make_capture_request(multiply, ARGUMENTS)
    plain = make_compiler(device, takes_kernels=True)
    return lower_request(request, Compiler(plain.target, plain._progress, tuning=tuning))


def list_nodes(lowered: Any) -> list[Any]:
    return [node for stage in lowered.definition.stages for node in stage.nodes]


def test_sums_stay_whole_where_they_are_to(h200: Any) -> None:
    # Without a GPU XLA takes kernels of its own for the matmuls.
    split, whole = (lower(device=h200, tuning=each) for each in (UNTUNED, Tuning(keeps_sums=True)))
    kinds = [[type(node) for node in list_nodes(each)] for each in (split, whole)]
    assert kinds == [[KernelNode] * 3, [KernelNode] * 2]
    regions = [each.regions[0] for each in (split, whole)]
    assert [KEEP_SUMS in region.options for region in regions] == [False, True]


def test_lists_of_passes_are_joined() -> None:
    first = (("xla_gpu_enable_pdl_launch", False), KEEP_SUMS)
    plain = (("xla_disable_hlo_passes", "topk-specializer"), ("xla_gpu_enable_cublaslt", True))
    assert join_options(first, plain) == (
        ("xla_gpu_enable_pdl_launch", False),
        ("xla_disable_hlo_passes", "splitk-rewriter,topk-specializer"),
        ("xla_gpu_enable_cublaslt", True),
    )
    assert join_options(first, ()) == first
