"""Arguments of a wrong type at the doors of saved graphs, graphed callables, scalers and blocks."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tracegraph as tg

X = jnp.ones(3)
AT = "tests/public/errors/test_wrong_arguments.py"
# Without its types, which forbid what is tried here.
LOAD: Any = tg.load
MAKE: Any = tg.make_graphed_callables


def save_double(path: Any, **options: Any) -> Any:
    double = tg.capture(lambda x: x * 2, name="double")
    double(X)
    double.save(path, **options)
    return path


def load_double(**options: Any) -> Callable[[pathlib.Path], Any]:
    return lambda folder: LOAD(save_double(folder / "a.tg"), **options)


def use_scaler(call: Callable[[Any], Any]) -> Callable[[pathlib.Path], Any]:
    return lambda _folder: call(tg.amp.GradScaler())


def open_block(**options: Any) -> Callable[[pathlib.Path], Any]:
    return lambda _folder: tg.graph(tg.CUDAGraph(), **options).__enter__()


# What is called in an empty folder, what is wrong, and at which argument of what.
WRONG: dict[str, tuple[Callable[[pathlib.Path], Any], str, str]] = {
    "load path": (lambda _: LOAD(None), "None is not a path", "argument `path`"),
    "load bytes": (lambda _: LOAD(b"a.tg"), "b'a.tg' is not a path", "argument `path`"),
    "load zero": (lambda _: LOAD("a\0b"), "'a\\x00b' is not a path", "argument `path`"),
    "load surrogate": (lambda _: LOAD("\ud800"), "'\\ud800' is not a path", "argument `path`"),
    "load sum": (load_double(sha256=3), "sha256=3 is not allowed", "tg.load"),
    "load constants": (load_double(constants=3), "constants=3 is not allowed", "tg.load"),
    "load text": (load_double(constants="W"), "constants='W' is not allowed", "tg.load"),
    "load unknown": (
        load_double(constants={3: X}),
        "`constants` has other arrays than the graphs of {folder}/a.tg take",
        "3 is not taken",
    ),
    "load nodes": (load_double(nodes=3), "nodes=3 is not allowed", "tg.load"),
    "load node": (load_double(nodes=[3]), "nodes=[3] is not allowed", "tg.load"),
    "load names": (load_double(nodes="abc"), "nodes='abc' is not allowed", "tg.load"),
    "save zero": (lambda _: save_double("a\0b"), "'a\\x00b' is not a path", "argument `path`"),
    "save path": (lambda _: save_double(3), "3 is not a path", "argument `path`"),
    "save folder": (
        save_double,
        "{folder} cannot be written: it is a folder, a device or a pipe",
        "{folder}",
    ),
    "save constants": (
        lambda folder: save_double(folder / "a.tg", constants="no"),
        "constants='no' is unknown",
        "save",
    ),
    "unused": (
        lambda _: MAKE(jnp.sin, (X,), allow_unused_input="yes"),
        "allow_unused_input='yes' is unknown",
        "tg.make_graphed_callables",
    ),
    "gradient": (
        use_scaler(lambda scaler: scaler.unscale({"w": "a"})),
        "the gradient['w'] is a str, not an array",
        "argument `grads`",
    ),
    "found_inf": (
        use_scaler(lambda scaler: scaler.update("a")),
        "found_inf='a' is not the result of a step",
        "argument `found_inf`",
    ),
    "scaler state": (
        use_scaler(lambda scaler: scaler.load_state_dict(3)),
        "the state of a GradScaler has no scale, growth_factor, backoff_factor, growth_interval, "
        "_growth_tracker",
        "argument `state_dict`",
    ),
    "block pool": (open_block(pool="x"), "pool= is not a pool", "tg.graph"),
    "block stream": (open_block(stream="x"), "stream= is not a tg.Stream", "tg.graph"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused_at_the_door(name: str, tmp_path: pathlib.Path) -> None:
    call, what, where = WRONG[name]
    with pytest.raises(tg.TracegraphError) as raised:
        call(tmp_path)
    error = raised.value
    assert error.what == what.format(folder=tmp_path)
    assert error.where.startswith(AT) == (", " in error.where)
    assert error.where.rpartition(", ")[2] == where.format(folder=tmp_path)
    assert str(error).count("\n") == 3
    assert not tg.is_current_stream_capturing()
    assert tg.capture(lambda x: x + 1)(X).tolist() == [2, 2, 2]


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(tg.SavedFileError, match="it is a folder, a device or a pipe"):
        save_double(path)
    assert path.is_fifo()


def test_a_static_attribute_that_has_changed_is_shown() -> None:
    @jax.tree_util.register_pytree_node_class
    class Layer:
        def __init__(self, kind: str, w: Any) -> None:
            self.kind, self.w = kind, w

        def __call__(self, x: Any) -> Any:
            return self.w * x

        def tree_flatten(self) -> tuple[tuple[Any], str]:
            return (self.w,), self.kind

        @classmethod
        def tree_unflatten(cls, kind: str, children: tuple[Any]) -> Layer:
            return cls(kind, *children)

    step: Any = tg.make_graphed_callables(lambda layer, x: layer(x), (Layer("relu", X), X))
    with pytest.raises(tg.ReplayError) as raised:
        step(Layer("tanh", X), X)
    wanted, got = raised.value.where.split(", got ")
    assert ("relu" in wanted, "tanh" in wanted) == (True, False)
    assert ("relu" in got, "tanh" in got) == (False, True)
