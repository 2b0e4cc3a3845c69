"""The corpus itself: complete, distinct, and capturable."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.deviceless import pipeline, topology
from tests.deviceless.programs import PROGRAMS, Program


def test_names_differ() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS) >= 60


@pytest.mark.parametrize(("name", "leaves"), [("gpt_2x128", 79), ("gpt_12x128", 439)])
def test_gpt_state_has_its_leaves(name: str, leaves: int) -> None:
    program = next(program for program in PROGRAMS if program.name == name)
    state = program.make_arguments(np.random.default_rng(0))[0]
    assert len(jax.tree.leaves(state)) == leaves


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program_becomes_a_request(program: Program) -> None:
    with pipeline.setting_for(program):
        arguments = program.make_arguments(np.random.default_rng(0))
        others = program.make_arguments(np.random.default_rng(1))
        request = pipeline.make_capture_request(program.function, arguments, program.donate_argnums)
        results = jax.tree.leaves(jax.eval_shape(program.function, *arguments))
    assert len(request.outputs) == len(results)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(arguments)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(others)
    ]


def test_a_sort_whose_keys_are_not_used_keeps_the_copy_that_it_is_done_in(h200: Any) -> None:
    request = pipeline.make_capture_request(
        lambda x: jnp.unique(x, return_counts=True, size=6, fill_value=-1),
        (np.arange(8, dtype=np.int32),),
    )
    steps = pipeline.lower_for_gpu(request, h200).program.steps
    (sort,) = [step for step in steps if step.kind == "kernel" and "sort" in step.node.code.symbol]
    (copy,) = [step for step in steps if step.kind == "memcpy" and step.name == sort.name]
    assert copy.writes[0] in sort.reads
    assert copy.writes[0] in sort.writes


def test_a_padded_matmul_takes_its_bias_as_it_is(h200: Any) -> None:
    request = pipeline.make_capture_request(
        lambda x, y, z: jnp.tanh(x @ y + z),
        [np.ones(shape, jnp.bfloat16) for shape in ((6, 3), (3, 4), (4,))],
    )
    steps = pipeline.lower_for_gpu(request, h200).program.steps
    (matmul,) = [step.node for step in steps if step.kind == "matmul"]
    assert (matmul.matmul.d.rows, dict(matmul.operands)["bias"].nbytes) == (8, 8)


def test_missing_wheels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version__", "0.12.0.1")
    monkeypatch.setattr(topology, "PLUGINS", {"jax_plugins.no_such_plugin": "nvidia.none"})
    assert topology.find_obstacle() == "no CUDA plugin of jax is installed; run make deviceless"
    monkeypatch.setattr(topology, "PLUGINS", {"jax.numpy": "nvidia.none"})
    assert topology.find_obstacle() == "the CUDA plugin has no nvcc beside it; run make deviceless"
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    assert "needs 0.11 or later" in str(topology.find_obstacle())


def test_refused_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(jax, "__version__", "0.12.0.1")
    monkeypatch.setattr(topology, "PLUGINS", {"jax.numpy": "jax.numpy"})
    monkeypatch.setattr(topology, "find_h200", refuse)
    assert "JAX_PLATFORMS=cpu" in str(topology.find_obstacle())


@pytest.mark.parametrize(("value", "is_required"), [("1", True), ("", False), ("0", False)])
def test_requirement_is_read(
    value: str, is_required: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(topology.REQUIRED_BY, value)
    assert topology.is_required() is is_required
