"""`save` and `tg.load`: a file gives the same calls, in this process and in a fresh one."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tests.processes import run_program

# Counts what JAX traces and compiles from here on, and prints results as bytes.
FRESH = """
    import sys
    import jax
    import numpy as np
    import tracegraph as tg

    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))

    def show(tree):
        for leaf in jax.tree.leaves(tree):
            print(leaf.dtype, leaf.shape, np.asarray(leaf).tobytes().hex())

    def finish():
        print([name for name in events if "trace" in name or "compile" in name])
"""


def show(tree: Any) -> str:
    """Returns what `show` of a fresh process prints."""
    return "".join(
        f"{leaf.dtype} {leaf.shape} {np.asarray(leaf).tobytes().hex()}\n"
        for leaf in jax.tree.leaves(tree)
    )


def run_fresh(program: str, path: pathlib.Path) -> str:
    """Runs a program that loads the path; returns what it printed, without its last line: `[]`."""
    lines = run_program(FRESH + program + "\n    finish()\n", path).splitlines(keepends=True)
    assert lines.pop() == "[]\n", "JAX has traced or compiled"
    return "".join(lines)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "step.tg"


class Momentum(NamedTuple):
    velocity: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    momentum: Momentum
    name: str = dataclasses.field(metadata={"static": True}, default="state")


@dataclasses.dataclass(frozen=True)
class Sizes:
    factor: int


class Mode(enum.Enum):
    TRAIN = "train"


def make_train_step() -> tuple[Any, Any, Any]:
    """Returns a function, its state and a batch."""
    optimizer = optax.adam(1e-2)
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}

    def train(state: Any, batch: Any) -> Any:
        params, rest = state

        def measure(params: Any) -> Any:
            return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(measure)(params)
        updates, rest = optimizer.update(grads, rest, params)
        return (optax.apply_updates(params, updates), rest), loss

    batch = {"x": jnp.arange(8.0).reshape(2, 4), "y": jnp.ones((2, 3))}
    return train, (params, optimizer.init(params)), batch


def copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def test_a_training_loop_goes_on_in_a_fresh_process(path: pathlib.Path) -> None:
    train, state, batch = make_train_step()
    step: Any = tg.capture(train, donate_argnums=0)
    wanted, loss = step(copy(state), batch)
    for _ in range(3):
        wanted, loss = step(wanted, batch)
    step.save(path)
    # An optimizer's state is of classes of its library, which the process must know.
    got = run_fresh(
        """
    import optax
    step = tg.load(sys.argv[1])
    params = {"w": np.ones((4, 3), np.float32), "b": np.zeros(3, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    adam = optax.ScaleByAdamState(np.zeros((), np.int32), zeros, jax.tree.map(np.copy, zeros))
    state = (params, (adam, optax.EmptyState()))
    x, y = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones((2, 3), np.float32)
    for _ in range(4):
        before = state
        state, loss = step(state, {"x": x, "y": y})
    assert jax.tree.leaves(before)[0].is_deleted(), "donation"
    assert type(state[1][0]) is optax.ScaleByAdamState
    show((state, loss))
""",
        path,
    )
    assert got == show((wanted, loss))


def test_a_loaded_step_keeps_its_state_in_the_graph(path: pathlib.Path) -> None:
    train, state, batch = make_train_step()
    step: Any = tg.capture(train, donate_argnums=0)
    wanted, _ = step(copy(state), batch)
    wanted, _ = step(wanted, batch)
    wanted, loss_wanted = step(wanted, batch)
    step.save(path)
    loaded: Any = tg.load(path)
    got, loss = loaded(copy(state), batch)
    addresses = [leaf.data_ptr() for leaf in jax.tree.leaves(got)]
    got, _ = loaded(got, batch)
    old = got
    got, loss = loaded(got, batch)
    assert addresses == [leaf.data_ptr() for leaf in jax.tree.leaves(got)]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert_same((got, loss), (wanted, loss_wanted))
    with pytest.raises(tg.ReplayError, match="it was donated to `train`"):
        loaded(old, batch)


def test_several_signatures_are_in_one_file(path: pathlib.Path) -> None:
    def scale(x: Any, n: int, mode: Any = None, *, flag: Any = False) -> Any:
        return x * n if mode is Mode.TRAIN else x + n + (jnp.sum(x) if flag else 0)

    step = tg.capture(scale, static_argnames=("n", "mode", "flag"))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((jnp.ones(3), 2), {}),
        ((jnp.ones(4), 2), {}),
        ((jnp.ones(3, jnp.int32), 2), {"flag": True}),
        ((jnp.ones(3),), {"n": 3, "mode": Mode.TRAIN}),
        ((1.0, 2), {}),
    ]
    wanted = [step(*args, **kwargs) for args, kwargs in calls]
    step.save(path)
    loaded = tg.load(path)
    assert repr(loaded) == "<LoadedFunction scale, 5 signatures>"
    for (args, kwargs), result in zip(calls, wanted, strict=True):
        assert_same(loaded(*args, **kwargs), result)
    # Other spellings of the same calls.
    assert_same(loaded(n=2, x=jnp.ones(3)), wanted[0])
    assert_same(loaded(jnp.ones(3), 2, None, flag=False), wanted[0])
    with pytest.raises(tg.ReplayError, match="static argument n: wanted 2, got 5"):
        loaded(jnp.ones(3), 5)
    assert str(loaded.__signature__).replace("'", "") == "(x, n, mode=None, *, flag=False)"


def test_trees_and_static_values_of_users(path: pathlib.Path) -> None:
    def update(state: Any, sizes: Any, extra: Any) -> Any:
        momentum = Momentum(state.momentum.velocity * sizes.factor, state.momentum.count + 1)
        return dataclasses.replace(state, momentum=momentum), {"used": extra["act"], "n": (1, None)}

    state = State({"w": jnp.ones(2)}, Momentum(jnp.ones(2), jnp.int32(0)), "mine")
    extra = {"act": jnp.tanh, "x": jnp.zeros(1)}
    step = tg.capture(update, static_argnums=1, donate_argnums=0)
    wanted, rest = step(copy(state), Sizes(3), extra)
    step.save(path)
    loaded: Any = tg.load(path)
    got, rest_got = loaded(copy(state), Sizes(3), extra)
    assert type(got) is State
    assert type(got.momentum) is Momentum
    assert (got.name, rest_got["used"]) == ("mine", jnp.tanh)
    assert_same((got, rest_got["n"]), (wanted, rest["n"]))
    for other in ((Sizes(4), extra), (Sizes(3), {**extra, "act": jnp.sin})):
        with pytest.raises(tg.ReplayError, match="wanted"):
            loaded(copy(state), *other)


def test_classes_that_a_process_does_not_have_are_passed(path: pathlib.Path) -> None:
    module = sys.modules["module_of_a_user"] = types.ModuleType("module_of_a_user")
    exec(
        "import dataclasses, jax\n"
        "@jax.tree_util.register_dataclass\n"
        "@dataclasses.dataclass\n"
        "class Held:\n"
        "    a: object\n"
        "    b: object\n",
        vars(module),
    )
    try:
        step = tg.capture(lambda held: held.a - held.b, name="step")
        step(vars(module)["Held"](jnp.ones(2), jnp.zeros(2)))
        step.save(path)
    finally:
        del sys.modules[module.__name__]
    program = """
    import dataclasses
    try:
        tg.load(sys.argv[1])
    except tg.SavedFileError as error:
        print(error)

    def register(names):
        kind = dataclasses.make_dataclass("Held", names)
        return jax.tree_util.register_dataclass(kind, names, [])

    for names in (["b", "a"], ["a", "b", "c"]):
        try:
            tg.load(sys.argv[1], nodes=[register(names)])
        except tg.SavedFileError as error:
            print(error)
    Held = register(["a", "b"])
    show(tg.load(sys.argv[1], nodes=[Held])(Held(np.ones(2, np.float32), np.zeros(2, np.float32))))
"""
    got = run_fresh(program, path)
    assert "needs `module_of_a_user.Held`, which is not there in this process\n" in got
    assert "import module_of_a_user before loading, or pass it: tg.load(path, nodes=" in got
    assert got.count("which has other fields than when the file was saved") == 2
    assert got.endswith(show(jnp.ones(2)))


def test_keys_and_small_types(path: pathlib.Path) -> None:
    def draw(key: Any, old: Any, x: Any) -> Any:
        new, sub = jax.random.split(key)
        noise = jax.random.normal(sub, x.shape).astype(x.dtype)
        return new, jax.random.bits(jax.random.fold_in(old, 1), (2,)), x + noise

    step = tg.capture(draw, donate_argnums=0)

    def make_call() -> Any:
        return jax.random.key(3), jax.random.key(4, impl="rbg"), jnp.ones(5, jnp.bfloat16)

    wanted = step(*make_call())
    step.save(path)
    loaded: Any = tg.load(path)
    assert_same(loaded(*make_call()), wanted)
    assert loaded(*make_call())[0].dtype == jax.random.key(0).dtype
    got = run_fresh(
        """
    step = tg.load(sys.argv[1])
    print(step)
""",
        path,
    )
    assert got == "<LoadedFunction draw, 1 signature>\n"


def test_static_results_are_the_buffers_of_the_graph(path: pathlib.Path) -> None:
    step = tg.capture(lambda x: x * 2, outputs="static")
    step(jnp.ones(2))
    step.save(path)
    loaded: Any = tg.load(path)
    first = loaded(jnp.ones(2))
    second = loaded(jnp.zeros(2))
    np.testing.assert_array_equal(second, [0, 0])
    with pytest.raises(tg.StaleOutputError):
        np.asarray(first)


def test_fresh_results_keep_their_values(path: pathlib.Path) -> None:
    step = tg.capture(lambda x, y: (x * 2, y))
    step(jnp.ones(2), jnp.ones(3))
    step.save(path)
    loaded: Any = tg.load(path)
    results = [loaded(jnp.full(2, i, jnp.float32), jnp.full(3, i, jnp.float32)) for i in range(4)]
    for i, (x, y) in enumerate(results):
        assert_same((x, y), (jnp.full(2, 2 * i, jnp.float32), jnp.full(3, i, jnp.float32)))


def test_probes(path: pathlib.Path) -> None:
    step = tg.capture(lambda x: tg.probe("pair", {"a": x * 2, "b": x})["a"] + 1)
    step(jnp.ones(2))
    step.save(path)
    loaded: Any = tg.load(path)
    assert loaded.probes() == {}
    loaded(3 * jnp.ones(2))
    np.testing.assert_array_equal(loaded.probes()["pair"]["a"], [6, 6])


def test_closed_over_arrays_are_in_the_file_or_are_given(path: pathlib.Path) -> None:
    params = {"w": jnp.ones((512, 1024)), "small": jnp.ones(3)}
    bias = jnp.ones((512, 1024)) * 2

    def apply(x: Any) -> Any:
        return (x @ params["w"]).sum() + params["small"].sum() + (bias * x[0, 0]).sum()

    step = tg.capture(apply)
    x = jnp.ones((1, 512))
    wanted, other = step(x), step(jnp.ones((2, 512)))
    step.save(path)
    size = path.stat().st_size
    assert 2 * bias.nbytes < size < 2.2 * bias.nbytes, "each of them once, for both signatures"
    assert_same(tg.load(path)(x), wanted)
    step.save(path, constants=False)
    assert path.stat().st_size < bias.nbytes / 10
    with pytest.raises(tg.SavedFileError, match="needs 3 closed-over arrays") as raised:
        tg.load(path)
    wanted_types = "params['w']: f32[512,1024], params['small']: f32[3], bias: f32[512,1024]"
    assert wanted_types in raised.value.where
    assert "constants={'params': params, 'bias': bias}" in raised.value.fix
    for given in ({"params": params, "bias": bias}, [*params.values(), bias]):
        loaded = tg.load(path, constants=given)
        assert_same(loaded(x), wanted)
        assert_same(loaded(jnp.ones((2, 512))), other)
    other_params = {"w": 2 * params["w"], "small": params["small"]}
    twice = tg.load(path, constants={"params": other_params, "bias": bias})
    assert float(twice(x)) == float(wanted) + 512 * 1024
    for wrong in (
        {"params": params, "bias": bias, "x": 1},
        [bias],
        {"params": params, "bias": bias.T},
        {"params": params, "bias": 2.0},
    ):
        with pytest.raises(tg.SavedFileError, match="has other arrays than the graphs of"):
            tg.load(path, constants=wrong)


def test_large_results_and_arguments_that_pass_through(path: pathlib.Path) -> None:
    weights = jnp.ones((1024, 1024))
    step = tg.capture(lambda state, x: (state, state, x, weights, x), donate_argnums=0)
    wanted = step(jnp.ones(2), jnp.zeros(3))
    step.save(path)
    loaded: Any = tg.load(path)
    assert_same(loaded(jnp.ones(2), jnp.zeros(3)), wanted)
    bare = tg.capture(lambda x: x)
    bare(jnp.ones(2))
    bare.save(path)
    np.testing.assert_array_equal(tg.load(path)(jnp.arange(2.0)), [0, 1])
    empty: Any = tg.capture(lambda: {"x": None})
    empty()
    empty.save(path)
    assert tg.load(path)() == {"x": None}
