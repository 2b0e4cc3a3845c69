"""The sides that `gpu_replay.py` times: JAX functions here, PyTorch's in a process of their own."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from gpu_models import Case, Shape, make_batches, make_state
from gpu_timing import time_each, time_total
from peer_process import serve_module

from tracegraph.runtime.definition.graph_nodes import list_nested

ANSWER_SECONDS = 400.0
# Added to the relative tolerance of a norm, per element: leaves that are zero but for rounding.
ABSOLUTE_TOLERANCE = 1e-7


class MissingFigureError(Exception):
    """A figure that this build or this device does not offer."""


class PeerError(Exception):
    """The PyTorch process failed to answer a request."""


class Side(Protocol):
    """One way to run a case; its state is kept from call to call."""

    def time_total(self, calls: int) -> float:
        """See `gpu_timing.time_total`."""
        ...

    def time_each(self) -> list[float]:
        """See `gpu_timing.time_each`."""
        ...

    def time_launch(self) -> list[float]:
        """The same for the launch of the graph alone."""
        ...

    def count_calls(self) -> int:
        """Returns how many calls the state has gone through."""
        ...


class JaxSide:
    """A case under `jax.jit` or `tg.capture`.

    Args:
        case: what is run.
        call: the case's function, wrapped.
    """

    def __init__(self, case: Case, call: Callable[..., Any]) -> None:
        self.call = call
        self._batches = jax.device_put(make_batches(case.shape, 2))
        self._state = make_state(case.shape) if case.has_state else None
        self._result: Any = None
        self._calls = 0
        self._advance = self._advance_state if case.has_state else self._advance_batch

    def _advance_state(self) -> None:
        batch = self._batches[self._calls & 1]
        self._calls += 1
        self._state, self._result = self.call(self._state, *batch)

    def _advance_batch(self) -> None:
        batch = self._batches[self._calls & 1]
        self._calls += 1
        self._result = self.call(*batch)

    def _synchronise(self) -> None:
        # Results of one call are ready together; hundreds of leaves would take their own time.
        jax.block_until_ready((jax.tree.leaves(self._state)[-1:], self._result))

    def read_results(self, count: int) -> list[float]:
        """Advances so often, and returns the loss (or the mean of the result) of each call."""
        values = []
        for _ in range(count):
            self._advance()
            values.append(float(np.mean(np.asarray(self._result))))
        return values

    def time_total(self, calls: int) -> float:
        """See `gpu_timing.time_total`."""
        return time_total(self._advance, self._synchronise, calls)

    def time_each(self) -> list[float]:
        """See `gpu_timing.time_each`."""
        return time_each(self._advance, self._synchronise)

    def time_launch(self) -> list[float]:
        """Times the launch of the graph alone; these launches are not counted as calls."""
        return time_each(find_launcher(self.call), self._finish_launches)

    def _finish_launches(self) -> None:
        # A launch has no result to wait for; the call after it comes after it on the stream.
        self._advance()
        self._synchronise()

    def count_calls(self) -> int:
        """Returns how many calls the state has gone through."""
        return self._calls


@dataclasses.dataclass(frozen=True)
class CaptureSizes:
    """What a captured function holds: nodes of its graph, and bytes.

    The kinds are those of all nodes, also of those inside of loops and branches.
    """

    nodes: int
    kinds: str
    pool_bytes: int
    arena_bytes: int
    constant_bytes: int
    platform: str


def find_captured(function: Any) -> Any:
    """Returns the graph that a captured function used last.

    Raises:
        MissingFigureError: it has none, or is no captured function.
    """
    captured = getattr(function, "_latest", None)
    if captured is None:
        raise MissingFigureError(f"{function} has no graph yet")
    return captured


def read_sizes(function: Any) -> CaptureSizes:
    """Returns what a captured function holds."""
    captured = find_captured(function)
    definition = captured.lowered.definition
    kinds = [node.kind for stage in definition.stages for node in list_nested(stage.nodes)]
    return CaptureSizes(
        nodes=definition.node_count,
        kinds=", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))),
        pool_bytes=function.pool_bytes,
        arena_bytes=definition.arena_bytes,
        constant_bytes=sum(len(slot.content or b"") for slot in definition.slots),
        platform=captured.replay.jax_device.platform,
    )


def read_capture_seconds(function: Any) -> dict[str, float]:
    """Returns the seconds of each phase of the capture; XLA's own is called ``compile``.

    Raises:
        MissingFigureError: the function has no `timings()`, or no `compile` in it.
    """
    timings = getattr(function, "timings", None)
    if timings is None:
        raise MissingFigureError("captured functions of this build have no `timings()`")
    seconds = {str(phase): float(value) for phase, value in dict(timings()).items()}
    if "compile" not in seconds:
        raise MissingFigureError(f"`timings()` has no `compile`, only {', '.join(seconds)}")
    return seconds


def find_launcher(function: Any) -> Callable[[], object]:
    """Returns what enqueues the graph of a captured function once, and does nothing else.

    Raises:
        MissingFigureError: its graph was cut into several, or there is none.
    """
    captured = find_captured(function)
    definition = captured.lowered.definition
    if len(definition.stages) != 1:
        raise MissingFigureError(f"the capture has {len(definition.stages)} stages")
    stage = captured.replay.stages[0]
    # The host device has no launch that is less than a stage.
    return stage.launch if captured.replay.jax_device.platform == "cpu" else stage.launch_graph


def measure_xla(case: Case, jit: Any) -> dict[str, float]:
    """Compiles a case ahead of its first call.

    Args:
        case: what is compiled.
        jit: its function under `jax.jit`; its first call finds the program that is made here.

    Returns:
        XLA's bytes, and the seconds that tracing, lowering and compiling took.
    """
    state = [make_state(case.shape)] if case.has_state else []
    batch = jax.device_put(make_batches(case.shape, 1)[0])
    start = time.perf_counter()
    compiled = jit.lower(*state, *batch).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "jit_compile_seconds": seconds,
    }


NamedLeaves = list[tuple[str, "np.ndarray[Any, Any]"]]


def run_once(case: Case, call: Callable[..., Any]) -> NamedLeaves:
    """Calls a side on a fresh input and returns its results with their paths."""
    batch = jax.device_put(make_batches(case.shape, 1, seed=7)[0])
    state = [make_state(case.shape, is_smooth=True)] if case.has_state else []
    return name_leaves(call(*state, *batch))


def name_leaves(result: Any) -> NamedLeaves:
    """Returns the leaves of a result with their paths."""
    results = jax.tree_util.tree_leaves_with_path(result)
    return [(f"result{jax.tree_util.keystr(path)}", _to_numpy(leaf)) for path, leaf in results]


def find_difference(tolerance: float, wanted: NamedLeaves, got: NamedLeaves) -> str | None:
    """Returns how the results of a side differ from those of `jax.jit`, None if they agree.

    Args:
        tolerance: greatest difference of a leaf, as a ratio of norms.
        wanted: the results of `jax.jit`.
        got: those of the side.
    """
    if len(wanted) != len(got):
        return f"there are {len(got)} results, not {len(wanted)}"
    for (name, expected), (_, found) in zip(wanted, got, strict=True):
        types = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in (found, expected)]
        if types[0] != types[1]:
            return f"{name} is {types[0]}, not {types[1]}"
        difference = float(np.linalg.norm(found.astype(np.float64) - expected))
        allowed = tolerance * float(np.linalg.norm(expected.astype(np.float64)))
        # Spelled so that NaN is a difference, too.
        if not difference <= allowed + ABSOLUTE_TOLERANCE * math.sqrt(expected.size):
            return f"{name} differs from jax.jit by {difference:.3g} in norm, not {allowed:.3g}"
    return None


def _to_numpy(leaf: Any) -> np.ndarray[Any, Any]:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.device_get(jax.random.key_data(leaf) if is_key else leaf))


class TorchProcess:
    """A process that runs `gpu_torch_peers.serve`."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far_end = context.Pipe()
        args = (far_end, "gpu_torch_peers")
        self._process = context.Process(target=serve_module, args=args, daemon=False)
        self._process.start()
        far_end.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Returns the answer of a method of `gpu_torch_peers.Peers`.

        Raises:
            PeerError: it failed, took too long, or the process has ended.
        """
        try:
            self._connection.send((method, arguments))
            if not self._connection.poll(ANSWER_SECONDS):
                self._process.terminate()
                raise PeerError(f"`{method}` took longer than {ANSWER_SECONDS:.0f} s")
            is_good, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise PeerError("the PyTorch process has ended") from error
        if not is_good:
            raise PeerError(answer)
        return answer

    def list_variants(self, shape: Shape, compilers: tuple[str, ...]) -> list[str]:
        """Returns the names of the ways to write a case."""
        return self.ask("list_names", shape, compilers)

    def describe(self) -> Mapping[str, str]:
        """Returns PyTorch's own versions."""
        return self.ask("describe")

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.terminate()


class TorchSide:
    """A variant of the current case in the PyTorch process.

    Args:
        process: where.
        name: of the variant, from `TorchProcess.list_variants`.
    """

    def __init__(self, process: TorchProcess, name: str) -> None:
        self._process, self._name = process, name

    def read_results(self, count: int) -> list[float]:
        """Captures it, and returns the loss (or the mean of the result) of the first calls."""
        return self._process.ask("prepare", self._name, count)

    def time_total(self, calls: int) -> float:
        """See `gpu_timing.time_total`."""
        return self._process.ask("time_total", self._name, calls)

    def time_each(self) -> list[float]:
        """See `gpu_timing.time_each`."""
        return self._process.ask("time_each", self._name)

    def time_launch(self) -> list[float]:
        """Times the replay without the copies of the inputs."""
        return self._process.ask("time_launch", self._name)

    def count_calls(self) -> int:
        """Returns how many calls the state has gone through."""
        return self._process.ask("count_calls", self._name)
