"""Captures for a GPU without one: every region becomes one kernel, which XLA computes on the host.

All but XLA's kernels is what a GPU runs: lowering, plan, graph, replay, verification.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from tests.fakes.compilers import make_compiler
from tests.fakes.cuda_on_host import SHAPE, CudaOnHost, make_device
from tracegraph import captured_graphs, load_file, static_inputs
from tracegraph.capturing import capture_lowering
from tracegraph.graphed_callables import graph_pair
from tracegraph.lowering import compile_gpu
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.device_program import DeviceStep
from tracegraph.lowering.request import BufferSpec, Region
from tracegraph.lowering.xla.program import Allocation, AllocationKind, XlaProgram
from tracegraph.recording import cuda_core, cuda_graph
from tracegraph.runtime.cuda.jax_order import JaxOrder
from tracegraph.runtime.definition.nodes import BufferUse, KernelCode, KernelNode
from tracegraph.runtime.definition.packing import PACKED_BITS, pack, unpack

# The modules that ask which device graphs are for.
DOORS = (captured_graphs, cuda_core, cuda_graph, graph_pair, load_file, static_inputs)


def capture_for_gpu(
    monkeypatch: pytest.MonkeyPatch, *, float_atomics: Sequence[str] = ()
) -> CudaOnHost:
    """Makes captures use a CudaDevice over host memory; its driver has one kernel per region.

    Args:
        monkeypatch: undoes it.
        float_atomics: what every region says of itself.
    """
    device = make_device(monkeypatch)
    # Captures in several threads must not take one name twice.
    numbers = itertools.count()

    programs: dict[int, Any] = {}

    def compile_to_kernels(region: Region, compiler: Compiler, *, in_place: int, count: int) -> Any:
        found = compiler.find_compiled(region)
        if found is not None:
            return found.executable, programs[id(found.executable)], ()
        executable: Any = compiler.compile(region, in_place, count=count)
        symbol = f"{region.name}_{next(numbers)}"
        compute = executable
        if in_place:
            # A kernel gives nothing up that the host's compiler could take for its results.
            compute = make_compiler(compiler.target.jax_device).compile(region)
        device.driver.kernels[symbol] = make_kernel(region, compute, in_place)
        program = write_program(region, symbol, in_place, tuple(float_atomics))
        programs[id(executable)] = program
        return executable, program, ()

    await_array = JaxOrder.await_array

    def await_on_host(order: JaxOrder, array: Any) -> None:
        """Waits here for what is late: host memory has no stream that could."""
        if array.is_ready():
            await_array(order, array)
        else:
            array.block_until_ready()

    monkeypatch.setattr(JaxOrder, "await_array", await_on_host)
    monkeypatch.setattr(compile_gpu, "_compile_to_kernels", compile_to_kernels)
    # No program is read: to look for a plugin that is not there takes long.
    monkeypatch.setattr(capture_lowering, "prepare_reading", lambda: None)
    # A process of tests has millions of objects.
    monkeypatch.setattr(capture_lowering, "collect_ahead", lambda: None)
    for door in DOORS:
        monkeypatch.setattr(door, "find_device", lambda is_checking: device)
    return device


def make_kernel(
    region: Region, compute: Callable[..., Any], in_place: int
) -> Callable[[tuple[bytes, ...]], None]:
    """Returns a kernel: inputs are its first parameters, behind them results that have a place."""

    def run(parameters: tuple[bytes, ...]) -> None:
        addresses = [int.from_bytes(parameter, "little") for parameter in parameters]
        inputs = [read_array(a, spec) for a, spec in zip(addresses, region.inputs, strict=False)]
        results = compute(*inputs)
        results = results if len(region.outputs) != 1 else (results,)
        targets = [*addresses[:in_place], *addresses[len(region.inputs) :]]
        for address, result in zip(targets, results, strict=True):
            values = np.asarray(result)
            # Not called for others: tests count what a call enters.
            content = (pack(values) if values.dtype.name in PACKED_BITS else values).tobytes()
            ctypes.memmove(address, content, len(content))

    return run


def read_array(address: int, spec: BufferSpec) -> jax.Array:
    """Returns a copy of the bytes at an address."""
    content = ctypes.string_at(address, spec.nbytes)
    with jax.enable_x64(True):
        if spec.dtype.name in PACKED_BITS:
            values = unpack(np.frombuffer(content, np.uint8), spec.shape, spec.dtype)
        else:
            values = np.frombuffer(content, spec.dtype).reshape(spec.shape)
        return jax.numpy.asarray(values)


def write_program(
    region: Region, symbol: str, in_place: int, float_atomics: tuple[str, ...]
) -> XlaProgram:
    """Returns a region as one kernel over an allocation per input and per result of its own."""
    inputs = [
        Allocation(f"#{i}", spec.nbytes, AllocationKind.PARAMETER, i)
        for i, spec in enumerate(region.inputs)
    ]
    outputs = [
        Allocation(f"#{len(inputs) + i}", spec.nbytes, AllocationKind.OUTPUT)
        for i, spec in enumerate(region.outputs[in_place:])
    ]
    reads = tuple(BufferUse(each.name, 0, each.nbytes) for each in inputs)
    writes = tuple(BufferUse(each.name, 0, each.nbytes) for each in outputs)
    flags = tuple(index < in_place for index in range(len(reads))) + (True,) * len(writes)
    code = KernelCode(symbol, b"image of " + symbol.encode())
    node = KernelNode(region.name, code, SHAPE, (*reads, *writes), flags)
    step = DeviceStep(node, reads, (*reads[:in_place], *writes))
    results = (*(each.name for each in inputs[:in_place]), *(each.name for each in outputs))
    return XlaProgram(region.name, (*inputs, *outputs), (step,), results, float_atomics)
