"""Lowerings, written and read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.capturing.lowered_capture import LoweredCapture
from tracegraph.lowering.lower import Lowered
from tracegraph.lowering.saved_lowering import SaveProblem, decode_lowered, encode_lowered
from tracegraph.runtime.saving.record_codec import ContentProblem

X = jnp.linspace(-1, 1, 64).reshape(8, 8)
STATE = {"a": X + 2, "b": X + 1}


def update(state: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    return jax.tree.map(lambda leaf: leaf + jnp.tanh(x @ leaf), state), jnp.sum(x)


def lower() -> LoweredCapture:
    # A captured function keeps the memory that its graphs had for the next one.
    return tg.capture(update, donate_argnums=0).lower(STATE, X)


def pass_through(lowered: Lowered) -> Lowered:
    encoded = encode_lowered(lowered)
    tree = json.loads(json.dumps(encoded.tree))
    return decode_lowered(tree, encoded.blobs, jax.devices()[0])


def copy_state() -> Any:
    return jax.tree.map(jnp.copy, STATE)


def test_a_graph_that_was_read_gives_the_same_bits():
    lowered = lower()
    again = pass_through(lowered.lowered)
    assert again.plan == lowered.plan
    assert str(again.definition) == str(lowered.lowered.definition)
    graphs = [dataclasses.replace(lowered, lowered=each) for each in (lowered.lowered, again)]
    first, second = (each.instantiate() for each in graphs)
    mine, theirs = copy_state(), copy_state()
    total, other = X, X
    for _ in range(3):
        mine, total = first(mine, X)
        theirs, other = second(theirs, X)
    jax.tree.map(np.testing.assert_array_equal, (mine, total), (theirs, other))


def test_blobs_that_are_there_already_stay():
    encoded = encode_lowered(lower().lowered, blobs=[b"first"])
    assert encoded.blobs[0] == b"first"
    assert len(encoded.blobs) == 2


def test_what_belongs_to_the_process_is_not_saved():
    calls = tg.capture(lambda x: jax.pure_callback(np.sin, x, x), mode="partial")
    with pytest.raises(SaveProblem, match="runs as Python between two graphs"):
        encode_lowered(calls.lower(X).lowered)
    event = tg.Event(external=True)

    def record(x: jax.Array) -> jax.Array:
        y = x + 1
        event.record()
        return y * 2

    with pytest.raises(SaveProblem, match="records an event"):
        encode_lowered(tg.capture(record).lower(X).lowered)


def test_what_is_no_lowering_is_refused():
    encoded = encode_lowered(lower().lowered)
    device = jax.devices()[0]
    for tree in ([], {"lowered": encoded.tree["lowered"]}, {**encoded.tree, "more": 1}):
        with pytest.raises(ContentProblem):
            decode_lowered(tree, encoded.blobs, device)
    (code,) = encoded.blobs
    with pytest.raises(ContentProblem, match="XLA refuses it"):
        decode_lowered(encoded.tree, [code[: len(code) // 2]], device)
    empty = {**encoded.tree["executables"], "value": ["t"]}
    with pytest.raises(ContentProblem, match="there is no external"):
        decode_lowered({**encoded.tree, "executables": empty}, encoded.blobs, device)
