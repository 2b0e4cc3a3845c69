"""Tracing: arguments, order, streams, source lines, no cache."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.jax_programs import assert_same_bits, nested, relu
from tracegraph.ir.graph import Graph, Literal, Op
from tracegraph.ir.interpreter import evaluate_graph, interpret
from tracegraph.ir.verifier import verify_graph
from tracegraph.jax_internals import (
    find_effects,
    find_source_path,
    has_data_effects,
    infer_results,
    is_key_dtype,
)
from tracegraph.tracing.trace import trace_count, trace_function

jax.config.update("jax_platforms", "cpu")


def trace(function: Any, *args: Any, **kwargs: Any) -> Graph:
    graph = trace_function(function, args, kwargs, name="f").graph
    verify_graph(graph)
    return graph


def find_op(graph: Graph, name: str) -> Op:
    return next(op for op in graph.ops if op.name == name)


def test_inputs_are_the_leaves_in_order() -> None:
    args = ({"b": np.ones(2, np.float32), "a": jax.ShapeDtypeStruct((3,), jnp.int32)}, 2.0)
    kwargs = {"z": np.zeros((), bool), "k": jax.random.key(0)}
    traced = trace_function(
        lambda tree, x, *, k, z: {"out": (tree["b"] * x, tree["a"], k, z)}, args, kwargs, name="f"
    )
    wanted = jax.tree.leaves((args, kwargs))
    assert [value.shape for value in traced.graph.inputs] == [np.shape(leaf) for leaf in wanted]
    assert traced.out_tree == jax.tree.structure({"out": (0, 0, 0, 0)})
    assert is_key_dtype(traced.graph.inputs[3].dtype)
    assert not is_key_dtype(traced.graph.inputs[0].dtype)


@pytest.mark.parametrize(
    ("leaf", "dtype", "is_weak"),
    [
        (1, "int32", True),
        (1.0, "float32", True),
        (True, "bool", False),
        (1j, "complex64", True),
        (np.float32(1), "float32", False),
        (np.arange(3), "int32", False),
        (jax.ShapeDtypeStruct((2,), jnp.bfloat16), "bfloat16", False),
        (jax.ShapeDtypeStruct((), jnp.float32, weak_type=True), "float32", True),
        (jnp.zeros((0, 4), jnp.float8_e4m3fn), "float8_e4m3fn", False),
        (jnp.zeros(4, jnp.int4), "int4", False),
    ],
)
def test_leaves_have_the_type_that_jit_gives_them(leaf: Any, dtype: str, is_weak: bool) -> None:
    (value,) = trace(lambda x: x, leaf).inputs
    assert (value.dtype.name, value.aval.weak_type) == (dtype, is_weak)


def test_every_trace_runs_the_python_again() -> None:
    seen = []

    def f(x: Any) -> Any:
        seen.append(x.shape)
        return x + len(seen)

    before = trace_count()
    first, second = trace(f, np.ones(2)), trace(f, np.ones(2))
    assert seen == [(2,), (2,)]
    assert trace_count() == before + 2
    first_literal, second_literal = first.ops[-1].operands[1], second.ops[-1].operands[1]
    assert isinstance(first_literal, Literal)
    assert isinstance(second_literal, Literal)
    assert (first_literal.value, second_literal.value) == (1, 2)


@pytest.mark.parametrize("function", [functools.partial(nested, np.ones((3, 3))), nested, jnp.sin])
def test_callables_of_every_kind_have_a_place(function: Any) -> None:
    arguments = [np.ones((3, 3), np.float32)] * (2 if function is nested else 1)
    assert all(op.origin.source for op in trace(function, *arguments).ops)


def test_jax_errors_pass_through_and_name_the_users_function() -> None:
    def has_branch(value: Any) -> Any:
        return value if value > 0 else -value

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        trace(has_branch, 1.0)
    text = str(caught.value)
    assert "has_branch at " in text
    assert "test_trace.py" in text
    assert "argument value" in text


def test_the_users_exception_passes_through() -> None:
    def broken(x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(broken, 1.0)


def test_source_lines() -> None:
    def f(x: Any) -> Any:
        y = jnp.sin(x)
        return jax.random.normal(jax.random.key(0)) + y

    line = inspect.getsourcelines(f)[1]
    graph = trace(f, 1.0)
    sin = find_op(graph, "sin")
    assert sin.origin.source == f"test_trace.py:{line + 1} in f"
    assert find_source_path(sin) == f"{__file__}:{line + 1}"
    # Ops inside JAX's own jitted functions have the line of the call.
    call = next(op for op in graph.ops if op.params.get("name") == "_normal")
    inner = dict(call.subgraphs)["jaxpr"].ops[0]
    assert inner.origin.source == call.origin.source == f"test_trace.py:{line + 2} in f"


def test_streams_and_scopes() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        with jax.named_scope("tg_stream_5"):
            return jnp.sin(x)

    def loss(x: Any) -> Any:
        with jax.named_scope("tg_stream_3"):
            y = jnp.cos(x)
            z = inner(x)
        with jax.named_scope("tg_stream_7"):
            return jnp.exp(y) * z

    traced = trace_function(jax.grad(loss), (1.0,), {}, name="f", capturing_stream=7)
    streams = {}
    for op in traced.graph.ops:
        streams.setdefault(op.name, set()).add(op.origin.stream)
    assert streams["cos"] == {3}
    assert streams["exp"] == {0}
    # The backward op of `cos` is on the stream of `cos`.
    (negated,) = (op for op in traced.graph.ops if op.name == "neg")
    assert "transpose" in negated.origin.scope or "jvp" in negated.origin.scope
    assert negated.origin.stream == 3
    calls = [op for op in traced.graph.ops if op.name in ("jit", "pjit")]
    inner_ops = [op for call in calls for _, body in call.subgraphs for op in body.ops]
    assert {op.origin.stream for op in inner_ops if op.name == "sin"} == {5}


def test_ops_of_one_line_share_an_origin_unless_scope_or_settings_differ() -> None:
    def f(x: Any) -> Any:
        for scope in ("tg_stream_1", "tg_stream_1", "tg_stream_2"):
            with jax.named_scope(scope):
                x = jnp.sin(x)
        for is_partitionable in (False, True):
            with jax.threefry_partitionable(is_partitionable):
                x = jnp.cos(x)
        return x

    first, same, other, *settings = (op.origin for op in trace(f, 1.0).ops)
    assert first is same
    assert (first.source, first.stream, other.stream) == (other.source, 1, 2)
    one, another = (origin.equation_context.settings for origin in settings)
    assert one != another


def test_a_subgraph_inherits_the_stream() -> None:
    def f(x: Any) -> Any:
        with jax.named_scope("tg_stream_2"):
            return nested(x, x)

    (call,) = trace(f, np.ones((3, 3), np.float32)).ops
    assert {op.origin.stream for op in call.subgraphs[0][1].ops} == {2}


def test_subgraphs_have_names() -> None:
    def f(x: Any) -> Any:
        x = jax.lax.cond(x[0] > 0, relu, jnp.sin, x)
        x = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: c + 1, x)
        return jax.lax.scan(lambda c, y: (c + y, c), x, jnp.ones((4, 2)))

    graph = trace(f, np.ones(2, np.float32))
    assert [name for name, _ in find_op(graph, "cond").subgraphs] == ["branches[0]", "branches[1]"]
    assert [name for name, _ in find_op(graph, "while").subgraphs] == ["cond_jaxpr", "body_jaxpr"]
    assert [name for name, _ in find_op(graph, "scan").subgraphs] == ["jaxpr"]


def test_effects() -> None:
    def f(x: Any) -> Any:
        jax.debug.callback(lambda value: None, x)
        return x + 1

    callback, add = trace(f, 1.0).ops
    assert has_data_effects(callback)
    assert find_effects(callback)
    assert not has_data_effects(add)


def test_types_are_inferred_where_jax_has_a_rule() -> None:
    graph = trace(lambda x: relu(jnp.sin(x)), 1.0)
    sin, call = graph.ops
    results = infer_results(sin)
    assert results is not None
    assert results[0].dtype == np.float32
    assert infer_results(call) is None


def _cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    key = jax.random.key(3)
    return {
        "keys": (lambda k: (jax.random.split(k), jax.random.normal(k, (2,))), (key,)),
        "bf16": (lambda x: x * 2 + 1, (jnp.arange(3, dtype=jnp.bfloat16),)),
        "fp8": (lambda x: x.astype(jnp.float32) * 2, (jnp.ones(3, jnp.float8_e4m3fn),)),
        "int4": (lambda x: (x, x.astype(jnp.int8) + 1), (jnp.arange(3, dtype=jnp.int4),)),
        "bool": (lambda x: ~x, (np.array([True, False]),)),
        "complex": (lambda x: jnp.conj(x) * 1j, (np.array([1 + 2j], np.complex64),)),
        "zero size": (lambda x: (x + 1, x.sum(axis=0)), (np.zeros((0, 2), np.float32),)),
        "scalars": (lambda x, y: (x + y, 3.0, y), (1, 2.0)),
        "no op": (lambda x, y: (y, x), (np.ones(2, np.float32), np.zeros(1, np.float32))),
        "unused results": (lambda x: jnp.linalg.qr(x)[0], (np.eye(2, dtype=np.float32),)),
        "empty scan of keys": (
            lambda k: jax.lax.scan(lambda c, _: (c, c), k, jnp.zeros((0,))),
            (key,),
        ),
        "vectorised loop": (
            jax.vmap(lambda n: jax.lax.while_loop(lambda c: c < n, lambda c: c + 2, 0)),
            (np.array([1, 4, 7], np.int32),),
        ),
        "platform": (
            lambda x: jax.lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: x),
            (1.0,),
        ),
    }


@pytest.mark.parametrize("case", sorted(_cases()))
def test_programs_of_every_dtype(case: str) -> None:
    function, args = _cases()[case]
    graph = trace(function, *args)
    want = jax.tree.leaves(jax.jit(function)(*args))
    again = jax.jit(lambda *arrays: evaluate_graph(graph, *arrays))(*args)
    assert_same_bits(again, want)
    assert [jax.typeof(each) for each in again] == [jax.typeof(each) for each in want]
    assert_same_bits(interpret(graph, *args), want)
