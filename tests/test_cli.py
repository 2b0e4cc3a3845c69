"""`python -m tracegraph explain`: a report on stdout, and errors in four lines for wrong input."""

import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

import tracegraph as tg
from tracegraph.__main__ import explain_target

PROGRAM = """
import jax, jax.numpy as jnp
import tracegraph as tg

sample_args = (jnp.ones(3), 2.0)

def scale(x, factor):
    return x * factor

@tg.capture(donate_argnums=0)
def update(state, x):
    return {"w": state["w"] + x}

def refused(x, factor):
    return float(x.sum())

def table():
    return jnp.arange(3)

def broken(x, factor):
    raise KeyError("mine")

number = 3
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "program.py"
    path.write_text(PROGRAM)
    return path


def run(*words):
    root = str(pathlib.Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])}
    command = [sys.executable, "-m", "tracegraph", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_explain_a_plain_function(program):
    done = run("explain", f"{program}:scale")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("`scale` can be captured (mode='whole', outputs='fresh')")
    assert "x: f32[3]" in done.stdout
    assert "memory plan" in done.stdout


def test_explain_a_captured_function_with_arguments(program):
    done = run("explain", f"{program}:update", "--args", "({'w': jnp.zeros(5)}, jnp.ones(5))")
    assert (done.returncode, done.stderr) == (0, "")
    assert "state['w']: f32[5]" in done.stdout
    assert "resident" in done.stdout


def test_explain_a_function_that_cannot_be_captured(program):
    done = run("explain", f"{program}:refused")
    assert done.returncode == 0
    assert "`refused` cannot be captured" in done.stdout
    assert "program.py:15 in refused" in done.stdout


MISTAKES = [
    (["explain"], "cannot read the command `explain`"),
    (["explian", "{}:scale"], "cannot read the command `explian {}:scale`"),
    (["explain", "nowhere.py:scale"], "there is no file nowhere.py"),
    (["explain", "{}:scales"], "{} has no function `scales`"),
    (["explain", "{}:number"], "{} has no function `number`"),
    (["explain", "{}:scale", "--args", "(1.0,"], "cannot evaluate --args `(1.0,`"),
    (["explain", "{}:scale", "--args", "nothing"], "cannot evaluate --args `nothing`"),
    (["explain", "{}:scale", "--args", "'text', 1"], "argument 0 `x` is a str, not an array"),
]


@pytest.mark.parametrize(("words", "what"), [MISTAKES[1], MISTAKES[3], MISTAKES[5]])
def test_wrong_input(program, words, what):
    done = run(*[word.format(program) for word in words])
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().split("\n")
    assert lines[0].split(": ", 1)[1].startswith(what.format(program))
    assert [each[:9] for each in lines[1:]] == ["  where: ", "  why:   ", "  fix:   "]


@pytest.mark.parametrize(("words", "what"), MISTAKES)
def test_each_mistake_is_named(program, words, what):
    expression = words[3] if "--args" in words else None
    flags.FLAGS.mark_as_parsed()
    with (
        flagsaver.flagsaver(args=expression),
        pytest.raises(tg.TracegraphError) as caught,
    ):
        explain_target([word.format(program) for word in words[:2]])
    assert caught.value.what.startswith(what.format(program))
