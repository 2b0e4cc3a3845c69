"""A graph that was compiled for a GPU without one: its first call on one verifies it."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.gpu.subprocesses import run_python
from tracegraph.saving import first_calls

pytestmark = pytest.mark.usefixtures("gpu")
PROGRAM = """
import jax, jax.numpy as jnp
import tracegraph as tg

@tg.capture(donate_argnums=0)
def step(state, x):
    loss = lambda w: jnp.tanh(x @ w).mean()
    value, gradient = jax.value_and_grad(loss)(state)
    return state - 0.1 * gradient, value

shape = jax.ShapeDtypeStruct
sample_args = (shape((64, 32), "float32"), shape((16, 64), "float32"))
"""


def step(state: Any, x: Any) -> Any:
    value, gradient = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(state)
    return state - 0.1 * gradient, value


def test_the_first_call_verifies_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    if "H200" not in jax.devices()[0].device_kind:
        pytest.skip("the file is for an H200")
    source, path = tmp_path / "serve.py", tmp_path / "step.tg"
    source.write_text(PROGRAM)
    # In a process that sees no GPU, as on the machine that builds.
    words = ["-m", "tracegraph", "compile", f"{source}:step"]
    hidden = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = run_python([*words, "--target", "h200", "--output", path], variables=hidden)
    assert done.returncode == 0, done.stderr
    loaded = tg.load(path)
    proven: list[str] = []
    verify = first_calls.verify_on_device

    def note(comparison: Any, graph: Any, *args: Any) -> Any:
        proven.append(graph.name)
        return verify(comparison, graph, *args)

    monkeypatch.setattr(first_calls, "verify_on_device", note)
    x = jax.random.normal(jax.random.key(0), (16, 64))
    expected = state = jax.random.normal(jax.random.key(1), (64, 32))
    state = state + 0
    for _ in range(3):
        expected, value = jax.jit(step)(expected, x)
        state, got = loaded(state, x)
        np.testing.assert_allclose(got, value, rtol=1e-2)
    np.testing.assert_allclose(state, expected, rtol=1e-2, atol=1e-3)
    assert proven == ["step"]
