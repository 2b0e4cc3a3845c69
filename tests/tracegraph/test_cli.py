"""The command line: reports and pictures, and errors in four lines for wrong input."""

import pathlib
import pickle

import pytest
from absl import flags
from absl.testing import flagsaver

import tracegraph as tg
from tests.processes import run_copy
from tracegraph.__main__ import run_command
from tracegraph.runtime.memory.snapshots.snapshot import describe_plan, write_snapshot

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
    return run_copy(["-m", "tracegraph", *words])


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


def test_help_names_both_commands():
    done = run("--help")
    assert done.stderr == ""
    for text in ("explain FILE:FUNCTION [--args EXPRESSION]", "memory SNAPSHOT [--html FILE]"):
        assert f"python -m tracegraph {text}" in done.stdout
    assert (
        done.stdout.splitlines()[0] == "Explains what a capture holds, and draws memory snapshots."
    )


MISTAKES = [
    ([], "there is no command"),
    (["explain"], "cannot read the command `explain`"),
    (["explian", "{}:scale"], "cannot read the command `explian {}:scale`"),
    (["explain", "{}"], "cannot read the command `explain {}`"),
    (["memory"], "cannot read the command `memory`"),
    (["memory", "nowhere.pickle"], "snapshot file nowhere.pickle cannot be read"),
    (["memory", "{}"], "snapshot file {} is not a pickle"),
    (["explain", "nowhere.py:scale"], "there is no file nowhere.py"),
    (["explain", "{}:scales"], "{} has no function `scales`"),
    (["explain", "{}:number"], "{} has no function `number`"),
    (["explain", "{}:scale", "--args", "(1.0,"], "cannot evaluate --args `(1.0,`"),
    (["explain", "{}:scale", "--args", "nothing"], "cannot evaluate --args `nothing`"),
    (["explain", "{}:scale", "--args", "'text', 1"], "argument 0 `x` is a str, not an array"),
]


@pytest.mark.parametrize(("words", "what"), [MISTAKES[2], MISTAKES[6], MISTAKES[7], MISTAKES[9]])
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
        run_command([word.format(program) for word in words[:2]])
    assert caught.value.what.startswith(what.format(program))


@pytest.fixture
def snapshot(tmp_path):
    plan = describe_plan("step", 4096, 1024, [("w", 0, 512, 0, 3)])
    entry = {"action": "alloc", "addr": 0, "size": 100, "stream": 0, "time_us": 5}
    path = tmp_path / "mine.pickle"
    write_snapshot(path, {"segments": [], "device_traces": [[entry]], "tracegraph_plans": [plan]})
    return path


def test_draw_a_snapshot(snapshot):
    done = run("memory", snapshot)
    assert (done.returncode, done.stderr) == (0, "")
    page = snapshot.with_suffix(".html")
    assert done.stdout.splitlines() == [
        f"{snapshot}: 1 device, 0 segments with 0 B, in use 0 B, 1 trace entries, 1 memory plans",
        f"wrote {page}",
    ]
    assert "Memory plan of step" in page.read_text()


@pytest.mark.parametrize("names", [["html"], ["png"], ["html", "png"]])
def test_draw_a_snapshot_into_named_files(snapshot, tmp_path, names):
    flags.FLAGS.mark_as_parsed()
    paths = {name: str(tmp_path / f"picture.{name}") for name in names}
    with flagsaver.flagsaver(**paths, time=True):
        lines = run_command(["memory", str(snapshot)]).splitlines()
    assert lines[1:] == [f"wrote {path}" for path in paths.values()]
    assert all(pathlib.Path(path).stat().st_size > 1000 for path in paths.values())
    assert not snapshot.with_suffix(".html").exists()


@pytest.mark.parametrize("name", ["html", "png"])
def test_a_picture_that_cannot_be_written(snapshot, tmp_path, name):
    flags.FLAGS.mark_as_parsed()
    path = tmp_path / "nowhere" / "picture"
    with (
        flagsaver.flagsaver(**{name: str(path)}),
        pytest.raises(tg.ConfigError) as caught,
    ):
        run_command(["memory", str(snapshot)])
    assert caught.value.what == f"cannot write {path}: No such file or directory"


def test_a_malicious_snapshot_is_refused(tmp_path):
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps([print]))
    done = run("memory", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"TracegraphError: snapshot file {path} holds `builtins.print`")
