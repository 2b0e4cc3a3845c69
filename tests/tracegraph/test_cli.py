"""The command line: reports and pictures, and errors in four lines for wrong input."""

import pathlib
import pickle

import jax
import pytest

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
    assert len(done.stdout.splitlines()) <= 40


def test_explain_shows_parts_on_request(program):
    done = run(
        "explain", f"{program}:update", "--args", "({'w': jnp.ones(5)}, 1.0)", "--show", "ir, plan"
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary, *parts = done.stdout.split("\n\n")
    assert len(summary.splitlines()) <= 40
    assert [part.splitlines()[0] for part in parts] == ["ir", "plan"]
    assert "program.py:12 in update" in parts[0]
    assert "memory plan of `update`" in parts[1]


def test_explain_a_captured_function_with_arguments(program):
    done = run("explain", f"{program}:update", "--args", "({'w': jnp.zeros(5)}, jnp.ones(5))")
    assert (done.returncode, done.stderr) == (0, "")
    assert "state: dict, 1 leaf, 20 bytes, donated" in done.stdout
    assert "resident" in done.stdout


def test_explain_a_function_that_cannot_be_captured(program):
    done = run("explain", f"{program}:refused")
    assert done.returncode == 0
    assert "`refused` cannot be captured" in done.stdout
    assert "program.py:15 in refused" in done.stdout


def test_help_shows_usage_and_examples_and_is_no_mistake():
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    usage = "explain FILE:FUNCTION [--args EXPRESSION] [--show PARTS]"
    for text in (usage, "memory SNAPSHOT [--html FILE]"):
        assert f"python -m tracegraph {text}" in done.stdout
    examples = done.stdout.partition("examples:")[2].split("\n")
    assert [each.split()[3] for each in examples if each.strip()] == [
        "explain",
        "memory",
        "show",
        "compile",
        "error",
    ]


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("explain --help", ["FILE:FUNCTION", "--args EXPRESSION", "sample_args", "example:"]),
        ("memory --help", ["SNAPSHOT", "--html FILE", "--png FILE", "--time", "example:"]),
        ("error --help", ["[NAME]", "tracegraph error callback"]),
        ("--version", [f"tracegraph {tg.__version__} (jax {jax.__version__}, Python 3."]),
    ],
)
def test_help_of_commands_and_the_version(capsys, words, texts):
    with pytest.raises(SystemExit) as caught:
        run_command(words.split())
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert [text for text in texts if text not in out] == []


def test_an_error_is_explained_by_its_name():
    text = run_command(["error", "callback"])
    assert text.startswith("callback\n\nThe function calls Python from the device")
    assert text.index("Fails:") < text.index("Works:") < text.index("Page: ")


def test_all_errors_are_listed():
    lines = run_command(["error"]).splitlines()
    names = [line.split()[0] for line in lines]
    assert {"callback", "control-flow", "internal"} <= set(names)
    assert "callback             The function calls Python from the device" in lines


@pytest.mark.parametrize(
    ("name", "why"), [("calback", "near names are callback"), ("zzz", "no name is near it")]
)
def test_an_unknown_error_is_refused_with_near_names(name, why):
    with pytest.raises(tg.ConfigError, match=f"there is no error `{name}`") as caught:
        run_command(["error", name])
    assert caught.value.why == why


MISTAKES = [
    ([], "the following arguments are required: COMMAND"),
    (["explain"], "the following arguments are required: FILE:FUNCTION"),
    (["explian", "{}:scale"], "argument COMMAND: invalid choice: 'explian'"),
    (["explain", "{}"], "there is no file {}"),
    (["explain", "{}:scale", "--arg", "1"], "unrecognized arguments: --arg 1"),
    (["explain", "{}:scale", "--args"], "argument --args: expected one argument"),
    (["memory"], "the following arguments are required: SNAPSHOT"),
    (["memory", "nowhere.pickle"], "snapshot file nowhere.pickle cannot be read"),
    (["memory", "{}"], "snapshot file {} is not a pickle"),
    (["explain", "nowhere.py:scale"], "there is no file nowhere.py"),
    (["explain", "{}:scales"], "{} has no function `scales`"),
    (["explain", "{}:number"], "{} has no function `number`"),
    (["explain", "{}:scale", "--show", "plans,ir"], "a report has no part plans"),
    (["explain", "{}:scale", "--args", "(1.0,"], "cannot evaluate --args `(1.0,`"),
    (["explain", "{}:scale", "--args", "nothing"], "cannot evaluate --args `nothing`"),
    (["explain", "{}:scale", "--args", "{{2}}, 1"], "argument 0 `x` is a set, not an array"),
]


@pytest.mark.parametrize(("words", "what"), [MISTAKES[2], MISTAKES[-1]])
def test_wrong_input(program, words, what):
    done = run(*[word.format(program) for word in words])
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().split("\n")
    assert lines[0].split(": ", 1)[1].startswith(what.format(program))
    assert [each[:9] for each in lines[1:]] == ["  where: ", "  why:   ", "  fix:   "]


@pytest.mark.parametrize(("words", "what"), MISTAKES)
def test_each_mistake_is_named(program, words, what):
    with pytest.raises(tg.TracegraphError) as caught:
        run_command([word.format(program) for word in words])
    assert caught.value.what.startswith(what.format(program))


ARGUMENTS = [
    ("{2}, 1", "argument 0 `x`"),
    ("(jnp.ones(3), {2})", "argument 1 `factor`"),
    ("(jnp.ones(3),)", "`scale(x, factor)`"),
]


@pytest.mark.parametrize(("expression", "named"), ARGUMENTS)
def test_a_wrong_argument_is_named_at_args(program, expression, named):
    with pytest.raises(tg.CaptureError) as caught:
        run_command(["explain", f"{program}:scale", "--args", expression])
    assert caught.value.where == f"command line, --args `{expression}`, {named}"
    assert str(caught.value).splitlines()[1] == f"  where: {caught.value.where}"


def test_a_wrong_argument_of_the_file_is_named_there(program):
    with pytest.raises(tg.CaptureError) as caught:
        run_command(["explain", f"{program}:table"])
    assert caught.value.where == f"{program}, `sample_args`, `table()`"


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
    paths = {name: str(tmp_path / f"picture.{name}") for name in names}
    options = [f"--{name}={path}" for name, path in paths.items()]
    lines = run_command(["memory", str(snapshot), *options, "--time"]).splitlines()
    assert lines[1:] == [f"wrote {path}" for path in paths.values()]
    assert all(pathlib.Path(path).stat().st_size > 1000 for path in paths.values())
    assert not snapshot.with_suffix(".html").exists()


@pytest.mark.parametrize("name", ["html", "png"])
def test_a_picture_that_cannot_be_written(snapshot, tmp_path, name):
    path = tmp_path / "nowhere" / "picture"
    with pytest.raises(tg.ConfigError) as caught:
        run_command(["memory", str(snapshot), f"--{name}", str(path)])
    assert caught.value.what == f"cannot write {path}: No such file or directory"


def test_a_malicious_snapshot_is_refused(tmp_path):
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps([print]))
    done = run("memory", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"TracegraphError: snapshot file {path} holds `builtins.print`")
