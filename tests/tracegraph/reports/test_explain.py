"""`explain`: the report of a capture, and of a function that cannot be captured."""

import copy as copying
import dataclasses
import pickle
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.gpu_programs import copy, fill, kernel
from tests.fakes.regions_as_kernels import capture_for_gpu
from tracegraph.capturing.pipeline import CapturePipeline
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.workspaces import Workspaces
from tracegraph.reports import summary
from tracegraph.reports.explain_gpu import count_nodes, list_turns
from tracegraph.reports.report import PARTS, Report, read_parts
from tracegraph.reports.summary import MAX_COLUMNS, MAX_LINES
from tracegraph.runtime.definition.graph import Stage
from tracegraph.runtime.definition.graph_nodes import Body, ConditionalNode, Construct, Turn
from tracegraph.tracing import checked_graph

X = jnp.ones((2, 3))
TITLES = [
    "arguments",
    "cuts",
    "nodes",
    "pool",
    "largest buffers",
    "per call",
    "capture",
    "verification",
    "more",
]


def step(state, x, kind="a"):
    w = state["w"] + x
    return {"w": w}, w.sum(), kind and x


def list_titles(report):
    return [each.split(":")[0] for each in report.split("\n")[1:] if not each.startswith(" ")]


def test_a_report_has_all_sections_and_captures_nothing():
    captured = tg.capture(step, donate_argnums=0, static_argnames="kind")
    state = {"w": jnp.zeros((2, 3))}
    report = captured.explain(state, X, kind="b")
    assert report.startswith("`step` can be captured (mode='whole', outputs='fresh')\n")
    assert list_titles(report) == TITLES
    for text in (
        "arguments: 3, 2 leaves, 48 bytes\n  state: dict, 1 leaf, 24 bytes, donated\n",
        "  x: f32[2,3], 24 bytes\n  static argument kind: 'b'\n",
        "cuts: none, all is one graph\nnodes: 1 graph: 1 call; 0 edges\n",
        "  inputs: 1 buffer, 24 bytes\n  state: 1 buffer, 24 bytes\n  results: 1 buffer, 4 b",
        "  24  f32[2,3]  state['w']  argument, donated\n",
        f"  tests/tracegraph/reports/test_explain.py:{step.__code__.co_firstlineno + 2} in step\n",
        "bytes, known before the first run",
        "donated: copied in once, resident from then on",
        "capture: at the first call\nverification: at the first call: ",
    ):
        assert text in report, report
    assert "region0: captured, stream 0" in report.parts["regions"]
    assert report.parts["signature"].splitlines()[-1] == "static argument kind: 'b'"
    assert captured.cache_info() == (0, 0, 64, 0)
    assert captured.pool_bytes == 0
    assert not state["w"].is_deleted()


@pytest.mark.parametrize("target", ["host", "gpu"])
def test_a_captured_graph_is_reported_without_being_compiled_again(
    monkeypatch: pytest.MonkeyPatch, target: str
):
    if target == "gpu":
        capture_for_gpu(monkeypatch)
    captured = tg.capture(step, donate_argnums=0)
    first = captured.explain({"w": X + 1}, X)
    captured({"w": X + 1}, X)
    counts = {"compile": 0, "trace": 0}

    def count(owner: Any, name: str, kind: str) -> None:
        plain = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(Compiler, "compile", "compile")
    count(checked_graph, "trace_jaxpr", "trace")
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    report = captured.explain({"w": shape}, shape)
    assert counts == {"compile": 0, "trace": 0}
    assert report.startswith("`step` is captured (mode='whole'")
    assert re.search(r"\ncapture: [\d.]+ s \(trace [\d.]+, check .*, verify [\d.]+\)\n", report)
    assert re.search(r"\nverification: 3 of 3 results equal .* bit for bit\n", report)
    assert {**report.parts, "nodes": ""} == {**first.parts, "nodes": ""}
    # What has not been captured is counted, so the counters can count.
    tg.capture(step).explain({"w": X}, X)
    assert counts["compile"] == 1
    assert counts["trace"] == 2


def test_the_pool_bytes_are_those_of_the_first_run():
    captured = tg.capture(step, donate_argnums=0)
    report = captured.explain({"w": jnp.zeros((2, 3))}, X)
    known = re.search(r"\npool: ([\d,]+) bytes, known before the first run", report)
    assert known is not None
    arena_bytes = int(known[1].replace(",", ""))
    assert arena_bytes == captured.lower({"w": jnp.zeros((2, 3))}, X).pool_bytes
    captured({"w": jnp.zeros((2, 3))}, X)
    assert arena_bytes <= captured.pool_bytes < arena_bytes + 512


def test_the_roles_of_the_pool_are_all_of_its_buffers():
    table, side = jnp.ones(2**18), tg.Stream()

    def run(state, x):
        y = x + table[:5]
        side.wait_stream(tg.current_stream())
        with tg.stream(side):
            z = y * 2
        tg.current_stream().wait_stream(side)
        return state + z, z

    captured = tg.capture(run, donate_argnums=0)
    arguments = jnp.ones(5), jnp.ones(5)
    report = captured.explain(*arguments)
    roles = dict(re.findall(r"\n  (\w+): \d+ buffers?, ([\d,]+) bytes", report))
    buffers = captured.lower(*arguments).lowered.program.buffers
    assert set(roles) == {"inputs", "state", "constants", "results", "temporaries"}
    found = sum(int(size.replace(",", "")) for size in roles.values())
    assert found == sum(buffer.nbytes for buffer in buffers)


def test_types_are_enough_for_a_report():
    captured = tg.capture(step)
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert captured.explain({"w": shape}, shape) == captured.explain({"w": X}, X)
    assert "%0: f32[2,3]" in str(captured.trace({"w": shape}, shape))


def test_violations_are_reported():
    def function(x):
        y = jax.pure_callback(np.sin, jax.typeof(x), x)
        return jax.lax.cond(y.sum() > 0, lambda v: v, lambda v: -v, y)

    report = tg.capture(function, control_flow="refuse").explain(X)
    assert report.startswith(
        "`function` cannot be captured (mode='whole', outputs='fresh', control_flow='refuse')"
    )
    assert list_titles(report) == ["arguments", "violations", "more"]
    first = function.__code__.co_firstlineno + 1
    place = "tests/tracegraph/reports/test_explain.py"
    assert f"{place}:{first}, {place}:{first + 1}" in re.sub(r" in [\w<>.]+", "", report)
    assert report.parts["violations"].startswith("`function` breaks 2 capture constraints")
    assert report.show("all").parts.keys() == {"signature", "violations"}
    assert report.ir == report.plan == report.nodes == ""
    partial = tg.capture(function, mode="partial", control_flow="refuse").explain(X)
    assert partial.startswith("`function` can be captured (mode='partial'")
    assert partial.count("eager because") == 2
    assert "calls back into Python" in partial


def test_many_violations_are_cut_to_a_page(monkeypatch: pytest.MonkeyPatch):
    what = "\n".join(f"violation {number}" for number in range(100))
    error = tg.CaptureError(what, where="a.py:3 in f", why="why", fix="fix", anchor="callback")

    def refuse(self: CapturePipeline) -> None:
        raise error

    monkeypatch.setattr(CapturePipeline, "run_to_lowered", refuse)
    report = tg.capture(lambda x: x).explain(X)
    assert len(report.splitlines()) == MAX_LINES
    left_out = int(re.findall(r"\n  and (\d+) more lines\n", report)[0])
    shown = report.split("\nviolations\n")[1].splitlines()[:-2]
    assert shown[-1] == f"  violation {len(shown) - 1}"
    assert left_out + len(shown) == len(report.parts["violations"].splitlines()) == 103


def test_trace_errors_are_reported():
    report = tg.capture(lambda x: x.item(), name="read").explain(X)
    assert "`read` cannot be captured" in report
    assert "reads the value of an array on the host with `.item()`" in report


def test_an_exception_of_the_user_passes():
    def function(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tg.capture(function).explain(X)


def test_wrong_arguments_are_refused():
    with pytest.raises(tg.CaptureError, match="argument 1 `x` is a set"):
        tg.capture(step).explain({"w": X}, {"text"})


def test_without_arguments_and_without_ops():
    report = tg.capture(lambda: 1.0).explain()
    assert "arguments: 0, 0 leaves, 0 bytes\n" in report
    assert report.parts["signature"] == "no arguments"
    report = tg.capture(lambda x: x).explain(X)
    assert "nodes: 0 graphs: no nodes; 0 edges\n" in report
    assert report.parts["regions"] == "none: every result is an argument or a constant"


def test_many_leaves_are_one_line():
    report = tg.capture(lambda xs, none, *rest: sum(xs)).explain([1.0] * 50, None, X, X, X)
    assert "arguments: 5, 53 leaves, 272 bytes\n  xs: list, 50 leaves, 200 bytes\n" in report
    assert "  NoneType without leaves\n  rest[0]: f32[2,3], 24 bytes\n" in report
    assert "  and 2 more arguments\n" in report
    assert len(report.parts["signature"].splitlines()) == 53


def test_the_longest_report_fits_a_page(monkeypatch: pytest.MonkeyPatch):
    """Every section has more to say than it may."""
    device = capture_for_gpu(monkeypatch, float_atomics=["a" * 200])
    long = "a_very_long_name_" * 8
    table = jnp.ones((600, 600))

    def function(state, a, b, c, d, e, kind):
        for other in (a, b, c, d, e):
            state = {name: value + other + table.sum() for name, value in state.items()}
            state = jax.tree.map(jnp.cumsum, state)
            state = jax.tree.map(lambda v: jnp.sort(v) + jnp.linalg.norm(v), state)
            state[long] = jax.pure_callback(np.sin, jax.typeof(state[long]), state[long])
            state[long] = jax.lax.cond(other > 0, jnp.sin, jnp.cos, state[long])
            jax.debug.callback(print, state[long])
        return state, a

    captured: Any = tg.capture(
        function,
        mode="partial",
        control_flow="refuse",
        donate_argnums=0,
        static_argnums=6,
        verify=False,
    )
    state = {long: jnp.ones(8), f"{long}2": jnp.ones(8)}
    for kind in ("a", "b" * 500):
        captured(jax.tree.map(jnp.copy, state), *map(jnp.float32, range(5)), kind)
    report = captured.explain(state, *map(jnp.float32, range(5)), kind)
    lines = report.splitlines()
    assert 30 < len(lines) <= MAX_LINES, report
    assert all(len(line) <= MAX_COLUMNS for line in lines), report
    assert device.takes_kernels
    largest = lines[lines.index("largest buffers") + 1 :][:5]
    assert len({line.split()[2] for line in largest}) == 5


def test_parts_follow_the_summary_on_request():
    captured = tg.capture(step)
    plain = captured.explain({"w": X}, X)
    report = captured.explain({"w": X}, X, show="nodes, ir,plan")
    assert report == plain.show("ir,plan,nodes") == plain.show("ir").show("plan,ir,nodes")
    assert report.summary == plain.summary == plain
    summary, *parts = report.split("\n\n")
    assert summary == plain
    assert [part.splitlines()[0] for part in parts] == ["ir", "plan", "nodes"]
    texts = [re.sub(r"^  ", "", part.partition("\n")[2], flags=re.MULTILINE) for part in parts]
    assert texts == [report.ir, report.plan, report.nodes]
    assert report.ir == str(captured.trace({"w": X}, X)).rstrip("\n")
    assert read_parts("all") == PARTS
    assert [name for name in PARTS if f"\n\n{name}\n" in plain.show("all")] == list(plain.parts)


@pytest.mark.parametrize("show", ["graph", "ir,graph", X])
def test_an_unknown_part_is_refused(show: Any):
    with pytest.raises(tg.ConfigError, match="a report has no part") as caught:
        tg.capture(step).explain({"w": X}, X, show=show)
    assert (
        "violations, breaks, gradients, ir, passes, regions, plan, nodes, notes" in caught.value.why
    )


def test_the_functions_own_show_is_the_functions():
    named = tg.capture(lambda x, show: x + show)
    report = named.explain(X, show=X)
    assert "  show: f32[2,3], 24 bytes\n" in report
    assert "\n\nir\n" in report.show("ir")
    anything = tg.capture(lambda **rest: rest["show"] * 2)
    assert "  show: f32[2,3], 24 bytes\n" in anything.explain(show=X)
    with pytest.raises(tg.CaptureError, match="`show` is a set"):
        anything.explain(show={1})
    assert "  static leaf show: 'ir'\n" in tg.capture(lambda **rest: rest).explain(show="ir")
    positional = tg.capture(lambda show, /: show * 2)
    assert "\n\nir\n" in positional.explain(X, show="ir")


@pytest.mark.parametrize("again", [copying.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_a_report_can_be_kept(again):
    report = tg.capture(step).explain({"w": X}, X)
    kept = again(report)
    assert type(kept) is Report
    assert kept == report == repr(report)
    assert kept.show("all") == report.show("all")


def test_workspaces_are_named(monkeypatch: pytest.MonkeyPatch):
    found = Workspaces(2, 100, 200)
    monkeypatch.setattr(summary, "measure_workspaces", lambda definition: found)
    assert f"\n  among them {found}\n" in tg.capture(lambda x: x).explain(X)


def test_large_constants_are_notes():
    table = jnp.ones((600, 600))
    report = tg.capture(lambda x: x + table.sum()).explain(jnp.ones(3))
    assert re.search(r"\nnotes: 1; .*closes over.* \(.*test_explain\.py:\d+", report)
    assert "fix:" in report.parts["notes"]
    assert re.search(r"\n  1,440,000  f32\[600,600\]  %c0 +closed over\n", report)


def test_nodes_are_counted_by_cudas_names_for_them():
    steps = (fill("a", "s"), fill("b", "t"), copy("c", "s", "t"), kernel("d", "t", "u"))
    stage = Stage(tuple(step.node for step in steps), ((0, 2), (2, 3)))
    definition = types.SimpleNamespace(stages=(stage,))
    lowered: Any = types.SimpleNamespace(definition=definition, takes_kernels=True)
    wanted = "1 graph: 1 kernel, 1 memcpy, 2 memsets; 2 edges, 0 of them programmatic"
    assert count_nodes(lowered) == wanted


def test_loops_are_listed_with_their_iterations_per_turn():
    setter: Any = kernel("set", "t", "").node
    turns = [Turn(1), Turn(4, is_guarded=True), Turn(4, is_guarded=True), Turn(25)]
    inner, *loops = [
        ConditionalNode(f"loop{index}", Construct.WHILE, (Body((), ()),), setter, turn)
        for index, turn in enumerate(turns)
    ]
    outer = dataclasses.replace(loops[0], bodies=(Body((inner,), ()),))
    stage = Stage((outer, *loops[1:]), ())
    lowered: Any = types.SimpleNamespace(definition=types.SimpleNamespace(stages=(stage,)))
    (line,) = list_turns(lowered)
    assert line == (
        "loops: 2 with 4 guarded iterations per turn, 1 with 1 iteration per turn, "
        "1 with 25 iterations per turn"
    )
    lowered.definition.stages = (Stage((setter,), ()),)
    assert list_turns(lowered) == []
