"""Kernels of our own on their way through XLA: from the listing to a node with machine code."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fakes.gpu_programs import kernel
from tracegraph.lowering.device_program import ConditionalStep, DeviceStep
from tracegraph.lowering.kernels.device_head import HEAD
from tracegraph.lowering.kernels.own_kernel import (
    OPTIONS,
    OwnKernel,
    name_kernel,
    read_listing,
    write_listing,
)
from tracegraph.lowering.own_kernels import compile_own_kernels
from tracegraph.runtime.definition.code_target import CompiledSource
from tracegraph.runtime.definition.graph_nodes import Construct
from tracegraph.runtime.definition.nodes import KernelCode, KernelNode, LaunchShape

SHAPE = LaunchShape((4, 1, 1), (128, 1, 1))
KERNEL = OwnKernel("own", HEAD + "KERNEL(128) own() {\n  // |\n}\n", SHAPE, (1, 2))
PTX = "//\n// NVRTC\n.version 9.1\n.target sm_90\n.visible .entry own() { ret; }\n"


def list_own(listing: str) -> DeviceStep:
    """Returns a step as XLA's custom call becomes one."""
    step = kernel("call", "x w v", "y")
    assert isinstance(step.node, KernelNode)
    code = KernelCode("own", listing.encode())
    return dataclasses.replace(step, node=dataclasses.replace(step.node, code=code, shape=SHAPE))


def compile_kernel(source: str, options: tuple[str, ...]) -> CompiledSource:
    assert (source, options) == (KERNEL.source, OPTIONS)
    return CompiledSource(b"machine code", PTX)


@pytest.mark.parametrize("early", [(), (0,), (1, 2)])
def test_a_listing_is_read_as_it_was_written(early: tuple[int, ...]) -> None:
    written = dataclasses.replace(KERNEL, early=early)
    listing = write_listing(written, PTX)
    assert read_listing(listing.encode(), "own", SHAPE) == written
    assert ".version 8.0\n.target sm_90" in listing
    assert listing.endswith(".visible .entry own() { ret; }\n")


@pytest.mark.parametrize("image", [b"", b"\x7fELF", PTX.encode(), b"// tracegraph kernel"])
def test_other_code_is_no_listing(image: bytes) -> None:
    assert read_listing(image, "own", SHAPE) is None


def test_a_node_gets_machine_code_and_waits() -> None:
    call, other = list_own(write_listing(KERNEL, PTX)), kernel("k", "y", "z")
    body = ConditionalStep("loop", Construct.WHILE, ((call,),), other)
    compiled, rest, loop = compile_own_kernels([call, other, body], compile_kernel)
    assert isinstance(compiled, DeviceStep)
    assert isinstance(compiled.node, KernelNode)
    assert compiled.node.code == KernelCode("own", b"machine code", (1, 2))
    assert compiled.node.begins_with_wait
    assert [use.buffer for use in compiled.node.early_loads] == ["w", "v"]
    assert (compiled.reads, compiled.writes) == (call.reads, call.writes)
    assert rest is other
    assert isinstance(loop, ConditionalStep)
    assert loop.bodies == ((compiled,),)


def test_kernels_of_two_sources_have_two_names() -> None:
    names = {name_kernel("rows", source) for source in ("a", "b", "a")}
    assert len(names) == 2
    assert all(name.startswith("rows_") for name in names)
