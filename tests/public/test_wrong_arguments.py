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


def save_double(path: Any, **options: Any) -> Any:
    double = tg.capture(lambda x: x * 2, name="double")
    double(X)
    double.save(path, **options)
    return path


def use_scaler(call: Callable[[tg.amp.GradScaler], Any]) -> Callable[[pathlib.Path], Any]:
    return lambda _folder: call(tg.amp.GradScaler())


def open_block(**options: Any) -> Callable[[pathlib.Path], Any]:
    return lambda _folder: tg.graph(tg.CUDAGraph(), **options).__enter__()


# What is called in an empty folder, what is wrong, and where.
WRONG: dict[str, tuple[Callable[[pathlib.Path], Any], str, str]] = {
    "load path": (lambda _: tg.load(None), "None is not a path", "`path`"),  # pyright: ignore[reportArgumentType]
    "load sum": (
        lambda folder: tg.load(save_double(folder / "a.tg"), sha256=3),  # pyright: ignore[reportArgumentType]
        "sha256=3 is not allowed",
        "tg.load",
    ),
    "load constants": (
        lambda folder: tg.load(save_double(folder / "a.tg"), constants=3),  # pyright: ignore[reportArgumentType]
        "constants=3 is not allowed",
        "tg.load",
    ),
    "load nodes": (
        lambda folder: tg.load(save_double(folder / "a.tg"), nodes=3),  # pyright: ignore[reportArgumentType]
        "nodes=3 is not allowed",
        "tg.load",
    ),
    "save path": (lambda _: save_double(3), "3 is not a path", "`path`"),
    "save folder": (save_double, "cannot be written: it is a folder, a device", ""),
    "save constants": (
        lambda folder: save_double(folder / "a.tg", constants="no"),
        "constants='no' is unknown",
        "save",
    ),
    "unused": (
        lambda _: tg.make_graphed_callables(jnp.sin, (X,), allow_unused_input="yes"),  # pyright: ignore[reportArgumentType]
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
        "found_inf='a' is no result of a step",
        "argument `found_inf`",
    ),
    "scaler state": (
        use_scaler(lambda scaler: scaler.load_state_dict(3)),  # pyright: ignore[reportArgumentType]
        "the state of a GradScaler has no scale",
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
    assert what in error.what
    assert where in error.where
    assert str(error).count("\n") == 3
    assert not tg.is_current_stream_capturing()


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
    assert "relu" in wanted
    assert "tanh" in got
