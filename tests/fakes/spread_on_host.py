"""Captures for several GPUs without one: a region is one kernel on each; the last one computes.

All but XLA's kernels and the collectives is what GPUs run: the parts of arrays, one graph for each
device, its memory, replay and verification. Where devices are of several processes, each has those
of its own, and the first result goes through a joint collective that sends it to where it is.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from tests.fakes.cuda_on_host import STREAM, CudaOnHost, make_device
from tests.fakes.regions_as_kernels import capture_for_gpu, read_array, write_program
from tracegraph.capturing import spread_graphs
from tracegraph.lowering import compile_gpu, lower_spread
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.cut_collectives import cut_collectives
from tracegraph.lowering.device_program import DeviceStep
from tracegraph.lowering.request import Region
from tracegraph.lowering.xla.program import Allocation, AllocationKind, XlaProgram
from tracegraph.runtime.cuda import joint_collectives, spread_gpus
from tracegraph.runtime.definition.collective_nodes import CollectiveKind, CollectiveNode, Exchange
from tracegraph.runtime.jax_interop import join_parts, make_aval


def capture_for_gpus(monkeypatch: pytest.MonkeyPatch) -> list[CudaOnHost]:
    """Makes captures use a CudaDevice for each CPU device of JAX.

    Args:
        monkeypatch: undoes it.
    """
    first = capture_for_gpu(monkeypatch)
    rest = range(1, jax.local_device_count("cpu"))
    devices = [first, *(make_device(monkeypatch, index=index) for index in rest)]
    by_jax = {device.jax_device: device for device in devices}
    of_one = compile_gpu._compile_to_kernels
    numbers = itertools.count()

    def compile_to_kernels(region: Region, compiler: Compiler, *, in_place: int, count: int) -> Any:
        found = compiler.find_compiled(region)
        if len(compiler.owners) == 1 or found is None:
            return of_one(region, compiler, in_place=in_place, count=count)
        symbol = f"spread_{region.name}_{next(numbers)}"
        kernels = make_kernels(region, found.executable, in_place, len(devices))
        for device, kernel in zip(devices, kernels, strict=True):
            device.driver.kernels[symbol] = kernel
        program = write_program(region, symbol, in_place, ())
        if len({*compiler.owners}) > 1:
            program = send_in_place(program, len(compiler.owners))
        return found.executable, cut_collectives(program, compiler.owners, region.name, str), ()

    def compile_joint(*arguments: Any) -> Any:
        call, sharding = compile_on_host(*arguments)

        def run(*arrays: Any) -> Any:
            """Calls behind all work on the streams, as on GPUs; what is freed stays until then."""
            for device in devices:
                device.driver.finish(STREAM)
            results = jax.block_until_ready(call(*arrays))
            first.driver.jax_memory.extend(results)
            return results

        return run, sharding

    compile_on_host = joint_collectives._compile
    monkeypatch.setattr(joint_collectives, "_compile", compile_joint)
    monkeypatch.setattr(compile_gpu, "_compile_to_kernels", compile_to_kernels)
    monkeypatch.setattr(lower_spread, "keep_legal", lambda _: ())
    monkeypatch.setattr(spread_graphs, "find_any_device", by_jax.__getitem__)
    monkeypatch.setattr(spread_gpus, "find_cuda_device", by_jax.__getitem__)
    return devices


def send_in_place(program: XlaProgram, count: int) -> XlaProgram:
    """Returns a program whose last result each device sends to itself, as all do at once."""
    (kernel,) = program.steps
    assert isinstance(kernel, DeviceStep)
    target = kernel.writes[-1]
    source = target._replace(buffer="#sent")
    devices = tuple(range(count))
    pairs = tuple(zip(devices, devices, strict=True))
    exchange = Exchange(CollectiveKind.PERMUTE, "U8", target.nbytes, (devices,), pairs=pairs)
    sent = Allocation(source.buffer, source.nbytes, AllocationKind.TEMPORARY)
    send = CollectiveNode("send", exchange, source, target)
    return dataclasses.replace(
        program,
        allocations=(*program.allocations, sent),
        steps=(
            kernel.move(lambda use: source if use == target else use),
            DeviceStep(send, (source,), (target,)),
        ),
    )


def make_kernels(
    region: Region, executable: Any, in_place: int, count: int
) -> list[Callable[[tuple[bytes, ...]], None]]:
    """Returns the kernel of each device; the last one that is launched computes for all."""
    waiting: dict[int, list[int]] = {}

    def launch(number: int, parameters: tuple[bytes, ...]) -> None:
        waiting[number] = [int.from_bytes(parameter, "little") for parameter in parameters]
        if len(waiting) < count:
            return
        addresses = [waiting[each] for each in range(count)]
        waiting.clear()
        _compute(region, executable, in_place, addresses)

    def make(number: int) -> Callable[[tuple[bytes, ...]], None]:
        return lambda parameters: launch(number, parameters)

    return [make(number) for number in range(count)]


def _compute(
    region: Region, executable: Any, in_place: int, addresses: Sequence[Sequence[int]]
) -> None:
    shardings, _ = executable.input_shardings
    devices = jax.local_devices(backend="cpu")
    inputs = []
    for index, (spec, sharding) in enumerate(zip(region.inputs, shardings, strict=True)):
        parts = [
            jax.device_put(read_array(each[index], spec), device)
            for each, device in zip(addresses, devices, strict=False)
        ]
        # `spec` has the shape of a part.
        whole = _find_whole(spec.shape, sharding)
        inputs.append(join_parts(make_aval(whole, spec.dtype), sharding, parts))
    results = executable(*inputs)
    results = results if len(region.outputs) != 1 else (results,)
    for number, each in enumerate(addresses):
        targets = [*each[:in_place], *each[len(region.inputs) :]]
        for address, result in zip(targets, results, strict=True):
            (part,) = [s.data for s in result.addressable_shards if s.device == devices[number]]
            content = np.asarray(part).tobytes()
            ctypes.memmove(address, content, len(content))


def _find_whole(part: tuple[int, ...], sharding: Any) -> tuple[int, ...]:
    """Returns the shape of the array that has parts of a shape."""
    ones = sharding.shard_shape(tuple(size * 64 for size in part))
    return tuple(
        size * (size * 64 // max(found, 1)) if size else 0
        for size, found in zip(part, ones, strict=True)
    )
