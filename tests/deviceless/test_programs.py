"""The corpus itself: complete, distinct, and capturable."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.deviceless import pipeline, topology
from tests.deviceless.programs import PROGRAMS, Program
from tests.fakes.machine_code import ALWAYS, LDG, WAIT
from tracegraph.runtime.definition.nodes import KernelNode


def count_early_loads(image: bytes) -> int:
    """Returns how many loads of a kernel come before its wait."""
    # Each kernel begins with this one: LDC R1, c[0x0][0x28].
    begin = image.index(0x00000A00FF017B82.to_bytes(8, "little"))
    wait = image.index((ALWAYS << 12 | WAIT).to_bytes(8, "little"), begin)
    words = [int.from_bytes(image[at : at + 8], "little") for at in range(begin, wait, 16)]
    return sum(word & 0xFFF == LDG for word in words)


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


def test_no_kernel_that_loads_ahead_of_its_wait_is_started_early(h200: Any) -> None:
    """The numbers that the first kernels compute are read by an address without arithmetic."""

    def drop(x: Any, key: Any) -> Any:
        key, other = (jax.random.fold_in(key, number) for number in range(2))
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.where(kept, x * jax.random.uniform(other, x.shape), 0.0)

    request = pipeline.make_capture_request(drop, (np.ones(8, np.float32), np.zeros(2, np.uint32)))
    (stage,) = pipeline.lower_for_gpu(request, h200).definition.stages
    kernels = [node for node in stage.nodes if isinstance(node, KernelNode)]
    assert len(kernels) == len(stage.nodes)
    loads = [count_early_loads(node.code.cubin) for node in kernels]
    assert [node.begins_with_wait for node in kernels] == [not count for count in loads]
    assert any(loads), "this ptxas moves no load ahead of the wait: find another program"
    assert stage.programmatic == {edge for edge in stage.edges if not loads[edge[1]]}


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
