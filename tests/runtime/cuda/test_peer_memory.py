"""The memory through which GPUs meet, on fake drivers over host memory."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tests.fakes.cuda_on_host import CudaOnHost, make_device
from tracegraph.runtime.cuda import peer_memory
from tracegraph.runtime.cuda.context import CudaContext
from tracegraph.runtime.cuda.peer_memory import find_peer_memory
from tracegraph.runtime.definition.signals import COUNTS_OFFSET, count_signal_bytes
from tracegraph.runtime.errors import UnsupportedError


class Place:
    """Stands for the JAX device of another GPU."""

    def __init__(self, number: int) -> None:
        self.local_hardware_id = number


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[CudaOnHost]:
    monkeypatch.setattr(peer_memory, "_memories", {})
    devices = [make_device(monkeypatch) for _ in range(3)]
    for number, device in enumerate(devices):
        place: Any = Place(number)
        device.context.jax_device = place
    return devices


def list_contexts(gpus: list[CudaOnHost]) -> list[CudaContext]:
    return [gpu.context for gpu in gpus]


def write_word(address: int, value: int) -> None:
    ctypes.c_uint32.from_address(address).value = value


def read_word(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def test_each_gpu_reaches_all_others_and_begins_at_zero(gpus: list[CudaOnHost]) -> None:
    memory = find_peer_memory(list_contexts(gpus))
    assert len({*memory.addresses}) == 3
    for gpu, address in zip(gpus, memory.addresses, strict=True):
        peers = [call.arguments[0] for call in gpu.driver.calls if call.name == "allow_peer"]
        assert peers == [other.context.order.primary for other in gpus if other is not gpu]
        sizes = [c.arguments[0] for c in gpu.driver.calls if c.name == "allocate_memory"]
        assert count_signal_bytes(3) in sizes
        assert read_word(address) == read_word(address + COUNTS_OFFSET) == 0


def test_a_group_has_one_memory_and_another_order_another(gpus: list[CudaOnHost]) -> None:
    first, second, third = list_contexts(gpus)
    assert find_peer_memory([first, second]) is find_peer_memory([first, second])
    assert find_peer_memory([second, first]) is not find_peer_memory([first, second])
    assert find_peer_memory([first, third]) is not find_peer_memory([first, second])


def test_stop_ends_waiting_and_then_sets_all_counts_to_zero(gpus: list[CudaOnHost]) -> None:
    memory = find_peer_memory(list_contexts(gpus))
    for address in memory.addresses:
        write_word(address + COUNTS_OFFSET, 7)
    seen: list[list[int]] = []
    for gpu in gpus:
        finish = gpu.driver.synchronize_stream

        def synchronize(stream: int, finish: Any = finish) -> None:
            seen.append([read_word(address) for address in memory.addresses])
            finish(stream)

        gpu.driver.synchronize_stream = synchronize
    memory.stop()
    # All GPUs are told before any of them is waited for.
    assert all(seen[0])
    assert [read_word(each) for each in memory.addresses] == [0, 0, 0]
    assert [read_word(each + COUNTS_OFFSET) for each in memory.addresses] == [0, 0, 0]


def test_gpus_that_cannot_reach_each_other_are_refused(gpus: list[CudaOnHost]) -> None:
    gpus[1].driver.can_access_peer = lambda ordinal, peer: False
    with pytest.raises(UnsupportedError, match="cannot reach the memory") as caught:
        find_peer_memory(list_contexts(gpus))
    assert caught.value.anchor == "several-devices"
    assert len(str(caught.value).splitlines()) == 4
