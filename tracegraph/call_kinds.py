"""CallKinds: the calls of a captured function, each kind by what takes it.

Beside plain calls, which have graphs of their own, there are calls with objects of nnx, calls that
draw keys from generators, and calls inside of what JAX traces or differentiates.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import jax

from tracegraph.breaks.branching_graph import BranchingGraph
from tracegraph.breaks.make_branching import READ_ERRORS, can_read_inside
from tracegraph.cache_info import CacheInfo
from tracegraph.captured_graphs import CapturedGraphs
from tracegraph.constraints.frames import locate_caller
from tracegraph.constraints.mismatch import make_refusal_error
from tracegraph.graphed_callables.differentiated_calls import DRAWS, OBJECTS, DifferentiatedCalls
from tracegraph.jax_internals import is_eager_vjp
from tracegraph.objects.graph_objects import has_objects
from tracegraph.objects.object_calls import STATE, ObjectCalls
from tracegraph.options import check_flag, check_timeout
from tracegraph.randomness.draws import UnboundDrawsSignal
from tracegraph.randomness.random_calls import RandomCalls
from tracegraph.replaying.captured_graph import MISS
from tracegraph.replaying.probe_values import ProbeValues
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.streams.stream import is_tracing
from tracegraph.saving.save_captures import (
    Collected,
    collect_captures,
    make_save_error,
    write_captures,
)
from tracegraph.tracing.inner_call import InnerCall


class CallKinds(CapturedGraphs):
    """The calls of a captured function, and the counts and the memory of all of them together.

    Args:
        function: that is captured.
        given: the keywords of `capture`.
    """

    def __init__(self, function: Callable[..., Any], given: dict[str, Any]) -> None:
        super().__init__(function, given)
        self._inner = InnerCall(function, self._options)
        # Once it is called with objects of nnx.
        self._objects: ObjectCalls | None = None
        # Once an eager `jax.vjp` differentiates a call.
        self._differentiated: DifferentiatedCalls | None = None
        # Once it draws keys from generators.
        self._random: RandomCalls | None = None
        self._takes_states = False

    def probes(self) -> dict[str, Any]:
        """Returns what each `tg.probe` of the function showed in the last replay, by name.

        The arrays are results of that replay: they keep their value when the function is called
        again, unless it was captured with ``outputs="static"``. Reading one waits for the device as
        reading a result does. The dict is empty before the first call, after `reset`, and of a
        function without probes. A signature without probes does not count as a replay here.

        Example:
            >>> step = tg.capture(lambda x: tg.probe("doubled", x * 2) + 1)
            >>> print(step(jnp.ones(2)), step.probes())
            [3. 3.] {'doubled': Array([2., 2.], dtype=float32)}
        """
        found = self._list_probes()
        return dict(max(found, key=lambda each: each.turn).latest) if found else {}

    def cache_info(self) -> CacheInfo:
        """Returns the counts of hits and misses, and of the signatures that are kept."""
        with self._lock:
            info = self._cache.read_info()
            for each in self._list_inner():
                info = info.join(each.cache_info())
            differentiated = self._differentiated
            return info if differentiated is None else info.join(differentiated.cache_info())

    def reset(self) -> None:
        """Drops all graphs: the next call captures again. Arrays that they returned stay valid."""
        with self._lock:
            self._cache.clear()
            self._latest = None
            if self._queue is not None:
                self._queue.clear()
            self._recaptures.forget()
            self._pool.leave()
            for each in self._list_inner():
                self._cache.add_counts(each.cache_info())
            if self._differentiated is not None:
                self._cache.add_counts(self._differentiated.cache_info())
            self._objects = self._random = self._differentiated = None

    def release(self) -> None:
        """Gives the memory of all graphs back, those of gradients too; keeps their recipes.

        Arrays that they returned get memory of their own first; only results of
        ``outputs="static"`` that are still held keep theirs. The next call makes its graph again,
        at other addresses, without tracing or compiling anything; `restore` does so for all. A pool
        whose handle was asked for keeps its segments for those that it was given to.

        Example:
            >>> double = tg.capture(lambda x: x * 2)
            >>> y = double(jnp.ones(3))
            >>> double.release()
            >>> double.pool_bytes, print(double(y)), double.cache_info().captures
            [4. 4. 4.]
            (0, None, 1)
        """
        with self._lock:
            self._release_graphs(self._cache.list_latest())
            if self._differentiated is not None:
                self._differentiated.release()
            self._pool.leave_unshared()
            for each in self._list_inner():
                each.release()

    def restore(self) -> None:
        """Makes all graphs again whose memory was given back by `release`.

        Raises:
            OutOfMemoryError: the pool cannot hold them; those that are missing stay released.
        """
        with self._lock:
            for signature in self._cache.list_released():
                self._restore_graph(signature)
            for graph in self._list_branching():
                graph.restore()
            if self._differentiated is not None:
                self._differentiated.restore()
            for each in self._list_inner():
                each.restore()

    def save(self, path: str | os.PathLike[str], *, constants: bool = True) -> None:
        """Writes the graphs of all signatures to one file, for `tg.load` in any process.

        It holds kernels, memory plans, trees and types, static arguments, and what the
        verification found: who loads it needs no source, and traces and compiles nothing. The
        file is written as a whole or not at all, and only this user may read it.

        Args:
            path: of the file; one that is there is replaced.
            constants: False to leave the values of closed-over arrays out; then `tg.load` is given
                them. A program that has small ones in it is compiled once more, without them.

        Raises:
            SavedFileError: the file cannot be written, no graph is captured on this device, or one
                holds what belongs to this process: eager parts, callbacks, events, objects, static
                arguments that are no plain values.
            ConfigError: ``constants`` is neither True nor False.

        Example:
            >>> double = tg.capture(lambda x: x * 2)
            >>> _ = double(jnp.ones(3))
            >>> double.save(path.with_suffix(".tg"))
            >>> print(tg.load(path.with_suffix(".tg"))(jnp.arange(3.0)))
            [0. 2. 4.]
        """
        check_flag("constants", constants, locate_caller(), "save")
        collected = self._collect(has_constants=constants)
        write_captures(path, collected, extra=self._encode_extra(collected))

    def _collect(self, *, has_constants: bool) -> Collected:
        """Returns what a file holds of this function."""
        name = self._options.name
        with self._lock:
            if self._objects is not None:
                raise make_save_error(name, "it is called with objects of flax.nnx")
            if self._random is not None:
                raise make_save_error(name, "it draws keys from generators of this process")
            captures = self._cache.list_all()
        device = self._device.jax_device
        function = self._function
        return collect_captures(
            function, self._options, captures, device, has_constants=has_constants
        )

    def _encode_extra(self, collected: Collected) -> Any:  # noqa: ARG002 of another kind
        """Returns what a file holds of this kind of function alone, as JSON."""
        return None

    def wait_until_captured(self, timeout: float | None = None) -> bool:
        """Waits until every signature that was called has its graph; used with ``warm=False``.

        Args:
            timeout: in seconds; None waits as long as it takes, 0 only asks.

        Returns:
            False if it takes longer.

        Raises:
            TracegraphError: a capture has failed, and the calls of its signature go on as
                `jax.jit`; the first error, once nothing else is being captured.
            ConfigError: `timeout` is no number of seconds.

        Example:
            >>> double = tg.capture(lambda x: x * 2, warm=False)
            >>> print(double(jnp.ones(3)), double.wait_until_captured())  # as jax.jit
            [2. 2. 2.] True
            >>> print(double(jnp.ones(3)), double.cache_info().hits)
            [2. 2. 2.] 1
        """
        check_timeout(timeout, locate_caller(), "wait_until_captured")
        with self._lock:
            inner = self._list_inner()
        end = None if timeout is None else time.monotonic() + timeout
        is_done = self._queue is None or self._queue.wait(timeout)
        for each in inner:
            left = None if end is None else max(0.0, end - time.monotonic())
            is_done = each.wait_until_captured(left) and is_done
        return is_done

    def clear_cache(self) -> None:
        """Does what `reset` does, and drops what JAX traced for calls inside other programs."""
        self.reset()
        self._inner.clear()

    def pool(self) -> PoolId:
        """Returns the id of the private pool; another capture shares it by ``pool=``.

        A function that was called on several devices has a pool on each: it is that of the current
        device, if there is one.

        Example:
            >>> first = tg.capture(jnp.sin)
            >>> second = tg.capture(jnp.cos, pool=first.pool())
            >>> second.pool() == first.pool()
            True
        """
        return self._pool.share(self._device)

    def timings(self) -> dict[str, float]:
        """Returns the seconds that each phase of the latest graph's capture took.

        The phases are ``trace`` (JAX runs the function on abstract values), ``check`` (the graph,
        its passes, the constraints, and what is left of the second trace when XLA is done),
        ``compile`` (JAX and XLA lower and compile the regions, with the second trace beside),
        ``lower`` (cut into regions, read XLA's program, plan, build), ``instantiate``,
        ``verify`` and, with eager parts, ``compare``. They follow one another. `jax.jit` needs
        ``trace`` and ``compile``, too. The dict is empty before the first capture.
        """
        with self._lock:
            latest = next(iter(self._cache.list_latest()), None)
            inner = self._list_inner() if latest is None else []
        if inner:
            return inner[0].timings()
        return dict(latest.seconds) if latest is not None else {}

    @property
    def pool_bytes(self) -> int:
        """Bytes that the private pool holds, on every device that the function was called on."""
        return self._pool.count_bytes()

    def _call_slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Looks the signature up, and captures on a miss."""
        # Without jit JAX has other settings, so that no graph has taken the call.
        if is_tracing() or jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return self._call_inside(args, kwargs)
        if has_objects((args, kwargs)):
            return self._join_objects()(args, kwargs)
        while True:
            random = self._random
            try:
                call = self._call_plainly if random is None else random
                return call(args, kwargs)
            except UnboundDrawsSignal as signal:
                self._join_random(signal, random)

    def _call_plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function with arrays, for its own graphs."""
        prepared = self._prepare(args, kwargs, has_values=True)
        result = self._call_lazily(prepared, args, kwargs)
        if result is not MISS:
            return result
        captured, is_new = self._find_graph(prepared, args, kwargs)
        result = captured.try_call(args, kwargs, True)
        if result is MISS:
            raise make_refusal_error(self._options.name)
        with self._lock:
            self._cache.first_calls += is_new
        return result

    def _call_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function as a part of what JAX traces or computes op by op."""
        # JAX knows objects as trees only: inside another function they are updated directly.
        is_object_call = has_objects((args, kwargs))
        if is_eager_vjp() and not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            differentiated = self._join_differentiated()
            if is_object_call:
                result = differentiated.trace(OBJECTS)
            elif self._random is not None:
                result = differentiated.trace(DRAWS)
            else:
                result = differentiated(args, kwargs)
            if result is not MISS:
                return result
        if is_object_call:
            return self._function(*args, **kwargs)
        if self._options.mode == "partial" and can_read_inside():
            # Where Python may read values, what `jax.jit` cannot trace is called plainly.
            with contextlib.suppress(*READ_ERRORS):
                return self._inner(args, kwargs)
            return self._function(*args, **kwargs)
        return self._inner(args, kwargs)

    def _make_inner(self, function: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Returns a captured function that stands for this one in calls of a certain kind."""
        return type(self)(function, given)

    def _find_target(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Returns what captures a call, and its arguments there: objects of nnx as arrays."""
        if not has_objects((args, kwargs)):
            random = self._random
            if random is None:
                return self, args, kwargs
            return random.captured, args, random.add_states(kwargs)
        objects = self._join_objects()
        call = objects.split(args, kwargs)
        return objects.captured, call.args, call.kwargs | {STATE: call.state}

    def _join_objects(self) -> ObjectCalls:
        with self._lock:
            if self._objects is None:
                self._objects = ObjectCalls(self._function, self._options, self._make_inner)
                # One pool per device, whichever of the two has graphs there.
                self._objects.captured._pool = self._pool
            return self._objects

    def _join_differentiated(self) -> DifferentiatedCalls:
        with self._lock:
            if self._differentiated is None:
                self._differentiated = DifferentiatedCalls(
                    self._function, self._options, self._pool
                )
            return self._differentiated

    def _join_random(self, signal: UnboundDrawsSignal, before: RandomCalls | None) -> None:
        """Makes the states that a call draws from arguments of the function."""
        if self._takes_states:
            # The function that the user has captured knows what to do.
            raise signal
        with self._lock:
            if self._random is not before:
                return
            states = signal.states if before is None else before.extend(signal)
            self._random = RandomCalls(self._function, self._options, self._make_inner, states)
            self._random.captured._pool = self._pool
            self._random.captured._takes_states = True
            # What reads values draws when it is called, not when it is captured.
            self._cache.drop(BranchingGraph)
            if isinstance(self._latest, BranchingGraph):
                self._latest = None
            if before is not None:
                self._cache.add_counts(before.captured.cache_info())

    def _list_inner(self) -> list[Any]:
        """Returns the captured functions that stand for this one in calls of a certain kind."""
        return [each.captured for each in (self._objects, self._random) if each is not None]

    def _list_branching(self) -> list[BranchingGraph]:
        """Returns the graphs of signatures with breaks, which stay when their memory goes."""
        graphs = [each.graph for each in self._cache.list_latest()]
        return [each for each in graphs if isinstance(each, BranchingGraph)]

    def _list_probes(self) -> list[ProbeValues]:
        with self._lock:
            graphs = [each.graph for each in self._cache.list_latest()]
            inner = self._list_inner()
        found = [probes for each in graphs for probes in each.list_probes()]
        return found + [probes for each in inner for probes in each._list_probes()]
