"""Files of functions in which what is said of their calls was changed, and what loading ends in."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import random
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg
from tests.fuzz.saved_files import LEAVES, NUMBERS, list_places, seal
from tests.oracles.tree_equality import assert_same
from tracegraph.runtime.saving.saved_file import parse_file

# Of a file; its programs are changed in `saved_files`.
PARTS = ("function", "extra", "origin")


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    weights: Any
    pair: Pair
    name: str = dataclasses.field(metadata={"static": True}, default="state")


@dataclasses.dataclass(frozen=True)
class SavedCall:
    """A file of a function, a call of it, and what that returns.

    Attributes:
        content: of the file.
        blobs: of the file.
        make_call: makes its arguments anew.
        result: what the function returns for them.
    """

    content: Any
    blobs: tuple[bytes, ...]
    make_call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    result: Any


def train(state: State, batch: Any, rate: float, key: Any, *, mode: str = "train") -> Any:
    noise = jax.random.normal(key, (3,)) if mode == "train" else 0
    weights = {"w": state.weights["w"] - rate * batch["x"] + noise}
    pair = Pair(state.pair.first + 1, weights["w"].sum())
    return dataclasses.replace(state, weights=weights, pair=pair), tg.probe("sum", pair.second)


def make_call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    state = State({"w": jnp.ones(3)}, Pair(jnp.int32(0), jnp.zeros(())), "mine")
    batch = {"x": jnp.arange(3.0), "act": jnp.tanh}
    return (state, batch, 0.5, jax.random.key(1)), {"mode": "eval"}


def score(x: Any, weights: Any) -> Any:
    is_true = jnp.arange(x.shape[0]) < tg.bucket_size()
    return jnp.where(is_true, x, 0).sum() * weights, x + 1


def make_padded_call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (np.arange(3.0, dtype=np.float32),), {"weights": jnp.ones(2)}


def make_saved_calls() -> list[SavedCall]:
    """Returns functions with all that a file says of calls."""
    step = tg.capture(train, donate_argnums=0, static_argnums=2, static_argnames="mode")
    # Each axis of eight elements follows the size.
    padded = tg.capture(score, buckets={"x": {0: (2, 4)}})
    return [save(step, make_call), save(padded, make_padded_call)]


def save(step: Any, make: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]) -> SavedCall:
    """Returns a captured function's file with a call of it."""
    args, kwargs = make()
    result = step(*args, **kwargs)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "step.tg")
        step.save(path)
        file = parse_file(path.read_bytes(), "step.tg")
    return SavedCall(file.content, tuple(map(bytes, file.blobs)), make, result)


def change(call: SavedCall, rng: random.Random) -> bytes:
    """Returns the file with a right checksum, in which a few values are others."""
    content = copy.deepcopy(call.content)
    part = rng.choice([name for name in PARTS if content[name] is not None])
    for _ in range(rng.randrange(1, 4)):
        places = list_places(content[part])
        if not places:
            break
        owner, key = rng.choice(places)
        kind = rng.random()
        if kind < 0.5:
            owner[key] = _change_leaf(owner[key], rng)
        elif kind < 0.8:
            other, place = rng.choice(places)
            owner[key] = copy.deepcopy(other[place])
        elif isinstance(owner, list) and kind < 0.9:
            owner.insert(key, copy.deepcopy(owner[key]))
        else:
            del owner[key]
    return seal(content, call.blobs)


def _change_leaf(old: Any, rng: random.Random) -> Any:
    if type(old) is int and rng.random() < 0.7:
        return old + 1 if rng.random() < 0.3 else rng.choice(NUMBERS)
    return copy.deepcopy(rng.choice(LEAVES))


def run_file(call: SavedCall, data: bytes, path: pathlib.Path) -> str:
    """Loads a file and calls its function: refused, equal, or an error of ours.

    Raises:
        AssertionError: the call returns something else.
    """
    path.write_bytes(data)
    try:
        loaded = tg.load(path)
    except tg.SavedFileError:
        return "refused"
    assert loaded.explain()
    args, kwargs = call.make_call()
    try:
        found = loaded(*args, **kwargs)
    except (tg.ReplayError, tg.CaptureError):
        return "other calls"
    one, other = (jax.tree.leaves(each) for each in (found, call.result))
    if list(map(jax.typeof, one)) != list(map(jax.typeof, other)):
        # What a file says of results that are cut, and of weak types, is all that is known.
        return "other types"
    assert_same(one, other)
    return "equal"
