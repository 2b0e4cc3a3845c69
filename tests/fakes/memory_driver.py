"""MemoryDriver: a FakeDriver whose streams hold real work on host memory until the host waits."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

from tests.fakes.fake_driver import FakeDriver
from tests.fakes.fake_state import FakePass, check
from tracegraph.runtime.cuda.driver.calls import CopyRows, KernelLaunch


class MemoryDriver(FakeDriver):
    """Does memcpys, memsets and launches in the order of their streams, as late as is allowed.

    Args:
        is_deferred: work waits until the host waits for its stream, or until `finish` is called;
            otherwise it is done at once.
    """

    EXTRAS = (*FakeDriver.EXTRAS, "finish")

    def __init__(self, *, is_deferred: bool = False, **options: Any) -> None:
        super().__init__(moves_bytes=True, **options)
        self.is_deferred = is_deferred
        self._queues: dict[int, collections.deque[Callable[[], None]]]
        self._queues = collections.defaultdict(collections.deque)
        self._done: dict[int, int] = collections.defaultdict(int)
        self._marks: dict[int, tuple[int, int]] = {}
        # Arrays of JAX that work in the queues may still touch: JAX frees in the order of its
        # stream. They live as long as the queues, which a finaliser may still work off.
        self.jax_memory: list[Any] = []

    def finish(self, stream: int) -> None:
        """Does all work of a stream, and what it waits for."""
        with self._lock:
            self._run_until(stream, self._count(stream))

    def query_stream(self, stream: int) -> bool:
        super().query_stream(stream)
        return not self._queues[stream]

    def synchronize_stream(self, stream: int) -> None:
        super().synchronize_stream(stream)
        self.finish(stream)

    def synchronize_context(self) -> None:
        super().synchronize_context()
        self._finish_all()

    def record_event(self, event: int, stream: int) -> None:
        super().record_event(event, stream)
        self._marks[event] = stream, self._count(stream)

    def wait_event(self, stream: int, event: int) -> None:
        super().wait_event(stream, event)
        if event in self._marks:
            self._enqueue(stream, functools.partial(self._run_until, *self._marks[event]))

    def query_event(self, event: int) -> bool:
        super().query_event(event)
        stream, count = self._marks.get(event, (0, 0))
        return self._done[stream] >= count

    def synchronize_event(self, event: int) -> None:
        super().synchronize_event(event)
        with self._lock:
            self._run_until(*self._marks.get(event, (0, 0)))

    def free_memory(self, address: int) -> None:
        self._finish_all()
        super().free_memory(address)

    def free_async(self, address: int, stream: int) -> None:
        memory = self._memory[address]
        super().free_async(address, stream)
        # Work that was enqueued before may still touch the bytes.
        self._enqueue(stream, functools.partial(_hold, memory))

    def unmap_memory(self, address: int, nbytes: int) -> None:
        is_pending = any(self._queues.values())
        check(not is_pending, "unmap_memory while work is under way")
        super().unmap_memory(address, nbytes)

    def fill_async(
        self, target: int, value: int, element_bytes: int, count: int, stream: int
    ) -> None:
        self._thread.stream = stream
        super().fill_async(target, value, element_bytes, count, stream)

    def launch_kernel(self, launch: KernelLaunch, stream: int) -> None:
        self._thread.stream = stream
        super().launch_kernel(launch, stream)

    def make_launcher(
        self, executable: int, stream: int, context: int = 0, owner: object = None
    ) -> Callable[[], None]:
        launch_graph = super().make_launcher(executable, stream, context, owner)

        def launch() -> None:
            self._thread.stream = stream
            launch_graph()

        return launch

    def _copy(self, name: str, target: int, source: int, nbytes: int, stream: int) -> None:
        self._thread.stream = stream
        super()._copy(name, target, source, nbytes, stream)

    def _copy_rows(self, rows: CopyRows, stream: int) -> None:
        self._thread.stream = stream
        super()._copy_rows(rows, stream)

    def _run(self, action: Any) -> None:
        if isinstance(action, FakePass):
            self._pass(action)
            return
        self._enqueue(self._thread.stream, functools.partial(super()._run, action))

    def _pass(self, action: FakePass) -> None:
        stream = self._thread.stream
        if not action.is_wait:
            self._marks[action.event] = stream, self._count(stream)
        elif action.event in self._marks:
            self._enqueue(stream, functools.partial(self._run_until, *self._marks[action.event]))

    def _finish_all(self) -> None:
        for stream in list(self._queues):
            self.finish(stream)

    def _enqueue(self, stream: int, work: Callable[[], None]) -> None:
        with self._lock:
            self._queues[stream].append(work)
            if not self.is_deferred:
                self._run_until(stream, self._count(stream))

    def _count(self, stream: int) -> int:
        return self._done[stream] + len(self._queues[stream])

    def _run_until(self, stream: int, count: int) -> None:
        queue = self._queues[stream]
        while self._done[stream] < count:
            work = queue.popleft()
            work()
            self._done[stream] += 1


def _hold(memory: object) -> None:
    """Keeps memory alive as long as this call waits in a queue."""
