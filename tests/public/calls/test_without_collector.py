"""Nothing waits for Python's garbage collector: what a capture holds goes with its last user."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.devices import use_own_host_allocator
from tests.fakes.regions_as_kernels import capture_for_gpu
from tests.oracles.garbage import find_garbage
from tracegraph import captured_graphs
from tracegraph.replaying.captured_graph import CapturedGraph
from tracegraph.runtime.cuda import buffer
from tracegraph.runtime.jax_interop import ArrayImpl

# Small: JAX can lock up where a callback on a CPU reads a large array.
SIZE = 8


@pytest.fixture(params=["host", "host in checking mode", "gpu"], autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the fake GPU, or None on the host."""
    if request.param == "gpu":
        # That of host memory.
        monkeypatch.setattr(buffer, "ALIGNMENT", 64)
        return capture_for_gpu(monkeypatch)
    use_own_host_allocator(monkeypatch)
    if request.param == "host in checking mode":
        monkeypatch.setenv("TRACEGRAPH_CHECK_REPLAY", "1")
    return None


@pytest.fixture(autouse=True)
def without_collector(place: Any) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def make_x() -> jax.Array:
    return jnp.arange(float(SIZE))


def read_reserved() -> int:
    device = captured_graphs.find_device(is_checking=False)
    return device.allocator.statistics.all.reserved_bytes.current


def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    return {"w": state["w"] + x, "rest": [state["rest"][0] * 2]}, (state["w"] * x).sum()


def make_state() -> Any:
    return {"w": make_x(), "rest": [make_x()]}


def step_with_callback(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    jax.debug.callback(lambda value: None, x)
    return step(state, x * 2)


def step_beside(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    current, side = tg.current_stream(), SIDE
    side.wait_stream(current)
    with tg.stream(side):
        other = jnp.sin(state["w"])
    state = {"w": state["w"] + x, "rest": state["rest"]}
    current.wait_stream(side)
    return state, other + state["w"]


def call_host(x: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda value: np.asarray(value) * 2, shape, x * 3) + 1


SIDE = tg.Stream()
# A captured function and what it is called with, again and again.
Case = tuple[tg.GraphedFunction, tuple[Any, ...]]


def capture(function: Callable[..., Any], *args: Any, **options: Any) -> Case:
    return tg.capture(function, **options), args


CASES: dict[str, Callable[[], Case]] = {
    "leaf": lambda: capture(lambda x: x * 2, make_x()),
    "leaf, unverified": lambda: capture(lambda x: x * 2, make_x(), verify=False),
    "tuple": lambda: capture(lambda x: (x * 2, x + 1), make_x()),
    "dict": lambda: capture(lambda x: {"a": x * 2, "b": x + 1}, make_x()),
    "nested": lambda: capture(lambda t: [{"a": (t["x"] * 2, [t["x"]])}], {"x": make_x()}),
    "state": lambda: capture(step, make_state(), make_x(), donate_argnums=0),
    "leaf of state": lambda: capture(lambda w, x: w + x, make_x(), make_x(), donate_argnums=0),
    "static": lambda: capture(lambda x: (x * 2, x + 1), make_x(), outputs="static"),
    "static leaf": lambda: capture(lambda x: x * 2, make_x(), outputs="static"),
    "typed key": lambda: capture(lambda key: jax.random.split(key)[0], jax.random.key(0)),
    "float0": lambda: capture(lambda x: (x * 2, np.zeros(3, jax.dtypes.float0)), make_x()),
    "numpy": lambda: capture(lambda x, y: x * y + np.ones(SIZE, np.float32), np.ones(SIZE), 2.0),
    "constant": lambda: capture((lambda c: lambda x: (x + c, c))(make_x()), make_x()),
    "no result": lambda: capture(lambda x: (), make_x()),
    "streams": lambda: capture(step_beside, make_state(), make_x(), donate_argnums=0),
    "partial": lambda: capture(call_host, make_x(), mode="partial", prefer="graph"),
    "partial state": lambda: capture(
        step_with_callback, make_state(), make_x(), mode="partial", prefer="graph", donate_argnums=0
    ),
}


def call_thrice(name: str) -> tuple[tg.GraphedFunction, Any, list[weakref.ref[Any]]]:
    """Returns a captured function, its last result, and references to what it was called with."""
    captured, args = CASES[name]()
    arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves(args) if type(leaf) is ArrayImpl]
    result = captured(*args)
    for _ in range(2):
        if captured._options.donate_argnums:
            state = result[0] if isinstance(result, tuple) else result
            args = (state, *args[1:])
        result = captured(*args)
    return captured, result, arrays


def list_owned(graph: CapturedGraph) -> list[weakref.ref[Any]]:
    return [weakref.ref(graph), weakref.ref(graph.replay), weakref.ref(graph.replay.arena)]


def name_living(references: list[weakref.ref[Any]]) -> list[str]:
    return [type(each()).__name__ for each in references if each() is not None]


@pytest.mark.parametrize("name", CASES)
def test_everything_goes_with_the_function_and_its_results(name: str, place: Any) -> None:
    before = read_reserved()
    captured, result, arrays = call_thrice(name)
    assert captured._latest is not None
    owned = [weakref.ref(captured), *list_owned(captured._latest)]
    assert len(name_living(owned)) == 4
    assert read_reserved() > before
    del captured
    # What is left is what the result needs.
    assert set(name_living(owned)) <= {"Arena"}
    if place:
        assert place.driver.executables == {}
        # The fake's kernels hold what they were compiled from.
        place.driver.kernels.clear()
    assert name_living(arrays) == []
    del result
    assert name_living(owned) == []
    assert read_reserved() == before


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_to_the_collector(name: str) -> None:
    def run() -> None:
        captured, _, _ = call_thrice(name)
        captured.explain(*CASES[name]()[1])
        captured.reset()

    # The first time JAX and NumPy fill caches of their own.
    run()
    assert find_garbage(run) == []


@pytest.mark.parametrize("name", ["leaf", "tuple", "dict", "nested", "float0", "numpy", "partial"])
def test_a_result_that_was_read_keeps_no_memory_of_its_graph(name: str) -> None:
    before = read_reserved()
    captured, result, _ = call_thrice(name)
    leaves = [leaf for leaf in jax.tree.leaves(result) if leaf.dtype == np.float32]
    expected = list(map(np.array, leaves))
    del captured
    assert read_reserved() == before
    assert leaves
    jax.tree.map(np.testing.assert_array_equal, leaves, expected)


def test_a_graph_that_was_instantiated_goes_by_itself() -> None:
    before = read_reserved()
    captured = tg.capture(step)
    graph = captured.lower(make_state(), make_x()).instantiate()
    owned = [weakref.ref(captured), *list_owned(graph)]
    _, total = graph(make_state(), make_x())
    del captured
    # It holds the function, to say what is wrong with the arguments of a call, and nothing else.
    assert name_living(owned) == [type(graph).__name__, "Replay", "Arena"]
    with pytest.raises(tg.CaptureError, match="called with the wrong arguments"):
        graph(make_state())
    with pytest.raises(tg.ReplayError, match="called with another signature"):
        graph(make_state(), make_x()[1:])
    assert float(total) == float((make_x() ** 2).sum())
    del graph, total
    assert name_living(owned) == []
    assert read_reserved() == before


def test_graphs_that_are_dropped_go_at_once() -> None:
    captured = tg.capture(lambda x: (x * 2, x + 1))
    captured(make_x())
    assert captured._latest is not None
    owned = list_owned(captured._latest)
    captured.reset()
    assert name_living(owned) == []
