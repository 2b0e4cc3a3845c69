"""HostDevice: what it says of itself, and memory that it shares with all hosts."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from tracegraph.runtime.device import Device
from tracegraph.runtime.host.device import HostDevice


def make_device(*, is_checking: bool = False) -> Device:
    return HostDevice(jax.devices("cpu")[0], is_checking=is_checking)


def test_what_it_is() -> None:
    device = make_device()
    assert (device.name, device.takes_kernels, device.comparison) == ("host", False, None)
    assert device.updates_in_place
    assert not make_device(is_checking=True).updates_in_place


def test_nothing_is_prepared() -> None:
    device = make_device()
    provider: Any = device.allocator.provider
    before = provider.reserved_bytes
    device.prepare_result((1 << 20,), np.dtype(np.float32))
    device.preload_matmuls()
    device.preload_convolutions()
    assert provider.reserved_bytes == before


def test_all_hosts_share_their_allocators() -> None:
    one, other = make_device(), make_device(is_checking=True)
    assert one.allocator is other.allocator
    assert one.host_allocator is other.host_allocator
    block = one.host_allocator.allocate(1000)
    assert block.nbytes == 1024
    other.host_allocator.free(block)
