"""Calls of our own kernels from inside of a replacement: custom calls that XLA leaves alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tracegraph.lowering.kernels.own_kernel import OPTIONS, OwnKernel, write_listing
from tracegraph.replacements.match import Machine

# XLA's custom call of a kernel in PTX.
TARGET = "__gpu$xla.gpu.ptx"


def call_kernel(
    kernel: OwnKernel,
    machine: Machine,
    results: Sequence[Any],
    operands: Sequence[Any],
    aliases: Mapping[int, int] | None = None,
) -> list[Any]:
    """Returns the results of a kernel, see Note [Kernels inside of XLA's program].

    Args:
        kernel: its parameters are the operands and then the results.
        machine: that it is compiled for.
        results: shape and dtype of each.
        operands: one array per parameter.
        aliases: for an operand that the kernel writes into which result it is.

    Raises:
        UnsupportedError: NVRTC is not installed.
    """
    ptx = machine.compile_kernel(kernel.source, OPTIONS).ptx
    call = jax.ffi.ffi_call(TARGET, tuple(results), input_output_aliases=dict(aliases or {}))
    axes = zip("xyz", kernel.shape.grid, kernel.shape.block, strict=True)
    sizes = {
        f"{what}_{axis}": np.int32(size)
        for axis, blocks, threads in axes
        for what, size in (("grid", blocks), ("block", threads))
    }
    return list(
        call(
            *operands,
            name=kernel.symbol,
            kernel_type="ptx",
            kernel_data=write_listing(kernel, ptx),
            shared_mem_bytes=np.int32(kernel.shape.shared_bytes),
            **sizes,
        )
    )
