"""Streams of other libraries: taken by handle or protocol, and refused where they are none."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from tests.fakes.cuda_on_host import CudaOnHost, floats, kernel, make_cuda_replay, make_device
from tests.fakes.definitions import make_definition, make_stage
from tracegraph.runtime.cuda.streams import is_readable
from tracegraph.runtime.errors import ConfigError
from tracegraph.runtime.streams import stream_backend
from tracegraph.runtime.streams.external_stream import ExternalStream
from tracegraph.runtime.streams.stream import Event, Stream, default_stream, stream


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    device = make_device(monkeypatch, is_deferred=True)
    monkeypatch.setattr(stream_backend, "_finders", [lambda _: device.streams])
    return device


@pytest.fixture
def handle(device: CudaOnHost) -> Iterator[int]:
    """The address of what the driver takes for a stream that another library made."""
    memory = (ctypes.c_uint64 * 4)()
    address = ctypes.addressof(memory)
    device.driver.foreign_streams[address] = device.context.order.primary
    yield address
    del memory


class Foreign:
    """A stream object of another library."""

    def __init__(self, handle: int, version: int = 0) -> None:
        self.answer = version, handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return self.answer


def test_a_handle_and_an_object(device: CudaOnHost, handle: int) -> None:
    for given in (handle, Foreign(handle)):
        outer = ExternalStream(given)
        assert outer.cuda_stream == handle
        assert outer.__cuda_stream__() == (0, handle)
        assert repr(outer) == f"ExternalStream({handle:#x}, number={outer.number})"
    assert device.driver.count_calls("create_stream") == 0


def test_it_is_never_destroyed(device: CudaOnHost, handle: int) -> None:
    outer = ExternalStream(handle)
    outer.wait_stream(default_stream())
    del outer
    assert device.driver.count_calls("destroy_stream") == 0


def test_graphs_run_on_it(device: CudaOnHost, handle: int) -> None:
    replay = make_cuda_replay(device, make_definition(make_stage(kernel("double", "x", "y"))))
    outer, after = ExternalStream(handle), Event()
    replay.load([(0, floats([1] * 4))])
    with stream(outer):
        replay.launch()
        after.record()
    assert not outer.query()
    after.synchronize()
    assert [c.arguments[1] for c in device.driver.calls if c.name == "launch"] == [handle]
    np.testing.assert_array_equal(replay.make_taker(0)(), [2] * 4)


@contextlib.contextmanager
def refused(what: str, why: str) -> Iterator[None]:
    with pytest.raises(ConfigError) as raised:
        yield
    error = raised.value
    assert error.what == f"{what} is not a stream"
    assert error.where == "argument `stream` of tg.ExternalStream"
    assert why in error.why
    assert error.anchor == "stream-handle"


@pytest.mark.parametrize(
    ("given", "what", "why"),
    [
        ("cuda:0", "'cuda:0'", "not an int"),
        (None, "None", "not an int"),
        (True, "True", "not an int"),
        (0, "0x0", "default streams"),
        (1, "0x1", "default streams"),
        (2, "0x2", "default streams"),
        (-8, "-0x8", "no memory"),
        (3, "0x3", "no memory"),
        (0xDEAD_BEEF_0000, "0xdeadbeef0000", "no memory"),
        (1 << 64, "0x10000000000000000", "no memory"),
    ],
)
def test_what_is_no_handle(device: CudaOnHost, given: Any, what: str, why: str) -> None:
    with refused(what, why):
        ExternalStream(given)
    assert device.driver.count_calls("find_context") == 0


def test_what_the_driver_refuses(device: CudaOnHost, handle: int) -> None:
    del device.driver.foreign_streams[handle]
    with refused(hex(handle), "CUDA_ERROR_INVALID_HANDLE from cuStreamGetCtx"):
        ExternalStream(handle)


def test_a_stream_of_another_context(device: CudaOnHost, handle: int) -> None:
    device.driver.foreign_streams[handle] = device.context.order.primary + 1
    with refused(hex(handle), "another GPU"):
        ExternalStream(handle)


def test_a_later_version_of_the_protocol(device: CudaOnHost, handle: int) -> None:
    foreign = Foreign(handle, version=1)
    with refused(repr(foreign), "version 1, not 0"):
        ExternalStream(foreign)


def test_which_addresses_can_be_read() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    view = (ctypes.c_char * mmap.PAGESIZE).from_buffer(page)
    address = ctypes.addressof(view)
    assert is_readable(address)
    assert is_readable(address + mmap.PAGESIZE - 8)
    assert not is_readable(address + 1)
    assert not is_readable(0)
    libc = ctypes.CDLL(None, use_errno=True)
    no_access = 0
    assert libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, no_access) == 0
    assert not is_readable(address)
    assert libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, 3) == 0
    del view
    page.close()


def test_a_stream_of_another_device(device: CudaOnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_device(monkeypatch)
    other.context.order.primary = other.driver.retain_primary_context(1)
    here, there = jax.devices("cpu")[0], object()
    devices = {None: device.streams, here: device.streams, there: other.streams}
    monkeypatch.setattr(stream_backend, "_finders", [devices.__getitem__])
    assert device.context.order.find_stream(Stream(here))
    with pytest.raises(ConfigError, match="on another device than its own"):
        device.context.order.find_stream(Stream(there))
    Stream(there, priority=-2).query()
    made = [c.arguments for c in other.driver.calls if c.name == "create_stream"]
    assert made == [(-2,)]
