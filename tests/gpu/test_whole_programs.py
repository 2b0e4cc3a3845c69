"""Programs as users of flax, optax, equinox and diffrax write them: one graph each, small ones.

Each equals `jax.jit` over several steps of its state. What this version refuses is in a table, with
the reason.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.reference import find_captured
from tracegraph.runtime.definition.graph_nodes import list_nested

NEEDED = ("flax", "optax", "equinox", "diffrax")
pytestmark = pytest.mark.usefixtures("gpu")
NAMES = (
    "resnet18",
    "vit",
    "gpt_scan_12",
    "gpt_bf16_cudnn",
    "lstm_100",
    "diffrax",
    "gaussian_process",
    "decode",
)
# Programs that are refused, with a word of the reason; none may be refused for another.
REFUSED: dict[str, str] = {}
LOOPS = {"lstm_100": "while", "diffrax": "while"}
STEPS = 4


def load_program(name: str) -> Any:
    """Returns a program of the benchmark; skips where a library of it is missing."""
    missing = [each for each in NEEDED if importlib.util.find_spec(each) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    models = importlib.import_module("benchmarks.whole_models")
    assert {each.name for each in models.PROGRAMS} == set(NAMES)
    (program,) = [each for each in models.PROGRAMS if each.name == name]
    return program


def measure(found: Any, wanted: Any) -> float:
    """Returns the greatest difference of a leaf as a ratio of norms."""
    ratios = [0.0]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = (np.asarray(each).astype(np.float64) for each in (one, other))
        norm = np.linalg.norm(other) + 1e-6 * np.sqrt(other.size)
        ratios.append(float(np.linalg.norm(one - other) / norm))
    return max(ratios)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_one_graph_and_equals_jit(name: str):
    program = load_program(name)
    setup = program.make(True)
    captured: Any = tg.capture(setup.function, donate_argnums=0)
    jitted = jax.jit(setup.function, donate_argnums=0)
    batch = jax.device_put(setup.batch)
    state, wanted_state = jax.device_put((setup.state, setup.state))
    if name in REFUSED:
        with pytest.raises(tg.UnsupportedError, match=REFUSED[name]):
            captured(state, *batch)
        return
    # Of two compilations each may choose other algorithms of cuDNN; in TF32 training drives what
    # they compute apart.
    with jax.default_matmul_precision("highest"):
        for _ in range(STEPS):
            state, result = captured(state, *batch)
            wanted_state, wanted = jitted(wanted_state, *batch)
            assert measure(result, wanted) <= program.tolerance
    assert measure(state, wanted_state) <= program.tolerance
    assert captured.cache_info().captures == 1
    stages = find_captured(captured).lowered.definition.stages
    assert [stage.is_captured for stage in stages] == [True]
    kinds = Counter(node.kind for node in list_nested(stages[0].nodes))
    print(name, dict(kinds))
    if name in LOOPS:
        assert kinds[LOOPS[name]]
