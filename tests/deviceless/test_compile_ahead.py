"""Graphs for an H200 that are compiled and saved without one, by the command line."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import tracegraph as tg
from tracegraph.__main__ import run_command
from tracegraph.runtime.saving.saved_file import read_file
from tracegraph.saving.saved_function import decode_entry, open_function

PROGRAM = """
import jax, jax.numpy as jnp
import tracegraph as tg

WEIGHTS = jnp.ones((512, 1024))

@tg.capture(donate_argnums=0)
def step(state, x):
    loss = lambda w: jnp.tanh(x @ w).mean()
    value, gradient = jax.value_and_grad(loss)(state)
    return state - 0.1 * gradient, value + WEIGHTS[0, 0]

def transform(x):
    return jnp.fft.fft(x)

def sizes(x):
    return x * 2

sizes = tg.capture(sizes, buckets={"x": {0: (2, 4)}})
shape = jax.ShapeDtypeStruct
sample_args = (shape((8, 4), "float32"), shape((2, 8), "float32"))
"""


@pytest.fixture
def program(tmp_path: pathlib.Path, h200: Any) -> str:
    del h200
    path = tmp_path / "serve.py"
    path.write_text(PROGRAM)
    return str(path)


def compile_program(program: str, name: str, *words: str) -> pathlib.Path:
    path = pathlib.Path(program).with_name("step.tg")
    run_command(["compile", f"{program}:{name}", "--target", "h200", "--output", str(path), *words])
    return path


def test_a_step_is_compiled_and_described(program: str):
    path = compile_program(program, "step")
    text = run_command(["show", str(path)])
    assert "saved with NVIDIA H200" in text
    assert "  state: f32[8,4], donated" in text
    assert "  WEIGHTS: f32[512,1024]" in text
    assert "verification: still to be done" in text
    opened = open_function(read_file(path))
    lowered = decode_entry(opened, 0, None)
    assert lowered.takes_kernels
    assert lowered.definition.node_count > 1
    (entry,) = opened.function.entries
    assert entry.expectation is not None
    assert entry.expectation.others.may_differ == (True, True)
    # XLA's executable is there to be compared with.
    assert len(opened.lowered[0]["executables"]["rows"]) > 0


def test_it_is_refused_where_there_is_no_such_gpu(program: str):
    path = compile_program(program, "step")
    with pytest.raises(tg.SavedFileError, match=r"is for a GPU of compute capability 9\.0"):
        tg.load(path)


def test_what_only_a_gpu_can_tell_is_refused(program: str):
    with pytest.raises(
        tg.UnsupportedError, match="a Fourier transform cannot be compiled for h200"
    ):
        compile_program(program, "transform", "--args", "jnp.ones(8)")
    with pytest.raises(tg.ConfigError, match="it has buckets"):
        compile_program(program, "sizes", "--args", "jnp.ones(3)")
    assert not pathlib.Path(program).with_name("step.tg").exists()
