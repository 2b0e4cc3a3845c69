"""`mode="partial"` with host reads: Python between the graphs of a function's parts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.oracles.tree_equality import assert_same
from tracegraph.breaks import node as nodes
from tracegraph.breaks.branching_graph import BranchingGraph


def make_vector(value, size=3):
    return jnp.arange(size, dtype=jnp.float32) + value


def find_tree(captured: Any) -> Any:
    """Returns what holds the parts of the signature that was called last."""
    assert isinstance(captured._latest, BranchingGraph)
    return captured._latest


def branch(x):
    y = x * 2
    if y.sum() > 0:
        return {"y": y + 1, "sign": jnp.ones(())}
    return {"y": y - 1, "sign": -jnp.ones(())}


def repeat(x):
    while (x * x).sum() > 1:
        x = x * 0.5
    return x


def use_item(x):
    return x + x.sum().item()


def use_int(x):
    return [x * step for step in range(int(x[0]))]


def use_bool_of_a_float(x):
    return x + 1 if x.max() else x - 1


def use_numpy(x):
    table = np.asarray(x > 0)
    return x + float(table.sum()), x[: int(table.sum())]


def use_index(x):
    return jnp.arange(4)[x.astype(int).sum()] + (10, 20, 30)[x.astype(int)[0] % 3]


def use_an_argument(x):
    return x * 2 if x[0] else x


def use_several(x):
    h = x + 1
    if h[0] > 1:
        h = h * 2
    if h[1] > 3:
        return h, x - 1
    return h - 5, x


def use_a_gradient(x):
    def loss(w):
        y = (w * x).sum()
        return y * 2 if y > 0 else y * 3

    return jax.value_and_grad(loss)(x + 1)


def return_nothing(x):
    return None if x[0] > 0 else (x, ())


PROGRAMS = [
    branch,
    repeat,
    use_item,
    use_int,
    use_bool_of_a_float,
    use_numpy,
    use_an_argument,
    use_index,
    use_several,
    use_a_gradient,
    return_nothing,
]


@pytest.mark.parametrize("function", PROGRAMS)
def test_results_are_those_of_python(function):
    captured: Any = tg.capture(function, mode="partial")
    for value in (1.0, -3.0, 1.0, 2.0, -3.0, 2.0):
        x = make_vector(value)
        assert_same(captured(x), function(x))
    assert find_tree(captured).calls == 6
    assert captured.cache_info().captures == 1


@pytest.mark.parametrize("function", [branch, use_item, use_numpy])
def test_whole_mode_refuses(function):
    with pytest.raises(tg.CaptureError) as caught:
        tg.capture(function)(make_vector(1.0))  # pyright: ignore[reportArgumentType]
    assert {each.rule for each in caught.value.violations} <= {"python-branch", "host-read"}


@pytest.fixture(scope="module")
def counted():
    runs = []

    def step(x):
        runs.append(None)
        return branch(x)

    captured = tg.capture(step, mode="partial")
    for value in (1.0, -9.0):
        captured(make_vector(value))
    return captured, runs


def test_known_branches_run_no_python(counted):
    captured, runs = counted
    before = len(runs)
    for value in (2.0, -8.0, 3.0):
        x = make_vector(value)
        assert_same(captured(x), branch(x))
    assert len(runs) == before


def test_each_straight_part_is_one_graph(counted):
    captured, _ = counted
    tree = find_tree(captured)
    found = tree.list_nodes()
    assert tree.part_count == len(found) == 3
    assert [depth for depth, _ in found] == [0, 1, 1]
    root = found[0][1]
    assert set(root.branches) == {True, False}
    assert root.read.kind == "bool"
    assert root.read.nbytes == 1
    assert "test_breaks.py" in root.read.where


def test_a_wrong_branch_is_seen(counted):
    """The planted fault: with exchanged branches the results are others."""
    captured, _ = counted
    root = find_tree(captured).root
    root.branches[True], root.branches[False] = root.branches[False], root.branches[True]
    try:
        x = make_vector(1.0)
        assert not (captured(x)["y"] == branch(x)["y"]).all()
    finally:
        root.branches[True], root.branches[False] = root.branches[False], root.branches[True]


def test_a_value_that_is_not_known_runs_python_once_more_only(counted):
    captured, runs = counted
    before = len(runs)
    captured(make_vector(5.0))
    captured(make_vector(5.0, size=4))
    # Another signature: the trace that meets the read, the run, and the one that checks it.
    assert len(runs) == before + 3


def use_float(x):
    return x * float(x.sum())


def test_floats_are_captured_when_they_come_back():
    captured = tg.capture(use_float, mode="partial")
    x = make_vector(1.0)
    assert_same(captured(x), use_float(x))
    assert find_tree(captured).part_count == 1
    assert_same(captured(x), use_float(x))
    assert find_tree(captured).part_count == 2


def test_the_branches_of_a_read_are_bounded():
    captured = tg.capture(use_float, mode="partial")
    for value in range(nodes.MAX_BRANCHES + 2):
        x = make_vector(value)
        for _ in range(2):
            assert_same(captured(x), use_float(x))
    tree = find_tree(captured)
    assert tree.part_count == nodes.MAX_BRANCHES + 1
    assert tree.root.is_full
    assert tree.root.uncaptured == nodes.MAX_BRANCHES + 4


def test_the_parts_of_a_function_are_bounded(monkeypatch):
    monkeypatch.setattr("tracegraph.breaks.branching_graph.MAX_PARTS", 4)
    captured = tg.capture(repeat, mode="partial")
    for value in (900.0, 1.0, 900.0):
        x = make_vector(value)
        assert_same(captured(x), repeat(x))
    assert find_tree(captured).part_count <= 5


def test_explain_lists_each_break_with_its_cost(counted):
    captured, _ = counted
    report = captured.explain(make_vector(1.0))
    assert "is captured in parts" in report.splitlines()[0]
    assert "cuts: 3 graphs, 1 break" in report
    (row,) = report.parts["breaks"].splitlines()
    assert row.startswith("bool() at ")
    assert "test_breaks.py" in row
    assert "1 byte fetched; taken: True " in row
    assert ", False " in row
    assert "jax.jit cannot run the function" in report
    assert row in report.show("breaks").removeprefix(report.summary)


def test_explain_before_the_first_call():
    report = tg.capture(branch, mode="partial").explain(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert "can be captured in parts" in report.splitlines()[0]
    assert "test_breaks.py" in report


def test_a_function_of_several_graphs_is_not_shown_as_one(counted):
    captured, _ = counted
    for method in (captured.lower, captured.trace, captured.get_graph_data):
        with pytest.raises(tg.CaptureError, match="decides in Python"):
            method(make_vector(1.0))


def test_timings_and_pool_are_those_of_all_parts(counted):
    captured, _ = counted
    assert captured.timings()["compile"] > 0
    assert captured.pool_bytes > 0
