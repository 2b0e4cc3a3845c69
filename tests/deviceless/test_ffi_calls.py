"""Factorizations, as XLA compiles them for an H200, become calls of jaxlib's handlers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.deviceless import building, pipeline
from tests.ptx_kernels import PTX, SYMBOL, add_arrays
from tracegraph.lowering.lower import Lowered
from tracegraph.runtime.definition.library_nodes import FfiCallNode
from tracegraph.runtime.definition.nodes import KernelCode, KernelNode
from tracegraph.runtime.ffi.c_api import DataType
from tracegraph.runtime.ffi.call import ArrayType, DictionaryAttribute, FfiCall, ScalarAttribute
from tracegraph.runtime.ffi.checks import find_registration_problem

SQUARE = np.ones((6, 6), np.float32)
F66, F6 = ArrayType(DataType.F32, (6, 6)), ArrayType(DataType.F32, (6,))
INFO = ArrayType(DataType.S32)
PIVOTS = ArrayType(DataType.S32, (6,))
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[str, tuple[Any, ...], tuple[Any, ...]]]]] = {
    "cholesky": (
        jnp.linalg.cholesky,
        [("cusolver_potrf_ffi", (F66,), (F66, INFO))],
    ),
    "eigh": (
        jnp.linalg.eigh,
        [("cusolver_syevd_ffi", (F66,), (F66, F6, INFO))],
    ),
    "svd": (
        lambda x: jnp.linalg.svd(x),
        [("cusolver_gesvdj_ffi", (F66,), (F66, F6, F66, F66, INFO))],
    ),
    "qr": (
        lambda x: jnp.linalg.qr(x),
        [
            ("cusolver_geqrf_ffi", (F66,), (F66, F6)),
            ("cusolver_orgqr_ffi", (F66, F6), (F66,)),
        ],
    ),
    "lu": (
        jax.scipy.linalg.lu,
        [
            ("cusolver_getrf_ffi", (F66,), (F66, PIVOTS, INFO)),
            ("cu_lu_pivots_to_permutation", (PIVOTS,), (PIVOTS,)),
        ],
    ),
}


def lower(function: Callable[..., Any], device: Any, argument: Any = SQUARE) -> Lowered:
    request = pipeline.make_capture_request(function, (argument,))
    return pipeline.lower_for_gpu(request, device)


def list_calls(lowered: Lowered) -> list[FfiCallNode]:
    (stage,) = lowered.definition.stages
    return [node for node in stage.nodes if isinstance(node, FfiCallNode)]


@pytest.mark.parametrize("name", CALLS)
def test_factorization_is_a_call_of_a_handler(name: str, h200: Any) -> None:
    function, expected = CALLS[name]
    lowered = lower(function, h200)
    nodes = list_calls(lowered)
    assert [(n.call.target, n.call.operands, n.call.results) for n in nodes] == expected
    sizes = {slot.name: slot.nbytes for slot in lowered.definition.slots}
    for node in nodes:
        for use, kind in zip(
            (*node.operands, *node.outputs), (*node.call.operands, *node.call.results), strict=True
        ):
            assert use is not None
            assert use.nbytes == kind.nbytes
            assert use.fits(sizes[use.buffer])
    building.check_built(lowered.definition)
    assert not building.find_faults(lowered.definition)


def test_attributes_are_those_of_the_program(h200: Any) -> None:
    (node,) = list_calls(lower(jnp.linalg.cholesky, h200))
    lower_part = ScalarAttribute(DataType.PRED, True)
    assert node.call.attributes == DictionaryAttribute((("lower", lower_part),))


def test_handlers_inside_of_xla_are_not_known(h200: Any) -> None:
    # Then lowering asks XLA for plain kernels: the reason names the call.
    keys = ArrayType(DataType.F32, (1 << 17,))
    problem = find_registration_problem(FfiCall("xla.gpu.ext.cub_sort_keys", (keys,), ()), "CUDA")
    assert problem.startswith("for which no handler of CUDA is known: it is built into XLA")
    assert not list_calls(lower(jnp.sort, h200, np.ones(1 << 17, np.float32)))


def test_a_kernel_in_ptx_is_a_kernel_of_the_graph(h200: Any):
    lowered = lower(lambda x: add_arrays(jnp.sin(x), x) * 2, h200, np.ones(64, np.float32))
    (stage,) = lowered.definition.stages
    kernels = [node for node in stage.nodes if isinstance(node, KernelNode)]
    assert len(kernels) == len(stage.nodes) == 3
    assert kernels[1].code == KernelCode(SYMBOL, PTX.encode() + b"\0")
    assert (kernels[1].shape.grid, kernels[1].shape.block) == ((2, 1, 1), (32, 1, 1))
    assert kernels[1].written == (False, False, True)
