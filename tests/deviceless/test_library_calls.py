"""Transforms and triangular solves, as XLA compiles them for an H200, become library calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.linalg import cho_solve, solve_triangular

from tests.deviceless import building, pipeline
from tests.fakes.compilers import WORKSPACE_BYTES
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.workspaces import measure_workspaces
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, list_nested
from tracegraph.runtime.definition.library_calls import (
    LibraryCall,
    Scale,
    Transform,
    TriangularSolve,
)
from tracegraph.runtime.definition.library_nodes import LibraryCallNode

F32, F64, C64, C128 = np.float32, np.float64, np.complex64, np.complex128


def lower(function: Callable[..., Any], device: Any, *arguments: Any) -> Lowered:
    wide = any(np.asarray(each).dtype in (F64, C128) for each in arguments)
    with jax.enable_x64(wide or bool(jax.config.read("jax_enable_x64"))):
        request = pipeline.make_capture_request(function, arguments)
        return pipeline.lower_for_gpu(request, device)


def list_calls(lowered: Lowered) -> list[LibraryCall]:
    nodes = [node for stage in lowered.definition.stages for node in list_nested(stage.nodes)]
    return [node.call for node in nodes if isinstance(node, LibraryCallNode)]


def zeros(dtype: Any, *shape: int) -> np.ndarray:
    return np.zeros(shape, dtype)


TRANSFORMS: dict[str, tuple[Callable[..., Any], Any, Transform, str]] = {
    "fft": (jnp.fft.fft, zeros(C64, 3, 8), Transform("C2C", False, (8,), (8,), (8,), 3), ""),
    "fft of an odd length": (
        jnp.fft.fft,
        zeros(C128, 7),
        Transform("Z2Z", False, (7,), (7,), (7,)),
        "",
    ),
    "ifft": (
        jnp.fft.ifft,
        zeros(C64, 2, 5),
        Transform("C2C", True, (5,), (5,), (5,), 2),
        "complex64",
    ),
    "fft2": (
        jnp.fft.fft2,
        zeros(C64, 2, 4, 6),
        Transform("C2C", False, (4, 6), (4, 6), (4, 6), 2),
        "",
    ),
    "ifftn": (
        lambda x: jnp.fft.ifftn(x, axes=(1, 2, 3)),
        zeros(C128, 2, 3, 4, 6),
        Transform("Z2Z", True, (3, 4, 6), (3, 4, 6), (3, 4, 6), 2),
        "complex128",
    ),
    "rfft": (
        jnp.fft.rfft,
        zeros(F32, 4, 9),
        Transform("R2C", False, (9,), (9,), (5,), 4),
        "",
    ),
    "rfft2": (
        jnp.fft.rfft2,
        zeros(F64, 4, 9),
        Transform("D2Z", False, (4, 9), (4, 9), (4, 5)),
        "",
    ),
    "irfft": (
        lambda x: jnp.fft.irfft(x, 9),
        zeros(C64, 4, 5),
        Transform("C2R", True, (9,), (5,), (9,), 4),
        "float32",
    ),
    "irfftn": (
        lambda x: jnp.fft.irfftn(x, (3, 4, 6), axes=(0, 1, 2)),
        zeros(C128, 3, 4, 4),
        Transform("Z2D", True, (3, 4, 6), (3, 4, 4), (3, 4, 6)),
        "float64",
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, h200: Any) -> None:
    function, argument, transform, scaled = TRANSFORMS[name]
    lowered = lower(function, h200, argument)
    count = argument.size if transform.form[0] == transform.form[-1] else 0
    calls = list_calls(lowered)
    assert calls[0] == transform
    if scaled:
        (scale,) = calls[1:]
        assert isinstance(scale, Scale)
        assert scale.dtype == scaled
        assert scale.count == (count or transform.target_size * transform.batch_count)
        assert np.isclose(scale.factor * transform.target_size, 1)
    else:
        assert len(calls) == 1
    building.check_built(lowered.definition)
    assert not building.find_faults(lowered.definition)


def test_the_workspace_is_part_of_the_plan(h200: Any) -> None:
    lowered = lower(jnp.fft.fft, h200, zeros(C64, 8))
    (node,) = (n for n in lowered.definition.stages[0].nodes if isinstance(n, LibraryCallNode))
    work = dict(node.operands)["workspace"]
    (slot,) = (each for each in lowered.definition.slots if each.name == work.buffer)
    assert work.nbytes == slot.nbytes == WORKSPACE_BYTES["fft"]
    assert slot.offset >= lowered.definition.arena_size.kept_bytes


def test_what_is_read_later_is_not_spoiled(h200: Any) -> None:
    # A transform to real numbers spoils its source.
    lowered = lower(lambda x: (jnp.fft.irfft(x, 8), x * 2), h200, zeros(C64, 5))
    (node,) = (n for n in lowered.definition.stages[0].nodes if n.kind == "fft")
    assert set(node.results).isdisjoint(lowered.definition.inputs)


def solve_with(**options: Any) -> Callable[..., Any]:
    return lambda a, b: lax.linalg.triangular_solve(a, b, **options)


SOLVES: dict[str, tuple[Callable[..., Any], Any, Any, TriangularSolve]] = {
    "left": (
        solve_with(left_side=True, lower=True),
        zeros(F32, 4, 4),
        zeros(F32, 4, 3),
        TriangularSolve("float32", True, True, False, "N", 4, 3),
    ),
    "right": (
        solve_with(left_side=False, lower=False),
        zeros(F64, 4, 4),
        zeros(F64, 3, 4),
        TriangularSolve("float64", False, False, False, "N", 3, 4),
    ),
    "unit and transposed": (
        solve_with(left_side=True, lower=False, transpose_a=True, unit_diagonal=True),
        zeros(F32, 4, 4),
        zeros(F32, 4, 3),
        TriangularSolve("float32", True, False, True, "T", 4, 3),
    ),
    "adjoint": (
        solve_with(left_side=True, lower=True, transpose_a=True, conjugate_a=True),
        zeros(C64, 4, 4),
        zeros(C64, 4, 3),
        TriangularSolve("complex64", True, True, False, "C", 4, 3),
    ),
    "batch": (
        solve_with(left_side=True, lower=True),
        zeros(C128, 2, 3, 4, 4),
        zeros(C128, 2, 3, 4, 2),
        TriangularSolve("complex128", True, True, False, "N", 4, 2, 6),
    ),
    "vector": (
        lambda a, b: solve_triangular(a, b, lower=True),
        zeros(F32, 4, 4),
        zeros(F32, 4),
        TriangularSolve("float32", True, True, False, "N", 4, 1),
    ),
}


@pytest.mark.parametrize("name", SOLVES)
def test_solves(name: str, h200: Any) -> None:
    function, a, b, solve = SOLVES[name]
    lowered = lower(function, h200, a, b)
    assert list_calls(lowered) == [solve]
    building.check_built(lowered.definition)
    assert not building.find_faults(lowered.definition)


def gaussian_process(x: Any, y: Any) -> Any:
    """Returns the marginal likelihood of a Gaussian process, up to a constant."""
    kernel = jnp.exp(-0.5 * (x[:, None] - x[None]) ** 2) + 0.1 * jnp.eye(len(x), dtype=x.dtype)
    factor = jnp.linalg.cholesky(kernel)
    return y @ cho_solve((factor, True), y) / 2 + jnp.log(jnp.diag(factor)).sum()


def test_a_gaussian_process_and_its_gradient_is_one_graph(h200: Any) -> None:
    both = jax.value_and_grad(gaussian_process, (0, 1))
    lowered = lower(both, h200, zeros(F32, 6), zeros(F32, 6))
    (stage,) = lowered.definition.stages
    kinds = [node.kind for node in stage.nodes]
    assert stage.is_captured
    assert kinds.count("ffi_call") == 1
    assert kinds.count("triangular_solve") >= 2
    building.check_built(lowered.definition)
    assert not building.find_faults(lowered.definition)


def test_calls_in_the_body_of_a_loop(h200: Any) -> None:
    def repeat(x: Any) -> Any:
        return lax.while_loop(
            lambda c: jnp.abs(c).sum() > 1, lambda c: jnp.fft.ifft(jnp.fft.fft(c) * 0.5), x
        )

    lowered = lower(repeat, h200, zeros(C64, 8))
    (loop,) = (n for n in lowered.definition.stages[0].nodes if isinstance(n, ConditionalNode))
    inner = [node.kind for node in list_nested([loop])]
    assert (inner.count("fft"), inner.count("scale")) == (2, 1)
    building.check_built(lowered.definition)
    assert not building.find_faults(lowered.definition)


def test_an_empty_transform_and_an_empty_solve_are_nothing(h200: Any) -> None:
    assert list_calls(lower(jnp.fft.ifft, h200, zeros(C64, 0, 4))) == []
    solve = solve_with(left_side=True, lower=True)
    assert list_calls(lower(solve, h200, zeros(F32, 4, 4), zeros(F32, 4, 0))) == []


def test_the_report_counts_the_workspaces(h200: Any) -> None:
    lowered = lower(lambda x: jnp.fft.irfft(jnp.fft.rfft(x), 8), h200, zeros(F32, 8))
    workspaces = measure_workspaces(lowered.definition)
    assert (workspaces.count, workspaces.largest_bytes) == (2, WORKSPACE_BYTES["fft"])
    assert str(workspaces).startswith("workspace of 2 library calls: 512 bytes at most")
