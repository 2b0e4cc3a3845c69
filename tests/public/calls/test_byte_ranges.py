"""A compiled program that reaches out of a buffer is refused before a graph of it is built.

Regions are kernels over host memory, see `tests/fakes/regions_as_kernels.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.oracles.error_lines import match
from tracegraph.lowering import compile_gpu
from tracegraph.lowering.device_program import DeviceStep
from tracegraph.lowering.xla.program import Allocation, AllocationKind, XlaProgram
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode

BESIDE = Allocation("#beside", 4096, AllocationKind.TEMPORARY)


def fill_too_much(program: XlaProgram) -> XlaProgram:
    """Plants a memset of 4096 bytes into the first argument, which is donated."""
    target = BufferUse("#0", 0, 4096)
    return plant(program, DeviceStep(FillNode("zero", target), (), (target,)))


def copy_from_behind(program: XlaProgram) -> XlaProgram:
    """Plants a memcpy from behind the first argument."""
    source, target = BufferUse("#0", 256, 64), BufferUse("#beside", 0, 64)
    return plant(program, DeviceStep(CopyNode("copy", source, target), (source,), (target,)))


def plant(program: XlaProgram, step: DeviceStep) -> XlaProgram:
    """Returns a program that agrees in itself: its first allocation has as many bytes."""
    first, *others = program.allocations
    large = dataclasses.replace(first, nbytes=4096)
    return dataclasses.replace(
        program, allocations=(large, *others, BESIDE), steps=(step, *program.steps)
    )


FAULTS = {
    "memset": (fill_too_much, "bytes 0 to 4,096 of `#0`, which has 256", "memset `zero` of `"),
    "memcpy": (copy_from_behind, "bytes 256 to 320 of `#0`, which has 256", "memcpy `copy` of `"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_graph_reaches_out_of_a_donated_argument(fault: str, monkeypatch: pytest.MonkeyPatch):
    device = capture_for_gpu(monkeypatch)
    spoil, problem, where = FAULTS[fault]
    compile_to_kernels: Any = compile_gpu._compile_to_kernels

    def compile_spoiled(*arguments: Any, **options: Any) -> Any:
        executable, program, taken = compile_to_kernels(*arguments, **options)
        return executable, spoil(program), taken

    step = tg.capture(lambda w, x: (w + x, (w * x).sum()), donate_argnums=0)
    w, x = jnp.ones(64), jnp.arange(64.0)
    with monkeypatch.context() as patch:
        patch.setattr(compile_gpu, "_compile_to_kernels", compile_spoiled)
        with pytest.raises(tg.UnsupportedError) as raised:
            step(w, x)
    text = "the program that XLA compiled reaches out of a buffer: "
    match(raised.value, text + problem, where, "the bytes behind", "use jax.jit")
    assert not device.driver.graphs
    assert not w.is_deleted()
    # The next call, of a sound program, is captured.
    assert float(step(w, x)[1]) == float(x.sum())
