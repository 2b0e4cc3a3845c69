"""StreamGates: streams that wait until the test lets them go on."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.oracles.allocator_operations import BLOCKABLE, STREAM_COUNT

CANDIDATES = 10
WORD_BYTES = 64
HOST_BYTES = 4096
# Portable, and mapped for the device.
HOST_FLAGS = 3
# Other processes take their turns on the GPU meanwhile.
SETTLE_S = 1.0
STALL_S = 10.0


class StreamGates:
    """Five streams of PyTorch, of which two can be blocked without holding up the others.

    A blocked stream waits for a word of page-locked memory, which the host writes.

    Args:
        torch: the module.

    Attributes:
        streams: the default stream first.
        blocked: indices of those that wait.
    """

    def __init__(self, torch: Any) -> None:
        torch.cuda.init()
        # Kernels are loaded at their first use, which may wait for the device.
        torch.cuda._sleep(1000)
        torch.zeros(1024, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.blocked: set[int] = set()
        self._torch = torch
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._host, self._device = self._map_words()
        self._targets = [0] * (CANDIDATES + 1)
        self.streams = self._choose_streams()
        torch.cuda.empty_cache()

    def block(self, index: int) -> None:
        """Lets a stream wait."""
        self._block(self.streams[index], index)
        self.blocked.add(index)

    def open(self, index: int) -> None:
        """Lets a stream go on."""
        self._write_word(index)
        self.blocked.discard(index)

    def open_all(self) -> None:
        """Lets all streams go on."""
        for index in range(len(self._targets)):
            self._write_word(index)
        self.blocked.clear()

    @contextlib.contextmanager
    def watch(self, what: object) -> Iterator[None]:
        """Opens all gates if the body hangs, and says so.

        Raises:
            TimeoutError: the body waited for a blocked stream.
        """
        start = time.monotonic()
        timer = threading.Timer(STALL_S, self.open_all)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if time.monotonic() - start > STALL_S:
            raise TimeoutError(f"{what} waited for a blocked stream")

    def _choose_streams(self) -> list[Any]:
        # Streams share queues of the device: a blocked one may hold up others.
        candidates = [self._torch.cuda.Stream() for _ in range(CANDIDATES)]
        default = self._torch.cuda.default_stream()
        chosen: list[Any] = []
        for stream in list(candidates):
            if len(chosen) == len(BLOCKABLE):
                break
            if stream not in candidates:
                continue
            held = self._find_held(stream, [default, *candidates])
            if default not in held and not any(other in held for other in chosen):
                chosen.append(stream)
                candidates = [other for other in candidates if other not in held]
        rest = [stream for stream in candidates if stream not in chosen]
        streams = [default, *chosen, *rest][:STREAM_COUNT]
        if len(chosen) < len(BLOCKABLE) or len(streams) < STREAM_COUNT:
            raise RuntimeError("too few independent streams: set CUDA_DEVICE_MAX_CONNECTIONS=32")
        return streams

    def _find_held(self, stream: Any, others: list[Any]) -> list[Any]:
        """Returns those of the other streams that stand still while this one is blocked."""
        self._block(stream, CANDIDATES)
        events = []
        for other in others:
            if other is not stream:
                event = self._torch.cuda.Event()
                event.record(other)
                events.append((other, event))
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end and not all(event.query() for _, event in events):
            time.sleep(0.001)
        held = [other for other, event in events if not event.query()]
        self._write_word(CANDIDATES)
        stream.synchronize()
        return held

    def _map_words(self) -> tuple[int, int]:
        host, device = ctypes.c_void_p(), ctypes.c_uint64()
        size = ctypes.c_size_t(HOST_BYTES)
        self._call("cuMemHostAlloc", ctypes.byref(host), size, ctypes.c_uint(HOST_FLAGS))
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), host, ctypes.c_uint(0))
        assert host.value is not None
        ctypes.memset(host, 0, HOST_BYTES)
        return host.value, device.value

    def _block(self, stream: Any, slot: int) -> None:
        self._targets[slot] += 1
        address = ctypes.c_uint64(self._device + WORD_BYTES * slot)
        target = ctypes.c_uint32(self._targets[slot])
        handle = ctypes.c_void_p(stream.cuda_stream)
        self._call("cuStreamWaitValue32_v2", handle, address, target, ctypes.c_uint(0))

    def _write_word(self, slot: int) -> None:
        word = ctypes.c_uint32.from_address(self._host + WORD_BYTES * slot)
        word.value = self._targets[slot]

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} returned {status}")
