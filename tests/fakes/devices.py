"""The devices that the tests of tg.memory run on: the host, and a GPU over host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.runtime import allocators, default_device
from tracegraph.runtime.host import device as host_device
from tracegraph.runtime.host.device import HostDevice
from tracegraph.runtime.streams import stream_backend

# What TRACEGRAPH_ALLOC_CONF says for each provider of a GPU.
PROVIDERS = {
    "jax": "",
    "cuda": "provider:cuda",
    "cuda_vmm": "expandable_segments:True",
    "cuda_async": "backend:cudaMallocAsync",
}
KINDS = ("host", *PROVIDERS)
_host = HostDevice(jax.devices("cpu")[0])


def forget_other_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the allocator of the host the only one in use, until the end of the test."""
    # Opened here if it was not before.
    host = _host.allocator
    pairs = [pair for pair in allocators._choice.opened if pair[0] is host]
    monkeypatch.setattr(allocators._choice, "opened", pairs)


def use_own_host_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the host a new allocator, which nothing that other tests left behind uses."""
    make_allocator = host_device._find_allocator.__wrapped__
    monkeypatch.setattr(host_device, "_find_allocator", functools.cache(make_allocator))


def use_device(monkeypatch: pytest.MonkeyPatch, kind: str) -> CudaOnHost | None:
    """Makes captures and tg.memory use a device; returns the one of a GPU, None for the host.

    Args:
        monkeypatch: undoes it.
        kind: ``host``, or the name of a provider of a GPU.
    """
    if kind == "host":
        return None
    monkeypatch.setenv("TRACEGRAPH_ALLOC_CONF", PROVIDERS[kind])
    device = capture_for_gpu(monkeypatch)
    monkeypatch.setattr(default_device, "find_device", lambda *, is_checking: device)
    monkeypatch.setattr(stream_backend, "_finders", [lambda _: device.streams])
    assert device.allocator.provider.name == kind
    return device


def add_in_two_regions(amount: float) -> Callable[[Any], Any]:
    """Returns a function with a value between two regions, which its graph has in scratch."""
    side = tg.Stream()

    def add(x: Any) -> Any:
        main = tg.current_stream()
        half = x + amount / 2
        side.wait_stream(main)
        with tg.stream(side):
            rest = half + amount / 2
        main.wait_stream(side)
        return rest * 1

    return add


def ones(count: int) -> jax.Array:
    """Returns float32 ones."""
    return jnp.ones(count)
