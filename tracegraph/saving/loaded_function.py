"""LoadedFunction: what `tg.load` returns."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tracegraph.capturing.capture_cache import MAX_TRIED
from tracegraph.capturing.function_pool import FunctionPool
from tracegraph.constraints.frames import hide_own_frames, hides_own_frames
from tracegraph.constraints.mismatch import make_refusal_error
from tracegraph.jax_internals import InvalidFloatSignal, eval_trace, read_settings, trace_state
from tracegraph.replaying.released_results import detach_results
from tracegraph.replaying.replayable_graph import MISS, ReplayableGraph
from tracegraph.runtime.device import Device
from tracegraph.runtime.memory.pool_id import PoolId
from tracegraph.runtime.streams.handles import make_pickle_error
from tracegraph.runtime.streams.stream import is_tracing
from tracegraph.saving.describe_parts import describe_parts
from tracegraph.saving.first_calls import find_unproven, prove_graph
from tracegraph.saving.loaded_errors import make_float_error, make_trace_error, make_unfit_error
from tracegraph.saving.loaded_graphs import LoadedEntry, LoadedParts
from tracegraph.saving.saved_parameters import make_stand_in
from tracegraph.tracing.prepared_call import PreparedCall, prepare_call
from tracegraph.tracing.signature import Signature


class LoadedFunction:
    """The graphs of a captured function from a file: called as the function is, without its source.

    A call replays the graph of its signature, with all that the captured function promises:
    donated arguments stay in the graph, fresh results keep their value, calls from several threads
    follow one another. It captures nothing: what fits no signature of the file is an error.

    Args:
        parts: what is known of it.
        device: that its graphs are on.
        pool: that their memory comes from.

    Example:
        >>> step = tg.capture(lambda x: x * 2, name="step")
        >>> _ = step(jnp.ones(3))
        >>> step.save(path.with_suffix(".tg"))
        >>> loaded = tg.load(path.with_suffix(".tg"))
        >>> print(loaded(jnp.arange(3.0)))
        [0. 2. 4.]
        >>> loaded
        <LoadedFunction step, 1 signature>
    """

    def __init__(self, parts: LoadedParts, device: Device, pool: FunctionPool) -> None:
        self.__name__ = self.__qualname__ = parts.name
        self._parts, self._device, self._pool = parts, device, pool
        self._function: Callable[..., Any] = make_stand_in(parts.name, parts.parameters)
        self.__signature__ = vars(self._function)["__signature__"]
        self._entries = {each.call.signature: each for each in parts.entries}
        # The one used last at the end.
        self._graphs: collections.OrderedDict[Signature, ReplayableGraph]
        self._graphs = collections.OrderedDict()
        self._latest: ReplayableGraph | None = None
        self._lock = threading.RLock()
        # Those whose first call compares them with XLA's executable, see `first_calls.py`.
        self._unproven = find_unproven(parts, device)
        self.restore()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replays the graph of these arguments.

        Args:
            *args: as the captured function takes them.
            **kwargs: the same.

        Returns:
            What the function returns, with a `jax.Array` for every array.

        Raises:
            ReplayError: they fit no signature of the file; what differs from the nearest is named.
            CaptureError: an argument cannot be an input of a graph, or was donated before.
        """
        latest = self._latest
        try:
            if (
                latest is not None
                and latest.settings == read_settings()
                and trace_state.value is eval_trace
            ):
                result = latest.try_call(args, kwargs, False)
                if result is not MISS:
                    return result
            return self._call_generally(args, kwargs)
        except InvalidFloatSignal as signal:
            raise make_float_error(self.__name__, str(signal)) from None
        except Exception as error:
            hide_own_frames(error)
            raise

    def __repr__(self) -> str:
        count = len(self._entries)
        noun = "signature" if count == 1 else "signatures"
        return f"<{type(self).__name__} {self.__name__}, {count} {noun}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise make_pickle_error(f"`{self.__name__}`, loaded from {self._parts.source},")

    def explain(self) -> str:
        """Returns what the file has: its signatures with their nodes, memory and verification."""
        return describe_parts(self._parts)

    def probes(self) -> dict[str, Any]:
        """Returns what each `tg.probe` of the function showed in the last replay, by name.

        As `probes` of a captured function.
        """
        with self._lock:
            found = [each for graph in self._graphs.values() for each in graph.list_probes()]
        return dict(max(found, key=lambda each: each.turn).latest) if found else {}

    def pool(self) -> PoolId:
        """Returns the id of the private pool; another function shares it by ``pool=``."""
        return self._pool.share(self._device)

    @property
    def pool_bytes(self) -> int:
        """Bytes that the private pool holds."""
        return self._pool.count_bytes()

    def release(self) -> None:
        """Gives the memory of all graphs back; results that they returned keep their values.

        The next call of a signature makes its graph again, at other addresses; `restore` does so
        for all.
        """
        with self._lock:
            for graph in self._graphs.values():
                detach_results(graph)
            self._graphs.clear()
            self._latest = None
            self._pool.leave_unshared()

    def restore(self) -> None:
        """Makes all graphs whose memory was given back.

        Raises:
            OutOfMemoryError: the pool cannot hold them; those that are missing stay released.
        """
        with self._lock:
            # The largest scratch first: the others have theirs in it.
            entries = sorted(self._entries.values(), key=_read_scratch, reverse=True)
            for entry in entries:
                self._make_graph(entry)

    def _call_generally(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tries the graphs that were used lately, then looks the signature up."""
        if trace_state.value is not eval_trace or is_tracing() or _is_jit_disabled():
            raise make_trace_error(self.__name__)
        result = self._try_recent(args, kwargs)
        if result is not MISS:
            return result
        found = self._prepare(args, kwargs)
        entry = self._find_entry(found, args, kwargs)
        if entry is None:
            calls = [each.call for each in self._parts.entries]
            raise make_unfit_error(self.__name__, self._parts.source, calls, found)
        with self._lock:
            graph = self._make_graph(entry)
            if entry.call.signature in self._unproven:
                self._prove(entry, graph, args, kwargs)
        result = graph.try_call(args, kwargs, True)
        if result is MISS:
            raise make_refusal_error(self.__name__)
        self._use(graph)
        return result

    def _try_recent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays one of the graphs that were used lately; a MISS if none takes the arguments."""
        settings = read_settings()
        for graph in self._list_recent():
            if graph.settings != settings:
                continue
            result = graph.try_call(args, kwargs, False)
            if result is not MISS:
                self._use(graph)
                return result
        return MISS

    def _list_recent(self) -> Sequence[ReplayableGraph]:
        """Returns the graphs that a call tries before it works out its signature."""
        with self._lock:
            recent = list(itertools.islice(reversed(self._graphs.values()), MAX_TRIED))
        return [graph for graph in recent if graph.signature not in self._unproven]

    def _find_entry(
        self, found: PreparedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LoadedEntry | None:
        """Returns the signature of a call, or one with the same arguments; None if there is none.

        See Note [Spellings] for what the same arguments are.
        """
        entry = self._entries.get(found.signature)
        if entry is not None:
            return entry
        with self._lock:
            graphs = [*reversed(self._graphs.values())]
        for graph in graphs:
            respelled = graph.respell(args, kwargs)
            if respelled is None:
                continue
            if self._prepare(*respelled).signature == graph.signature:
                return self._entries[graph.signature]
        return None

    def _make_graph(self, entry: LoadedEntry) -> ReplayableGraph:
        """Returns the graph of a signature, made again if it was released; the lock is held."""
        graph = self._graphs.get(entry.call.signature)
        if graph is None:
            graph = entry.instantiate(self._device, self._pool)
            self._graphs[entry.call.signature] = graph
        return graph

    def _prove(
        self, entry: LoadedEntry, graph: ReplayableGraph, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """Compares a graph with XLA's executable on the arguments of its first call."""
        respelled = graph.respell(args, kwargs)
        found = self._prepare(*(respelled or (args, kwargs)))
        key = self._unproven[entry.call.signature]
        prove_graph(entry, graph, found.leaves, self._device, key)
        del self._unproven[entry.call.signature]

    def _use(self, graph: ReplayableGraph) -> None:
        """Makes a graph the one that was used last."""
        with self._lock:
            if graph.signature in self._graphs:
                self._graphs.move_to_end(graph.signature)
                self._latest = graph

    @hides_own_frames
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreparedCall:
        return prepare_call(
            self._function,
            self._parts.options,
            args,
            kwargs,
            device=self._device.jax_device,
            has_values=True,
        )


def _read_scratch(entry: LoadedEntry) -> int:
    return entry.lowered.definition.arena_size.scratch_bytes


def _is_jit_disabled() -> bool:
    return bool(jax.config.jax_disable_jit)  # pyright: ignore[reportAttributeAccessIssue]
