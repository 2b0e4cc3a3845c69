"""Captures over two GPUs: a graph on each, with collectives inside; skipped where there is one."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tracegraph.runtime.cuda import spread_gpus
from tracegraph.runtime.errors import TracegraphError

pytestmark = pytest.mark.usefixtures("gpu")
P, AxisType = jax.P, jax.sharding.AxisType
RNG = np.random.default_rng(7)
X = RNG.normal(size=(64, 32)).astype(np.float32)
# More than a sum in one shot takes.
LARGE = RNG.normal(size=(1024, 513)).astype(np.float32)


# Alone: kernels that wait for each other are slow where another process has one of the GPUs.
@pytest.fixture
def mesh(two_gpus: Any, alone_on_gpu: None) -> Any:
    return jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=two_gpus)


def put(mesh: Any, value: Any, *spec: Any) -> Any:
    own = jax.tree.map(np.array, value)
    return jax.device_put(own, jax.NamedSharding(mesh, P(*spec)))


def read(tree: Any) -> list[Any]:
    """Returns every part on every device, with the sharding."""
    return [
        (leaf.sharding, [(s.device, s.index, np.asarray(s.data).tobytes()) for s in _sort(leaf)])
        for leaf in jax.tree.leaves(tree)
    ]


def _sort(leaf: Any) -> list[Any]:
    return sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)


def capture(function: Any, **options: Any) -> Any:
    return tg.capture(function, **options)


def spread(mesh: Any, function: Callable[..., Any]) -> Any:
    over = {"mesh": mesh, "in_specs": P("i"), "out_specs": P("i")}
    return jax.shard_map(function, check_vma=False, **over)


REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all_gather": lambda x: lax.all_gather(jnp.sin(x), "i", tiled=True)[: x.shape[0]],
    "gather_columns": lambda x: lax.all_gather(x, "i", axis=1, tiled=True),
    "reduce_scatter": lambda x: lax.psum_scatter(jnp.tile(x, (2, 1)), "i", tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x * 3, "i", 0, 0, tiled=True),
    "permute": lambda x: lax.ppermute(x + 1, "i", [(0, 1), (1, 0)]),
    "send": lambda x: lax.ppermute(x + 1, "i", [(0, 1)]),
    "number": lambda x: x * (lax.axis_index("i") + 2),
    "two_sums": lambda x: lax.psum(jnp.sin(x), "i") + lax.psum(x * x, "i") * lax.pmax(x, "i"),
    "scan": lambda x: lax.scan(lambda c, _: (jnp.tanh(c + lax.pmean(c, "i")), c.sum()), x, None, 7)[
        0
    ],
    "long_scan": lambda x: lax.fori_loop(0, 3000, lambda i, c: lax.pmean(c, "i") * 0.99 + 0.01, x),
    "while": lambda x: lax.while_loop(
        lambda c: lax.pmax(jnp.max(jnp.abs(c)), "i") > 0.5, lambda c: c * 0.7, x
    ),
    "cond": lambda x: lax.cond(
        lax.psum(x.sum(), "i") > 0, lambda y: lax.psum(y, "i"), lambda y: y * lax.axis_size("i"), x
    ),
}


@pytest.mark.parametrize("name", list(COLLECTIVES))
@pytest.mark.parametrize("data", [X, LARGE], ids=["small", "large"])
def test_each_collective_equals_jit(mesh: Any, name: str, data: Any) -> None:
    function = spread(mesh, COLLECTIVES[name])
    captured, wanted = capture(function, name=name), jax.jit(function)
    for sign in (1, -1, 0.5):
        given = put(mesh, data * np.float32(sign), "i")
        assert read(captured(given)) == read(wanted(given))
    assert captured.cache_info().captures == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("kind", ["sum", "max", "min"])
@pytest.mark.parametrize("count", [1, 37, 300_001])
def test_sums_of_all_types(mesh: Any, dtype: str, kind: str, count: int) -> None:
    if dtype == "bool" and kind == "sum":
        pytest.skip("sums of truth values are integers")
    values = jnp.asarray(RNG.normal(size=2 * count) * 9).astype(dtype)
    function = spread(mesh, lambda x: REDUCTIONS[kind](x, "i"))
    given = put(mesh, values, "i")
    captured = capture(function)
    for _ in range(3):
        assert read(captured(given)) == read(jax.jit(function)(given))


def loss(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def train(params: Any, x: Any, y: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


def make_state() -> Any:
    return {
        "w": RNG.normal(size=(32, 256)).astype(np.float32),
        "b": np.zeros(256, np.float32),
        "v": RNG.normal(size=(256, 8)).astype(np.float32),
    }


def addresses(tree: Any) -> list[int]:
    return [leaf.data_ptr() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("is_split", [False, True], ids=["data", "data and model"])
def test_a_train_step_keeps_its_state_on_each_gpu(mesh: Any, is_split: bool) -> None:
    state = make_state()
    specs = {"w": P(None, "i"), "b": P("i"), "v": P("i")} if is_split else dict.fromkeys(state, P())
    ours, theirs = (
        {name: put(mesh, value, *specs[name]) for name, value in state.items()} for _ in range(2)
    )
    step = capture(train, donate_argnums=0)
    shardings = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
    twin = jax.jit(train, donate_argnums=0, out_shardings=(shardings, None))
    values: list[Any] = []
    wanted: list[Any] = []
    places: list[int] = []
    for index in range(6):
        x = put(mesh, X * (index + 1), *(() if is_split else ("i",)))
        y = put(mesh, np.full((64, 8), index, np.float32), *(() if is_split else ("i",)))
        given = ours
        ours, value = step(ours, x, y)
        theirs, other = twin(theirs, x, y)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        assert index == 0 or addresses(ours) == places
        places = addresses(ours)
        values.append(value)
        wanted.append(other)
    assert step.cache_info().captures == 1
    np.testing.assert_allclose(values, wanted, rtol=1e-5)
    for name, leaf in ours.items():
        assert leaf.sharding.is_equivalent_to(theirs[name].sharding, leaf.ndim)
        np.testing.assert_allclose(leaf, theirs[name], rtol=1e-4, atol=1e-5)
    if not is_split:
        # Each GPU's copy has the same bits.
        for leaf in ours.values():
            first, second = (np.asarray(part.data) for part in _sort(leaf.jax()))
            np.testing.assert_array_equal(first, second)
    # What a GPU computes next sees the state, in any function of JAX.
    total = jax.jit(lambda p: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(p)))
    assert total(ours) == total(jax.tree.map(lambda leaf: leaf.jax(), ours))


def test_keys_numbers_and_arrays_of_one_device(mesh: Any) -> None:
    def noisy(key: Any, x: Any, scale: Any, shift: Any) -> Any:
        return jax.random.normal(key, x.shape) * scale + x + shift

    captured, x = capture(noisy), put(mesh, X, "i")
    for seed in range(3):
        args = jax.random.key(seed), x, 2.0 + seed, np.arange(32, dtype=np.float32)
        assert read(captured(*args)) == read(jax.jit(noisy)(*args))
    assert captured.cache_info().captures == 1
    one = capture(lambda x: x * 2)
    assert read(captured(jax.random.key(0), x, 1.0, one(jnp.ones(32)))) == read(
        jax.jit(noisy)(jax.random.key(0), x, 1.0, jnp.full(32, 2.0))
    )


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_meshes_of_a_context(mesh: Any, kind: str) -> None:
    named = jax.make_mesh((2,), ("i",), (getattr(AxisType, kind),), devices=list(mesh.devices.flat))

    def scale(x: Any) -> Any:
        total = jax.shard_map(lambda y: lax.psum(y, "i"), in_specs=P("i"), out_specs=P())(x)
        return total * 2

    captured = capture(scale)
    with jax.set_mesh(named):
        x = put(named, X, "i")
        found = captured(x)
        assert read(found) == read(jax.jit(scale)(x))
        assert jax.typeof(found) == jax.typeof(jax.jit(scale)(x))


def test_results_keep_their_values_and_memory_goes(mesh: Any) -> None:
    captured = capture(lambda x: (x + 1, x.sum()))
    kept = [captured(put(mesh, X + index, "i")) for index in range(5)]
    for index, results in enumerate(kept):
        np.testing.assert_array_equal(results[0], X + index + 1)
        np.testing.assert_allclose(results[1], (X + index).sum(), rtol=1e-4)
    assert captured.pool_bytes > 0
    reference = weakref.ref(captured)
    gc.collect()
    gc.disable()
    del captured
    is_gone = reference() is None
    gc.enable()
    assert is_gone
    np.testing.assert_array_equal(kept[0][0], X + 1)


def test_threads_take_turns(mesh: Any) -> None:
    functions = [capture(spread(mesh, lambda x, k=k: lax.psum(x * k, "i"))) for k in (1.0, 2.0)]
    given = put(mesh, X, "i")
    wanted = [np.asarray(function(given)) for function in functions]
    found: list[bool] = []

    def run(number: int) -> None:
        results = [functions[number](given) for _ in range(200)]
        found.append(np.array_equal(results[-1], wanted[number]))

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_a_gpu_that_cannot_be_launched_stops_the_others(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = capture(spread(mesh, lambda x: lax.psum(x, "i")))
    given = put(mesh, X, "i")
    wanted = np.asarray(total(given))
    fails = True
    make_launch = spread_gpus._make_launch

    def make(launches: Any, contexts: Any, memories: Any) -> Any:
        first, second = launches

        def launch_second() -> None:
            if fails:
                raise RuntimeError("it cannot be launched")
            second()

        return make_launch((first, launch_second), contexts, memories)

    monkeypatch.setattr(spread_gpus, "_make_launch", make)
    other = capture(spread(mesh, lambda x: lax.psum(x, "i") * 1), verify=False)
    with pytest.raises(RuntimeError, match="cannot be launched"):
        other(given)
    fails = False
    np.testing.assert_array_equal(other(given), wanted)
    np.testing.assert_array_equal(total(given), wanted)


def test_what_is_refused_over_two_gpus(mesh: Any) -> None:
    double = capture(lambda x: x * 2, outputs="static")
    with pytest.raises(tg.CaptureError) as caught:
        double(put(mesh, X, "i"))
    assert caught.value.anchor == "several-devices"

    def forked(x: Any) -> Any:
        side = tg.Stream()
        side.wait_stream(tg.current_stream())
        with tg.stream(side):
            y = jnp.sin(x)
        tg.current_stream().wait_stream(side)
        return y

    for refused in (capture(forked), capture(lambda x: x + 1, pool=tg.graph_pool_handle())):
        with pytest.raises(TracegraphError) as refusal:
            refused(put(mesh, X, "i"))
        assert len(str(refusal.value).splitlines()) >= 4
    total = capture(spread(mesh, lambda x: lax.psum(x, "i")))
    turned = jax.sharding.Mesh(mesh.devices[::-1], ("i",))
    with pytest.raises(tg.CaptureError) as caught:
        total(put(turned, X, "i"))
    assert caught.value.anchor == "mixed-devices"
    np.testing.assert_allclose(total(put(mesh, X, "i"))[:32], X[:32] + X[32:], rtol=1e-6)
