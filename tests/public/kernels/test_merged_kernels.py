"""Merged kernels are tried where graphs are made of kernels, and used if the bits are the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.fakes.trials import give_times, report_trial
from tracegraph.capturing import fastest_variant
from tracegraph.lowering import plan_program
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.device_program import DeviceProgram, DeviceStep
from tracegraph.lowering.request import BufferSpec
from tracegraph.runtime.definition.nodes import BufferUse, FillNode
from tracegraph.runtime.errors import UnsupportedError

X = jnp.linspace(0.5, 2.0, 16)


def double(x: Any) -> Any:
    return x * 2


def add_fill(program: DeviceProgram, target: BufferUse) -> DeviceProgram:
    fill = DeviceStep(FillNode("planted", target), (), (target,))
    edges = (*program.edges, (len(program.steps) - 1, len(program.steps)))
    return dataclasses.replace(program, steps=(*program.steps, fill), edges=edges)


def merge_well(program: DeviceProgram, compile_kernel: Any) -> DeviceProgram:
    """Stands for a merge: another number of nodes, and the same results."""
    assert callable(compile_kernel)
    spare = BufferSpec("spare", (64,), program.buffers[0].dtype)
    program = dataclasses.replace(program, buffers=(*program.buffers, spare))
    return add_fill(program, BufferUse("spare", 0, spare.nbytes))


def merge_badly(program: DeviceProgram, compile_kernel: Any) -> DeviceProgram:
    """Overwrites the first byte of a result."""
    del compile_kernel
    return add_fill(program, BufferUse(program.outputs[0].buffer.name, 0, 1))


def refuse(program: DeviceProgram, compile_kernel: Any) -> DeviceProgram:
    del program, compile_kernel
    raise UnsupportedError("NVRTC is missing", where="", why="", fix="install it", anchor="x")


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return give_times(monkeypatch)


def call(monkeypatch: Any, merge: Any) -> str:
    """Returns what the report of a captured function says of merged kernels."""
    monkeypatch.setattr(plan_program, "merge_loops", merge)
    return report_trial(double, X, "small kernels merged")


@pytest.mark.usefixtures("times")
def test_merged_kernels_that_are_faster_are_used(monkeypatch: Any) -> None:
    text = call(monkeypatch, merge_well)
    assert text == "small kernels merged: used; 20 µs without, 10 µs with (1 nodes become 2)"


def test_merged_kernels_that_are_slower_are_not(monkeypatch: Any, times: list[float]) -> None:
    times.reverse()
    assert "not used: it is not faster here; 10 µs without" in call(monkeypatch, merge_well)


@pytest.mark.usefixtures("times")
def test_merged_kernels_with_other_bits_are_never_used(monkeypatch: Any) -> None:
    text = call(monkeypatch, merge_badly)
    assert "not used: the replay of `double` differs" in text


@pytest.mark.usefixtures("times")
def test_without_a_compiler_nothing_is_merged_and_that_is_said(monkeypatch: Any) -> None:
    assert "not used: NVRTC is missing; install it (" in call(monkeypatch, refuse)


@pytest.mark.usefixtures("times")
def test_nothing_to_merge_is_no_line(monkeypatch: Any) -> None:
    assert call(monkeypatch, lambda program, _: program) == ""


@pytest.mark.usefixtures("times")
def test_xla_compiles_once_for_both(monkeypatch: Any) -> None:
    names: list[str] = []
    compile_region = Compiler.compile

    def note(self: Compiler, region: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(region.name)
        return compile_region(self, region, *args, **kwargs)

    monkeypatch.setattr(Compiler, "compile", note)
    assert "used; 20 µs" in call(monkeypatch, merge_well)
    assert len(names) == 1


@pytest.mark.usefixtures("times")
def test_another_process_merges_without_a_trial(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE", "1")
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(tmp_path / "kernels"))
    first = call(monkeypatch, merge_well)
    before = tg.kernel_cache.info()
    monkeypatch.setattr(fastest_variant, "choose_variant", None)
    assert call(monkeypatch, refuse) == first
    after = tg.kernel_cache.info()
    assert (after.hits - before.hits, after.misses - before.misses) == (1, 0)


def test_the_host_device_has_no_kernels_to_merge(monkeypatch: Any) -> None:
    assert call(monkeypatch, refuse) == ""
