"""Arguments: trees of all kinds, numbers, NumPy values, keys, static and keyword arguments."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tests.processes import run_program
from tracegraph.graphed_function import GraphedFunction
from tracegraph.replaying.captured_graph import MISS


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    values: Any
    name: str = dataclasses.field(default="r", metadata={"static": True})


@flax.struct.dataclass
class Params:
    w: Any
    kind: str = flax.struct.field(pytree_node=False, default="k")


class Layer(eqx.Module):
    w: Any
    activation: Any = eqx.field(static=True, default=jnp.tanh)


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, held, scale):
        self.held, self.scale = held, scale

    def tree_flatten(self):
        return (self.held,), self.scale

    @classmethod
    def tree_unflatten(cls, scale, children):
        return cls(children[0], scale)


A, B = jnp.arange(3.0), jnp.ones((2, 2))
TREES = {
    "dict": {"b": A, "a": {"c": B}},
    "list in a tuple": ([A, [B]], A),
    "with None": {"a": None, "b": (A, None)},
    "empty containers": {"a": [], "b": (), "c": A},
    "named tuple": Pair(A, Pair(B, None)),
    "ordered dict": collections.OrderedDict(z=A, a=B),
    "default dict": collections.defaultdict(list, a=A),
    "dataclass": Record({"a": A}),
    "flax struct": Params({"w": B}),
    "equinox module": Layer(B),
    "registered node": Box([A, B], 3),
    "no leaves": {"a": None},
    "integers as keys": {1: A, 0: B},
}


def increase(tree):
    return jax.tree.map(lambda leaf: leaf * 2 + 1, tree), sum(map(jnp.sum, jax.tree.leaves(tree)))


@pytest.mark.parametrize("name", TREES)
def test_trees(name):
    copied, resident = tg.capture(increase), tg.capture(increase, donate_argnums=0, verify=False)
    tree = wanted = TREES[name]
    state = jax.tree.map(jnp.copy, tree)
    for _ in range(3):
        tree, total = copied(tree)
        state, state_total = resident(state)
        wanted, wanted_total = jax.jit(increase)(wanted)
        assert_same((tree, total), (wanted, wanted_total))
        assert_same((state, state_total), (wanted, wanted_total))
    assert copied.cache_info().captures == resident.cache_info().captures == 1


VALUES = [
    True,
    3,
    2.5,
    1j,
    np.float64(1.5),
    np.float32(1.5),
    np.int64(7),
    np.int8(7),
    np.bool_(True),
    np.arange(3.0),
    np.arange(3),
    np.arange(6.0).reshape(2, 3).T,
    np.arange(6, dtype=np.uint8)[::2],
    np.zeros((0, 2)),
    np.ones(2, ml_dtypes.bfloat16),
    np.ones(2, ml_dtypes.float8_e5m2),
    np.ones(2, ml_dtypes.int4),
    np.broadcast_to(np.float32(2), (3,)),
    jnp.float32(2.0),
    jnp.asarray(2.0),
    jnp.ones(3, jnp.bfloat16),
    jnp.ones(2, jnp.float8_e4m3fn),
    jnp.arange(4).astype(jnp.int4),
    jnp.array([True, False]),
    jnp.ones(2) + 1j,
    jnp.zeros((2, 0)),
    jax.random.PRNGKey(3),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: str(jax.typeof(v)))
def test_values(value):
    captured, compiled = tg.capture(lambda x: (x, x + x)), jax.jit(lambda x: (x, x + x))
    for _ in range(2):
        assert_same(captured(value), compiled(value))
    assert captured.cache_info() == (1, 1, 64, 1)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_typed_keys(implementation):
    def draw(keys, x):
        first, second = jax.random.split(keys["key"])
        return {"key": second}, jax.random.normal(first, (3,)) + x

    state = wanted = {"key": jax.random.key(5, impl=implementation)}
    captured, resident = tg.capture(draw), tg.capture(draw, donate_argnums=0)
    other = {"key": jax.random.key(5, impl=implementation)}
    for x in (1.0, 2.0, 3.0):
        state, value = captured(state, x)
        other, again = resident(other, x)
        wanted, expected = jax.jit(draw)(wanted, x)
        assert_same((state, value), (wanted, expected))
        assert_same((other, again), (wanted, expected))
    assert captured.cache_info().captures == resident.cache_info().captures == 1
    assert jax.random.split(other["key"]).shape == (2,)


def test_arrays_of_keys():
    keys = jax.random.split(jax.random.key(0), 3)
    draw = jax.vmap(lambda key: jax.random.uniform(key))
    assert_same(tg.capture(draw)(keys), jax.jit(draw)(keys))
    assert_same(tg.capture(lambda k: (k, k[1]))(keys), (keys, keys[1]))


@pytest.mark.filterwarnings("ignore::tracegraph.RecaptureWarning")
def test_a_changed_tree_dtype_or_weak_type_is_a_new_signature():
    captured = tg.capture(lambda t: jax.tree.map(lambda leaf: leaf + 1, t))
    wanted = jax.jit(lambda t: jax.tree.map(lambda leaf: leaf + 1, t))
    for value in ({"a": A}, {"b": A}, [A], (A,), A, {"a": 1.0}, {"a": jnp.float32(1)}, {"a": 1}):
        assert_same(captured(value), wanted(value))
    assert captured.cache_info() == (0, 8, 64, 8)


def test_metadata_of_a_tree_is_static():
    captured = tg.capture(lambda box: box.held * box.scale)
    box = Box(A, 2)
    for scale in (2, 2, 5, 2):
        box.scale = scale
        assert_same(captured(box), A * scale)
    assert captured.cache_info().captures == 2


def test_keyword_default_and_variadic_arguments():
    def function(a, b=2.0, /, *rest, scale=1.0, **more):
        return (a + b + sum(rest)) * scale + sum(more.values())

    captured, compiled = tg.capture(function), jax.jit(function)
    calls = [
        ((A,), {}),
        ((A, 3.0), {}),
        ((A, 3.0, A, B[0, 0]), {}),
        ((A,), {"scale": 4.0}),
        ((A,), {"z": A, "scale": 4.0, "y": 1.0}),
        ((A,), {"y": 1.0, "scale": 4.0, "z": A}),
    ]
    for args, kwargs in calls * 2:
        assert_same(captured(*args, **kwargs), compiled(*args, **kwargs))
    assert captured.cache_info() == (7, 5, 64, 5)


def test_keyword_and_position_agree():
    captured = tg.capture(lambda a, b: a - b)
    assert_same(captured(A, b=A * 2), captured(b=A * 2, a=A))
    assert_same(captured(A, A * 2), A - A * 2)


def test_static_arguments_by_number_and_name():
    def power(x, n, *, mode="up"):
        return x**n if mode == "up" else x / n

    captured = tg.capture(power, static_argnums=1, static_argnames="mode")
    for n, mode in [(2, "up"), (3, "up"), (2, "down"), (2, "up")]:
        assert_same(captured(A, n, mode=mode), jax.jit(functools.partial(power, n=n, mode=mode))(A))
    assert_same(captured(A, n=2), jax.jit(lambda x: x**2)(A))
    assert captured.cache_info() == (2, 3, 64, 3)


@pytest.mark.parametrize("values", [(1, 1.0, True), (0.0, -0.0), ((1, 2), (1.0, 2)), ("a", b"a")])
def test_static_values_that_python_takes_for_equal(values):
    seen = []
    captured = tg.capture(lambda x, n: (seen.append(n), x)[1], static_argnums=1)
    for value in values * 2:
        captured(A, value)
    assert captured.cache_info().captures == len(values)
    assert list(map(repr, dict.fromkeys(map(repr, seen)))) == list(map(repr, map(repr, values)))


def test_static_argument_first_and_negative():
    captured = tg.capture(lambda f, x, n: f(x) * n, static_argnums=(0, -1))
    assert_same(captured(jnp.sin, A, 3), jnp.sin(A) * 3)
    assert_same(captured(jnp.cos, A, 3), jnp.cos(A) * 3)
    assert_same(captured(jnp.sin, A * 2, 3), jnp.sin(A * 2) * 3)
    assert captured.cache_info() == (1, 2, 64, 2)


def test_numpy_arguments_are_read_at_each_call():
    captured, value = tg.capture(lambda x: x * 2), np.ones(2, np.float32)
    first = captured(value)
    value[:] = 5
    assert_same(captured(value), jnp.full(2, 10.0, jnp.float32))
    assert_same(first, jnp.full(2, 2.0, jnp.float32))


def test_lists_and_dicts_changed_in_place_are_seen():
    captured = tg.capture(lambda tree: tree["a"][0] * 2)
    tree = {"a": [A]}
    captured(tree)
    tree["a"][0] = A + 1
    assert_same(captured(tree), (A + 1) * 2)
    tree["a"] = [A + 2]
    assert_same(captured(tree), (A + 2) * 2)
    tree["a"].append(A)
    assert_same(captured(tree), (A + 2) * 2)
    assert captured.cache_info().captures == 2


def test_arrays_with_a_named_sharding_of_one_device():
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    captured, x = tg.capture(lambda x: x * 2), jax.device_put(A, named)
    assert_same(np.asarray(captured(x)), np.asarray(A * 2))
    assert_same(np.asarray(captured(A)), np.asarray(A * 2))
    assert_same(np.asarray(captured(x)), np.asarray(A * 2))
    assert captured.cache_info().captures == 1


def test_arrays_with_another_layout():
    layouts = pytest.importorskip("jax.experimental.layout")
    transposed = layouts.Format(layouts.Layout((1, 0)), B.sharding)
    value = jax.device_put(jnp.arange(6.0).reshape(2, 3), transposed)
    captured = tg.capture(lambda x: x * 2)
    for _ in range(2):
        assert np.array_equal(captured(value), np.arange(6.0).reshape(2, 3) * 2)


def test_with_64_bit_types():
    program = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tracegraph.replaying.captured_graph import MISS
from tracegraph.graphed_function import GraphedFunction
def step(s, x):
    return {"w": s["w"] * x, "n": s["n"] + 1}, s["w"].sum(), jnp.arange(3)
captured = tg.capture(step, donate_argnums=0)
state = wanted = {"w": np.linspace(0, 1, 5), "n": 2**40}
for x in (1.5, np.float64(0.1), np.float32(2), np.arange(5.0)):
    state, wanted = captured(state, x), jax.jit(step)(wanted, x)
    assert_same(state, wanted)
    state, wanted = state[0], wanted[0]
print(state["w"].dtype, state["n"].dtype, int(state["n"]) - 2**40)
"""
    assert run_program(program) == "float64 int64 4\n"


def test_alternating_signatures_do_not_work_their_keys_out_again(monkeypatch):
    params = {"w": jnp.arange(4.0), "b": [jnp.ones(()), np.float32(2)]}

    def predict(params, x):
        return x @ params["w"] + params["b"][0] * params["b"][1]

    captured = tg.capture(predict)
    batches = [jnp.ones((size, 4)) * size for size in (1, 2, 3)]
    for batch in batches:
        captured(params, batch)
    monkeypatch.setattr(GraphedFunction, "_call_slowly", None)
    for _ in range(3):
        for batch in batches:
            assert_same(captured(params, batch), jax.jit(predict)(params, batch))
    assert captured.cache_info() == (9, 3, 64, 3)


def test_a_refused_call_leaves_no_trace_of_its_arguments():
    def step(state, x):
        return {name: value + x.sum() for name, value in state.items()}, x * 2

    captured, wanted = tg.capture(step, donate_argnums=0), jax.jit(step)
    state, _ = captured({"a": jnp.zeros(2), "b": jnp.ones(2)}, jnp.ones(3))
    mirror, _ = wanted({"a": jnp.zeros(2), "b": jnp.ones(2)}, jnp.ones(3))
    # The state is looked at, then the batch is of another signature, then the state is changed.
    graph = captured._latest
    assert graph is not None
    assert graph.try_call((state, jnp.ones(5)), {}, False) is MISS
    state["a"], mirror["a"] = jnp.ones(2) * 9, jnp.ones(2) * 9
    for count in range(3):
        x = jnp.ones(3) * count
        state, doubled = captured(state, x)
        mirror, expected = wanted(mirror, x)
        assert_same((state, doubled), (mirror, expected))
