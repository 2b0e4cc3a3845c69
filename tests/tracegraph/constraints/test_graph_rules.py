"""Callbacks and control flow: each rule fires, and its legal neighbours pass."""

import copy
import dataclasses
import functools
import pickle
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

from tracegraph.constraints import (
    Violation,
    check_graph,
    find_large_constants,
    find_uncapturable,
    make_capture_error,
)
from tracegraph.constraints.callbacks import name_callback
from tracegraph.ir.graph import Graph, Op, Origin
from tracegraph.passes.pipeline import DEFAULT_PASSES, run_passes
from tracegraph.runtime.errors import CaptureError
from tracegraph.tracing.trace import trace_function

X = np.arange(4, dtype=np.float32)
MATRIX = np.eye(4, dtype=np.float32) + 0.1
KEY = jax.random.key(0)
# The rules of control_flow="refuse".
check_strictly = functools.partial(check_graph, takes_control_flow=False)
find_strictly = functools.partial(find_uncapturable, takes_control_flow=False)


def make_graph(function, *args):
    graph = trace_function(function, args, {}, name="step").graph
    return run_passes(graph, DEFAULT_PASSES)[0]


def to_text(violation):
    return re.sub(r"[\w/]*/(\w+\.py):\d+", r"\1:N", str(violation))


def log_loss(x):
    pass


class Logger:
    def __call__(self, x):
        pass


def test_callback_names_the_function_the_line_and_the_op():
    def step(x):
        return jax.pure_callback(np.sin, x, x * 2)

    (violation,) = check_graph(make_graph(step, X))
    assert to_text(violation) == (
        "`step` calls back into Python while it is being captured\n"
        "  where: test_graph_rules.py:N in step, %2 = pure_callback %1\n"
        "  why:   a CUDA graph replays device work only; the callback `sin` would never run again\n"
        '  fix:   move the callback outside `capture`, or use mode="partial"'
        "          python -m tracegraph error callback"
    )
    assert violation.op is not None
    assert violation.op.name == "pure_callback"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: jax.debug.callback(log_loss, x), "log_loss"),
        (lambda x: jax.debug.callback(functools.partial(log_loss), x), "log_loss"),
        (lambda x: io_callback(log_loss, None, x), "log_loss"),
        (lambda x: io_callback(Logger(), None, x), "Logger"),
        (lambda x: jax.pure_callback(lambda v: v, x, x), "<lambda>"),
    ],
)
def test_callback_of_each_kind_is_named(call, name):
    (violation,) = check_graph(make_graph(lambda x: (call(x), x), X))
    assert violation.rule == "callback"
    assert f"the callback `{name}` would never run again" in violation.why


def test_callback_without_a_function_of_the_users_has_no_name():
    assert name_callback(None) is None
    assert name_callback(jnp.sin) is None


def test_host_transfer_is_a_callback():
    op = Op((), types.SimpleNamespace(name="outfeed"), (), {}, (), Origin("a.py:3 in step"))
    (violation,) = check_graph(Graph("step", (), (), (op,), ()))
    assert to_text(violation) == (
        "`step` calls back into Python while it is being captured\n"
        "  where: a.py:3 in step, outfeed\n"
        "  why:   a CUDA graph replays device work only; the host's part would never run again\n"
        '  fix:   move the callback outside `capture`, or use mode="partial"'
        "          python -m tracegraph error callback"
    )


def test_print_of_a_traced_value_has_its_own_words():
    def step(x):
        jax.debug.print("loss {}", x)
        return x

    (violation,) = check_graph(make_graph(step, X))
    assert to_text(violation) == (
        "`step` prints a traced value while it is being captured\n"
        "  where: test_graph_rules.py:N in step, debug_print %0\n"
        "  why:   printing 'loss {}' is work of the host; a CUDA graph replays device work only\n"
        '  fix:   return the value and print it outside `capture`, or use mode="partial"'
        "          python -m tracegraph error callback"
    )


def test_check_on_the_host_has_its_own_words():
    def step(x):
        checkify.check(x[0] > 0, "x must be positive")
        return x

    (violation,) = check_graph(make_graph(step, X))
    assert re.fullmatch(
        r"`step` checks a traced value on the host while it is being captured\n"
        r"  where: test_graph_rules\.py:N in step, check .*\n"
        r"  why:   a check raises on the host; a CUDA graph replays device work only\n"
        r"  fix:   return the error as a value with jax\.experimental\.checkify\.checkify, and "
        r"throw it outside          python -m tracegraph error callback",
        to_text(violation),
    )


def test_callback_in_a_subgraph_is_found():
    def step(x):
        def body(carry, item):
            jax.debug.callback(log_loss, item)
            return carry + item, None

        return lax.scan(body, 0.0, x)[0]

    graph = make_graph(step, X)
    (violation,) = check_graph(graph)
    assert "debug_callback" in violation.where
    assert [violation.rule for violation in find_uncapturable(graph).values()] == ["callback"]


def test_branch_on_data():
    def step(x):
        return lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)

    (violation,) = check_strictly(make_graph(step, X))
    assert re.fullmatch(
        r"`step` takes a branch that depends on data\n"
        r"  where: test_graph_rules\.py:N in step, %\d+ = cond %\d+, %0\n"
        r"  why:   control_flow=\"refuse\" launches the same kernels at every replay; the host "
        r"can't choose between 2 branches\n"
        r"  fix:   compute both and select with jnp\.where, leave control_flow=\"refuse\" out, or "
        r"use mode=\"partial\""
        r"          python -m tracegraph error control-flow",
        to_text(violation),
    )


def test_loop_whose_length_depends_on_data():
    def step(x, n):
        return lax.fori_loop(0, n, lambda i, c: c * 2, x)

    (violation,) = check_strictly(make_graph(step, X, 3))
    assert to_text(violation) == (
        "`step` runs a loop whose length depends on data\n"
        "  where: test_graph_rules.py:N in step, %2, %3, %4 = while 0:i32[], %1, %0\n"
        '  why:   control_flow="refuse" launches the same kernels at every replay; the number of '
        "rounds must be known when it is captured\n"
        "  fix:   loop a fixed number of times with jax.lax.scan or jax.lax.fori_loop(0, 10, ...), "
        'leave control_flow="refuse" out, or use mode="partial"          '
        "python -m tracegraph error control-flow"
    )


def test_loop_until_convergence_inside_one_primitive():
    (violation,) = check_strictly(make_graph(lambda x: lax.igamma(x, x), X))
    assert to_text(violation) == (
        "`step` computes `igamma`, which loops until its data converges\n"
        "  where: test_graph_rules.py:N in <lambda>, %1 = igamma %0, %0\n"
        '  why:   control_flow="refuse" launches the same kernels at every replay; the number of '
        "rounds must be known when it is captured\n"
        '  fix:   move `igamma` outside `capture`, leave control_flow="refuse" out, or use '
        'mode="partial"          python -m tracegraph error control-flow'
    )


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x), (1, X)),
        (
            lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + c[1], c[1]), (0.0, x)),
            (1.0,),
        ),
        (lambda x: lax.scan(lambda c, y: (lax.cond(y > 0, lambda: c, lambda: y), y), 0.0, x), (X,)),
        (
            lambda x: lax.scan(
                lambda c, _: (lax.cond(c > 0, lambda: 1.0, lambda: c), 0), x, None, 3
            ),
            (1.0,),
        ),
        (lambda x: lax.while_loop(lambda c: c < x, lambda c: c * 2, 1.0), (9.0,)),
        (jax.checkpoint(lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x)), (1.0,)),
        (jax.grad(lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x)), (1.0,)),
        (lambda k: jax.random.poisson(k, 2.0), (KEY,)),
        (lambda k: jax.random.gamma(k, 2.0), (KEY,)),
        (lambda a: jax.scipy.sparse.linalg.cg(lambda v: a @ v, X)[0], (MATRIX,)),
        (lambda x: lax.cond(jax.pure_callback(np.sin, x[0], 1.0) > 0, jnp.sin, jnp.cos, x), (X,)),
    ],
)
def test_paths_that_depend_on_data_are_found(function, args):
    graph = make_graph(function, *args)
    assert "control-flow" in {violation.rule for violation in check_strictly(graph)}
    assert "control-flow" in {violation.rule for violation in find_strictly(graph).values()}
    # Legal unless it is refused; the callback that one of them has is not.
    allowed = {violation.rule for violation in check_graph(graph)}
    assert allowed == {violation.rule for violation in find_uncapturable(graph).values()}
    assert allowed <= {"callback"}


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x: jnp.where(x > 0, jnp.sin(x), x), (X,)),
        (lambda x: lax.scan(lambda c, y: (c + y, c * y), 0.0, x), (X,)),
        (lambda x: lax.fori_loop(0, 3, lambda i, c: c * x, x), (X,)),
        (lambda x: lax.fori_loop(0, jnp.int32(3), lambda i, c: c * x, x), (X,)),
        (
            lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x)),
            (X,),
        ),
        (
            lambda x: lax.fori_loop(
                0, 4, lambda i, c: lax.cond(i % 2 == 0, jnp.sin, jnp.cos, c), x
            ),
            (X,),
        ),
        (lambda x: lax.cond(jnp.arange(3)[1] > 0, jnp.sin, jnp.cos, x), (X,)),
        (lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), (X,)),
        (
            lambda x: lax.platform_dependent(x, tpu=lambda x: lax.igamma(x, x), default=jnp.cos),
            (X,),
        ),
        (jax.grad(lambda x: lax.fori_loop(0, 3, lambda i, c: c * x, 1.0)), (2.0,)),
        (
            jax.grad(
                jax.checkpoint(lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * x, 1.0))
            ),
            (2.0,),
        ),
        (jax.nn.relu, (X,)),
        (lambda x: x * lax.igamma(1.0, 2.0), (X,)),
        (jnp.linalg.inv, (MATRIX,)),
        (jnp.linalg.svd, (MATRIX,)),
        (jnp.linalg.eigh, (MATRIX,)),
        (jnp.linalg.det, (MATRIX,)),
        (lambda k: jax.random.normal(k, (3,)), (KEY,)),
        (lambda k: jax.random.permutation(k, 10), (KEY,)),
        (lambda k: jax.random.truncated_normal(k, -1.0, 1.0, (3,)), (KEY,)),
        (lambda k: jax.random.categorical(k, X), (KEY,)),
        (lambda x: jnp.searchsorted(x, 0.3), (X,)),
    ],
)
def test_legal_neighbours_are_not_flagged(function, args):
    graph = make_graph(function, *args)
    assert check_strictly(graph) == ()
    assert find_strictly(graph) == {}


def break_three_rules(x):
    jax.debug.print("loss {}", x)
    y = lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
    jax.debug.callback(log_loss, y)
    return y


def print_value(x):
    jax.debug.print("x is {}", x)
    return x


@pytest.mark.parametrize("function", [break_three_rules, print_value], ids=["three", "one"])
def test_a_pickled_error_keeps_all_but_the_ops(function):
    graph = make_graph(function, X)
    error = make_capture_error(check_strictly(graph), graph_name="step", graph=graph)
    assert error.violations[0].op is not None
    for taken in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert (str(taken), taken.__notes__) == (str(error), error.__notes__)
        kept = [dataclasses.replace(violation, op=None) for violation in error.violations]
        assert list(taken.violations) == kept
    assert copy.copy(error).violations == error.violations


def test_one_error_reports_all_violations_in_source_order():
    graph = make_graph(break_three_rules, X)
    violations = check_strictly(graph)
    assert [violation.rule for violation in violations] == ["callback", "control-flow", "callback"]
    error = make_capture_error(violations, graph_name="step", graph=graph)
    assert type(error) is CaptureError
    assert error.violations == violations
    first, *rest = to_text(error).split("\n\n")
    line = "test_graph_rules.py:N in break_three_rules"
    assert first == (
        "`step` breaks 3 capture constraints\n"
        f"  where: {line}, {line}, {line}\n"
        "  why:   each of them would make a replay differ from a call; the causes follow in "
        "source order\n"
        "  fix:   fix them one by one, each as described below          "
        "python -m tracegraph error callback"
    )
    assert rest == [to_text(violation) for violation in violations]


def test_one_violation_is_the_error_with_the_ops_around_it():
    graph = make_graph(lambda x: jax.pure_callback(np.sin, x, x * 2) + 1, X)
    (violation,) = check_strictly(graph)
    error = make_capture_error([violation], graph_name="step", graph=graph)
    assert str(error) == str(violation)
    assert error.anchor == "callback"
    assert error.__notes__ == [
        "In the graph of `step`:\n"
        "  %1 = mul %0, 2.0:f32[]\n"
        "> %2 = pure_callback %1\n"
        "  %3 = add %2, 1.0:f32[]"
    ]
    assert make_capture_error([violation], graph_name="step").__notes__ == [
        "> %2 = pure_callback %1"
    ]


def test_note_shows_the_op_that_holds_the_violation():
    graph = make_graph(
        lambda x: lax.scan(lambda c, y: (c + jnp.sin(y), lax.igamma(y, y)), 0.0, x), X
    )
    (violation,) = check_strictly(graph)
    (note,) = make_capture_error([violation], graph_name="step", graph=graph).__notes__
    assert re.search(r"^> %1, %2 = scan", note, re.MULTILINE)


def test_no_violation_makes_no_error():
    with pytest.raises(ValueError, match="no violation to report"):
        make_capture_error([], graph_name="step")


def test_find_uncapturable_gives_the_index_of_each_top_level_op():
    graph = make_graph(break_three_rules, X)
    found = find_strictly(graph)
    assert [graph.ops[index].name for index in found] == ["debug_print", "cond", "debug_callback"]
    assert all(isinstance(violation, Violation) for violation in found.values())


def test_same_line_is_reported_once():
    def step(x):
        for _ in range(3):
            x = jax.pure_callback(np.sin, x, x)
        return x

    graph = make_graph(step, X)
    assert len(check_strictly(graph)) == 1
    assert len(find_strictly(graph)) == 3


def test_large_constant_is_noted_and_small_ones_are_not():
    table = jnp.arange(1024 * 512, dtype=jnp.float32)
    small = jnp.arange(4, dtype=jnp.float32)

    def step(x):
        return x + table.sum() + small.sum()

    graph = make_graph(step, np.float32(1))
    (note,) = find_large_constants(graph)
    assert re.fullmatch(
        r"`step` closes over an array of 2\.0 MiB \(`c\d`, f32\[524288\]\)\n"
        r"  where: test_graph_rules\.py:N in step, %\d+ = reduce_sum %\d+\n"
        r"  why:   the graph keeps its own copy, so replays do not see a new array assigned "
        r"to the variable; `jax\.jit` folds it into its program, so the last bits of "
        r"results may differ\n"
        r"  fix:   pass it as an argument, donated if it changes"
        r"          python -m tracegraph error large-constant",
        to_text(note),
    )
    assert len(find_large_constants(graph, limit_bytes=16)) == 2
    assert check_strictly(graph) == ()


def test_large_constant_that_is_a_result():
    table = jnp.arange(1024 * 512, dtype=jnp.float32)
    (note,) = find_large_constants(make_graph(lambda: table))
    assert note.where == "the results of `step`"
