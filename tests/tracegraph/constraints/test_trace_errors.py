"""JAX's errors while tracing become ours, at the user's own line."""

import builtins
import functools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.constraints import (
    check_graph,
    locate_function,
    translate_trace_error,
    watch_print,
)
from tracegraph.runtime.errors import CaptureError
from tracegraph.tracing.trace import trace_function

X = np.arange(4, dtype=np.float32)


def translate(function, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011  (every kind is translated or passed on)
        trace_function(function, args, {}, name="step")
    # Inside tracegraph the traceback begins in our own code, not in a test.
    whole = caught.value.__traceback__
    assert whole is not None
    error = caught.value.with_traceback(whole.tb_next)
    return translate_trace_error(error, function=function, name="step")


def to_text(error):
    assert error is not None
    return re.sub(r"[\w/]*/(\w+\.py):\d+", r"\1:N", str(error))


def place(name):
    return f"  where: test_trace_errors.py:N in {name}\n"


def test_branch_in_python():
    def step(x):
        if x[0] > 0:
            return x
        return -x

    assert to_text(translate(step, X)) == (
        "`step` decides in Python on the value of an array (`if`, `while`, `and`, `not`)\n"
        + place("step")
        + "  why:   the function is traced without values, so Python cannot take a branch on "
        "one\n"
        '  fix:   select with jnp.where, branch with jax.lax.cond, or let mode="partial" decide '
        "between graphs (outside of jit and loops)"
        "          python -m tracegraph error python-branch"
    )


@pytest.mark.parametrize(
    ("read", "reader"),
    [
        (lambda x: float(x), "`float()`"),
        (lambda x: int(x), "`int()`"),
        (lambda x: x.item(), "`.item()`"),
        (lambda x: x.tolist(), "`.tolist()`"),
        (lambda x: np.asarray(x), "`np.asarray` or another NumPy function"),
        (lambda x: np.sin(x), "`np.asarray` or another NumPy function"),
        (lambda x: f"{x:.3f}", "a format string"),
        (lambda x: "%.3f" % x, "`float()`"),  # noqa: UP031
        (lambda x: {x: 1}, "a look-up in a dict or set"),
        (lambda x: jnp.ones((2, 2)).sum(axis=x.astype(int)), "Python"),
    ],
)
def test_read_on_the_host(read, reader):
    assert to_text(translate(read, np.float32(1))) == (
        f"`step` reads the value of an array on the host with {reader}\n"
        + place("<lambda>")
        + "  why:   the function is traced without values; a CUDA graph never comes back to "
        "the host\n"
        "  fix:   return the array and read it outside `capture`, use jnp instead of np or math, "
        "or pass a Python number as a static argument (static_argnums)"
        "          python -m tracegraph error host-read"
    )


def test_number_of_python_rounds():
    def step(n):
        return [jnp.float32(i) for i in range(n)]

    text = to_text(translate(step, 3))
    assert "`range()`, an index or another use as a Python int\n" in text
    assert text.endswith("python -m tracegraph error host-read")


def test_boolean_mask():
    def step(x):
        return x[x > 0]

    assert to_text(translate(step, X)) == (
        "`step` indexes with a boolean mask\n"
        + place("step")
        + "  why:   a CUDA graph replays fixed addresses and sizes; the size of this result is "
        "known only when the values are\n"
        "  fix:   keep the size and select with jnp.where, give size= (jnp.nonzero, jnp.unique), "
        "or pass the number as a static argument (static_argnums)"
        "          python -m tracegraph error dynamic-shape"
    )


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (lambda x: jnp.nonzero(x), X),
        (lambda x: jnp.unique(x), X),
        (lambda x: jnp.repeat(jnp.arange(3), x), np.ones(3, int)),
        (lambda n: jnp.zeros(n), 3),
        (lambda n: jnp.arange(n), 3),
        (lambda n: jnp.arange(4)[:n], 3),
        (lambda n: jnp.ones((2, 2)).reshape(n), 4),
        (lambda n: jax.random.normal(jax.random.key(0), (n,)), 3),
    ],
)
def test_shape_that_depends_on_data(function, argument):
    text = to_text(translate(function, argument))
    assert text.startswith(
        "`step` needs a shape that depends on data\n" + place("<lambda>") + "  why:   a CUDA graph "
    )
    assert text.endswith("python -m tracegraph error dynamic-shape")


def test_static_sizes_are_fine():
    graph = trace_function(lambda x: jnp.nonzero(x, size=4), (X,), {}, name="step").graph
    assert len(graph.outputs) == 1


def test_leaked_tracer():
    def step(x):
        raise jax.errors.UnexpectedTracerError("found in a finished trace")

    assert to_text(translate(step, X)) == (
        "`step` uses an array that was left over from another trace\n"
        + place("step")
        + "  why:   what is computed while tracing has no value once the trace has ended\n"
        "  fix:   return it from the function that computes it, instead of keeping it in a "
        "global, a list or an attribute          python -m tracegraph error leaked-tracer"
    )


def test_leaked_tracer_that_jax_takes_for_an_argument():
    kept = []
    jax.make_jaxpr(lambda x: kept.append(x))(X)

    def step(x):
        return x + jnp.sin(kept[0])

    graph = trace_function(step, (X,), {}, name="step").graph
    (violation,) = check_graph(graph, argument_count=1)
    assert to_text(violation) == (
        "`step` uses an array that was left over from another trace\n"
        "  where: test_trace_errors.py:N in step, %2 = sin %0\n"
        "  why:   what is computed while tracing has no value once the trace has ended\n"
        "  fix:   return it from the function that computes it, instead of keeping it in a "
        "global, a list or an attribute          python -m tracegraph error leaked-tracer"
    )
    result = trace_function(lambda x: kept[0], (X,), {}, name="step").graph
    (violation,) = check_graph(result, argument_count=1)
    assert violation.where == "the results of `step`"
    fine = trace_function(jnp.sin, (X,), {}, name="step").graph
    assert check_graph(fine, argument_count=1) == ()


@pytest.mark.parametrize(
    ("result", "named"),
    [("text", "str (`result`)"), ({"a": [1.0, "text"]}, "str (`result['a'][1]`)")],
)
def test_result_that_is_not_an_array(result, named):
    def step(x):
        return result

    assert to_text(translate(step, X)) == (
        f"`step` returns a {named}, not an array\n"
        + place("step")
        + "  why:   a replay returns arrays of the graph's pool; it runs no Python that could "
        "make others\n"
        "  fix:   return arrays, numbers or None in tuples, lists and dicts, and make the rest "
        "outside          python -m tracegraph error non-array-output"
    )


def test_argument_that_is_not_an_array():
    def step(x):
        return jax.jit(lambda word: x)("text")

    assert to_text(translate(step, X)) == (
        "`step` passes a str as the array `word`\n"
        + place("step")
        + "  why:   only arrays and numbers can be traced; anything else is a static argument\n"
        "  fix:   pass it as a static argument: static_argnums=... or static_argnames=..."
        "          python -m tracegraph error non-array-argument"
    )


@pytest.mark.parametrize("error", [KeyError("a"), TypeError("mine"), IndexError("mine")])
def test_exception_of_the_users_own_is_not_translated(error):
    def step(x):
        raise error

    assert translate(step, X) is None


def test_line_is_that_of_the_function_called_inside():
    def inner(x):
        return float(x)

    def step(x):
        return jax.vmap(inner)(x)

    assert place("inner") in to_text(translate(step, X))


def test_functions_are_located():
    class Model:
        def __call__(self, x):
            return x

    line = r"tests/tracegraph/constraints/test_trace_errors\.py:\d+ in "
    assert re.fullmatch(line + "to_text", locate_function(to_text))
    assert re.fullmatch(line + "to_text", locate_function(functools.partial(to_text, 1)))
    assert re.fullmatch(line + "to_text", locate_function(jax.jit(to_text)))
    assert re.fullmatch(line + r"Model\.__call__", locate_function(Model()))
    assert re.fullmatch(line + r"Model\.__call__", locate_function(Model().__call__))
    assert locate_function(len) == "len"


def test_print_of_a_tracer_raises_while_watched(capsys):
    def step(x):
        print("shape", x.shape)
        print("loss", x)
        return x

    with pytest.raises(CaptureError) as caught, watch_print("step"):
        trace_function(step, (X,), {}, name="step")
    assert to_text(caught.value) == (
        "`step` prints a traced value with `print`\n"
        + place("step")
        + "  why:   the function is traced without values; a CUDA graph never comes back to "
        "the host\n"
        "  fix:   return the value and print it outside `capture`; `print(x.shape)` is fine"
        "          python -m tracegraph error host-read"
    )
    assert capsys.readouterr().out == "shape (4,)\n"


def test_print_is_plain_again_afterwards_and_in_other_threads(capsys):
    plain = builtins.print

    def trace_elsewhere():
        trace_function(lambda x: print(type(x).__name__, x) or x, (X,), {}, name="other")

    with watch_print("step"), watch_print("inner"):
        thread = threading.Thread(target=trace_elsewhere)
        thread.start()
        thread.join()
        assert builtins.print is not plain
    assert builtins.print is plain
    assert "Tracer" in capsys.readouterr().out


def test_a_loop_whose_carry_changes():
    def step(x):
        return jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: jnp.append(c, c), x)

    assert to_text(translate(step, X)) == (
        "`step` has a `while_loop` whose body changes what the loop carries\n"
        + place("step")
        + "  why:   the input carry c has type float32[4] but the corresponding output carry "
        "component has type float32[8], so the shapes do not match\n"
        "  fix:   return from the body what it was given, with the same shapes, dtypes and "
        "structure: cast with .astype, or begin with what the body returns"
        "          python -m tracegraph error loop-carry"
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda c, _: ((c[0].astype(int), jnp.append(c[1], 1.0)), None), "dtypes do not match; "),
        (lambda c, _: ((c[0], (c[1], c[1])), None), "Python types differ"),
        (lambda c, _: (c[0], None), "Python types differ"),
    ],
)
def test_each_part_of_a_carry_that_changes_is_named(body, words):
    def step(x):
        return jax.lax.scan(body, (x, x), None, length=2)

    error = translate(step, X)
    assert error is not None
    assert error.anchor == "loop-carry"
    assert "`scan`" in error.what
    assert words in error.why
    assert len(str(error).splitlines()) == 4


def test_other_errors_of_a_body_are_the_users():
    assert translate(lambda x: jax.lax.scan(lambda c, _: c, x, None, length=2), X) is None
