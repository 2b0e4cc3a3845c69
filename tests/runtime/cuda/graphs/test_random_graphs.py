"""Random calls on a device over host memory against what each value must be."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.fakes.cuda_on_host import floats, kernel, make_cuda_replay, make_device, place
from tests.fakes.definitions import make_definition, make_stage, take_results
from tracegraph.runtime.streams.stream import Stream, stream

# y = 2x + s with the new s, s = s + 1; z is a temporary.
DEFINITION = make_definition(
    make_stage(
        kernel("double", "x", "z"),
        kernel("increment", "s", "s"),
        kernel("add", "z s", "y"),
        edges=((0, 2), (1, 2)),
    ),
    inputs="x s",
    outputs="y s",
    residents="s",
)


@pytest.mark.parametrize("seed", range(12))
def test_every_value_is_what_it_was_promised_to_be(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = random.Random(seed)
    device = make_device(monkeypatch, is_deferred=seed % 2 == 1)
    replay, sides = make_cuda_replay(device, DEFINITION), [Stream(), Stream()]
    take = replay.inputs[0].make_writer()
    x, s, inputs = 0.0, 0.0, []
    kept: list[tuple[Any, float]] = []
    leaf: Any = None
    replay.load([(0, floats([x] * 4)), (1, floats([s] * 4))])

    def check(index: int) -> None:
        value, wanted = kept[index]
        assert np.asarray(value).tolist() == [wanted] * 4

    for _ in range(60):
        replay.settle()
        kind = choose.choice(("plain", "plain", "misaligned", "host", "same", "state"))
        if kind != "same":
            x = float(choose.randrange(100))
        if kind in ("plain", "misaligned"):
            # Kept: a deferred launch still reads it.
            inputs.append(place([x] * 4, skip=64 * (kind == "misaligned")))
            take(inputs[-1])
        elif kind == "host":
            replay.load([(0, floats([x] * 4))])
        elif kind == "state":
            if leaf is not None:
                # It is the old state from now on.
                kept.append((leaf, s))
            s = float(choose.randrange(100))
            replay.load([(0, floats([x] * 4)), (1, floats([s] * 4))])
        with stream(choose.choice((None, None, *sides))):
            replay.launch()
        s += 1
        result, leaf = take_results(replay)
        action = choose.choice(("keep", "keep", "drop", "read", "copy", "delete"))
        if action == "keep":
            kept.append((result, 2 * x + s))
        if action in ("read", "delete"):
            kept.append((result.jax(), 2 * x + s))
        if action == "copy":
            kept.append((result.peek().copy().to_jax(), 2 * x + s))
            kept.append((result, 2 * x + s))
        if action == "delete":
            result.consume()
        if choose.random() < 0.3:
            kept.append((leaf.jax(), s))
        if kept and choose.random() < 0.3:
            check(choose.randrange(len(kept)))
        if kept and choose.random() < 0.4:
            kept.pop(choose.randrange(len(kept)))
    for index in range(len(kept)):
        check(index)
    assert np.asarray(leaf).tolist() == [s] * 4
