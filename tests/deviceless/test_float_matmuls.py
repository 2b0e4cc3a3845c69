"""Float32 matmuls compiled for an H200: one kernel each, by the instructions of warpgroups."""

from __future__ import annotations

import functools
import os
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.deviceless.pipeline import lower_with_own_kernels, make_replaced_request
from tests.deviceless.topology import find_assembler
from tracegraph.lowering.kernels.matmuls.float_matmul import FloatMatmul, write_float_matmul
from tracegraph.lowering.kernels.own_kernel import OPTIONS, write_listing
from tracegraph.replacements.float_matmuls import FloatMatmuls
from tracegraph.replacements.match import Machine
from tracegraph.runtime.cuda.libraries.nvrtc import compile_source
from tracegraph.runtime.definition.nodes import KernelNode

pytest.importorskip("cuda.bindings.nvrtc")

COMPILE = functools.partial(compile_source, "9.0")
H200 = Machine("9.0", 132, COMPILE)


def train(weights: Any, x: Any, target: Any) -> Any:
    def compute_loss(weights: Any) -> Any:
        return ((jnp.matmul(x, weights, precision="highest") - target) ** 2).mean()

    loss, gradient = jax.value_and_grad(compute_loss)(weights)
    return weights - 0.1 * gradient, loss


def test_a_step_has_a_kernel_for_each_matmul_and_copies_nothing(h200: Any) -> None:
    shapes = [(4096, 2048), (640, 4096), (640, 2048)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    request = make_replaced_request(train, arguments, [FloatMatmuls()], H200)
    lowered = lower_with_own_kernels(request, h200, COMPILE)
    nodes = [node for stage in lowered.definition.stages for node in stage.nodes]
    kernels = [node for node in nodes if isinstance(node, KernelNode)]
    assert len(kernels) == len(nodes)
    own = [node for node in kernels if node.code.symbol.startswith("float_matmul")]
    assert len(own) == 2
    assert all(node.begins_with_wait and node.shape.shared_bytes > 96 << 10 for node in own)
    # Parts of the sums, the loss in two kernels, and the update of the weights.
    assert len(nodes) <= 6


def test_an_older_assembler_takes_the_ptx_and_keeps_all_in_registers(tmp_path: Any) -> None:
    assembler = find_assembler()
    if assembler is None:
        pytest.skip("needs the assembler of PTX: it comes with the wheels of make deviceless")
    for ways in [(True, False), (False, False), (True, True), (False, True)]:
        kernel = write_float_matmul(FloatMatmul(640, 1028, 1000, *ways), 2, 132)
        listing = write_listing(kernel, COMPILE(kernel.source, OPTIONS).ptx)
        (tmp_path / "kernel.ptx").write_text(listing)
        command = [assembler, "-v", "-arch=sm_90a", str(tmp_path / "kernel.ptx"), "-o", os.devnull]
        output = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
        assert ".version 8.0\n" in listing
        assert "0 bytes spill stores, 0 bytes spill loads" in output.stderr
        # A wait that the assembler puts in by itself would be said here.
        assert "wgmma" not in output.stderr
        assert "warpgroup" not in output.stderr
