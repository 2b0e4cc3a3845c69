"""Captures for several GPUs without one: a region is one kernel on each; the last one computes.

All but XLA's kernels and the collectives is what GPUs run: the parts of arrays, one graph for each
device, its memory, replay and verification.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost, make_device
from tests.fakes.regions_as_kernels import capture_for_gpu, read_array, write_program
from tracegraph.capturing import spread_graphs
from tracegraph.lowering import compile_gpu, lower_spread
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.request import Region
from tracegraph.runtime.cuda import spread_gpus
from tracegraph.runtime.jax_interop import join_parts, make_aval


def capture_for_gpus(monkeypatch: pytest.MonkeyPatch) -> list[CudaOnHost]:
    """Makes captures use a CudaDevice for each CPU device of JAX.

    Args:
        monkeypatch: undoes it.
    """
    first = capture_for_gpu(monkeypatch)
    rest = range(1, len(jax.devices("cpu")))
    devices = [first, *(make_device(monkeypatch, index=index) for index in rest)]
    by_jax = {device.jax_device: device for device in devices}
    of_one = compile_gpu._compile_to_kernels
    numbers = itertools.count()

    def compile_to_kernels(region: Region, compiler: Compiler, *, in_place: int, count: int) -> Any:
        found = compiler.find_compiled(region)
        if compiler.partitions == 1 or found is None:
            return of_one(region, compiler, in_place=in_place, count=count)
        symbol = f"spread_{region.name}_{next(numbers)}"
        kernels = make_kernels(region, found.executable, in_place, compiler.partitions)
        for device, kernel in zip(devices, kernels, strict=True):
            device.driver.kernels[symbol] = kernel
        return found.executable, write_program(region, symbol, in_place, ()), ()

    monkeypatch.setattr(compile_gpu, "_compile_to_kernels", compile_to_kernels)
    monkeypatch.setattr(lower_spread, "keep_legal", lambda _: ())
    monkeypatch.setattr(spread_graphs, "find_any_device", by_jax.__getitem__)
    monkeypatch.setattr(spread_gpus, "find_cuda_device", by_jax.__getitem__)
    return devices


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
    devices = jax.devices("cpu")
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
