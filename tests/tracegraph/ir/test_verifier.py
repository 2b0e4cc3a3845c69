"""The verifier: each of its checks fires on a planted fault."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tracegraph.ir import verifier
from tracegraph.ir.graph import Graph, Op, Value
from tracegraph.ir.verifier import KnownTypes, verify_graph
from tracegraph.passes.pipeline import run_passes
from tracegraph.runtime.errors import InternalError
from tracegraph.tracing.trace import trace_function


def make_graph() -> Graph:
    def f(x: Any, y: Any) -> Any:
        z = jax.lax.cond(x[0] > 0, lambda a: a * 2, lambda a: a + 1, x)
        z = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: c + y[0], z)
        _, rows = jax.lax.scan(lambda c, a: (c + a, c), z, y)
        return z, rows

    args = (np.ones(2, np.float32), np.ones((3, 2), np.float32))
    return trace_function(f, args, {}, name="f").graph


def replace_op(graph: Graph, name: str, **changes: Any) -> Graph:
    ops = tuple(dataclasses.replace(op, **changes) if op.name == name else op for op in graph.ops)
    return dataclasses.replace(graph, ops=ops)


def replace_subgraph(graph: Graph, name: str, key: str, change: Callable[[Graph], Graph]) -> Graph:
    op = next(op for op in graph.ops if op.name == name)
    subgraphs = tuple((each, change(sub) if each == key else sub) for each, sub in op.subgraphs)
    return replace_op(graph, name, subgraphs=subgraphs)


def drop_input(graph: Graph) -> Graph:
    return dataclasses.replace(graph, inputs=graph.inputs[:-1], ops=(), outputs=graph.inputs[:1])


def double_output(graph: Graph) -> Graph:
    return dataclasses.replace(graph, outputs=graph.outputs * 2)


def swap_type(graph: Graph) -> Graph:
    aval = graph.inputs[0].aval
    return dataclasses.replace(graph, outputs=(Value(0, aval.update(dtype=np.dtype("int32"))),))


def _faults() -> dict[str, tuple[Callable[[Graph], Graph], str]]:
    def op(graph: Graph, name: str) -> Any:
        return next(op for op in graph.ops if op.name == name)

    def with_result(graph: Graph, name: str, value: Value) -> Graph:
        return replace_op(graph, name, results=(value, *op(graph, name).results[1:]))

    def with_aval(graph: Graph, **changes: Any) -> Graph:
        old = op(graph, "cond").results[0]
        return with_result(graph, "cond", Value(99, old.aval.update(**changes)))

    def with_aliases(*aliases: tuple[int, int]) -> Callable[[Graph], Graph]:
        return lambda graph: dataclasses.replace(graph, aliases=aliases)

    def with_subgraph(
        name: str, key: str, change: Callable[[Graph], Graph]
    ) -> Callable[[Graph], Graph]:
        return lambda graph: replace_subgraph(graph, name, key, change)

    return {
        "undefined operand": (
            lambda graph: replace_op(graph, "while", operands=op(graph, "scan").results[:1]),
            "is used before it is defined",
        ),
        "defined later": (
            lambda graph: dataclasses.replace(graph, ops=graph.ops[::-1]),
            "is used before it is defined",
        ),
        "undefined output": (
            lambda graph: dataclasses.replace(graph, outputs=(Value(99, graph.inputs[0].aval),)),
            "%99 is used before it is defined",
        ),
        "defined twice": (
            lambda graph: with_result(graph, "cond", graph.inputs[0]),
            "%0 is defined twice",
        ),
        "same number": (
            lambda graph: with_result(graph, "cond", Value(0, graph.inputs[0].aval)),
            "two values have the number 0",
        ),
        "shape": (lambda graph: with_aval(graph, shape=(5,)), "cond gives f32[2]"),
        "dtype": (lambda graph: with_aval(graph, dtype=np.dtype("int32")), "is i32[2], but cond"),
        "missing result": (lambda graph: replace_op(graph, "scan", results=()), "has 0 results"),
        "branch takes": (with_subgraph("cond", "branches[0]", drop_input), "takes 0 values"),
        "branch gives": (with_subgraph("cond", "branches[1]", double_output), "gives 2 values"),
        "branch type": (with_subgraph("cond", "branches[1]", swap_type), "gives i32[2] as value 0"),
        "loop takes": (with_subgraph("while", "body_jaxpr", drop_input), "body_jaxpr of while"),
        "condition takes": (with_subgraph("while", "cond_jaxpr", drop_input), "cond_jaxpr of"),
        "condition gives": (with_subgraph("while", "cond_jaxpr", double_output), "gives 2 values"),
        "scan takes": (with_subgraph("scan", "jaxpr", drop_input), "jaxpr of scan takes"),
        "scan gives": (with_subgraph("scan", "jaxpr", double_output), "jaxpr of scan gives"),
        "inside a branch": (
            with_subgraph(
                "cond", "branches[0]", lambda sub: dataclasses.replace(sub, ops=sub.ops * 2)
            ),
            "is defined twice",
        ),
        "alias of another shape": (with_aliases((1, 0)), "joins f32[3,2] and f32[2]"),
        "alias of nothing": (with_aliases((0, 7)), "does not exist"),
        "input aliased twice": (with_aliases((1, 1), (0, 1)), "has two aliases"),
        "output aliased twice": (with_aliases((0, 0), (0, 1)), "has two aliases"),
    }


def test_a_right_graph_passes() -> None:
    graph = make_graph()
    verify_graph(graph)
    verify_graph(dataclasses.replace(graph, aliases=((0, 0), (1, 1))))


@pytest.mark.parametrize("fault", sorted(_faults()))
def test_planted_fault(fault: str) -> None:
    plant, message = _faults()[fault]
    with pytest.raises(InternalError) as caught:
        verify_graph(plant(make_graph()))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("internal error in tracegraph: ")
    assert message in lines[0]
    assert lines[1].startswith("  where: graph `")
    assert lines[2].startswith("  why:   ")
    assert "please report this text" in lines[3]


def test_a_call_without_a_type_rule_is_checked_against_its_subgraph() -> None:
    relu = jax.custom_jvp(lambda x: x * 2)
    relu.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    graph = trace_function(relu, (np.ones(2, np.float32),), {}, name="f").graph
    verify_graph(graph)
    wrong = Value(7, graph.inputs[0].aval.update(shape=(3,)))
    with pytest.raises(InternalError, match="custom_jvp_call gives"):
        verify_graph(replace_op(graph, "custom_jvp_call", results=(wrong,)))


def test_known_types_are_not_asked_for_again_but_new_ones_are() -> None:
    graph = make_graph()
    known: KnownTypes = set()
    verify_graph(graph, known)
    count = len(known)
    verify_graph(graph, known)
    assert len(known) == count > 0
    with pytest.raises(InternalError, match="cond gives"):
        verify_graph(_faults()["shape"][0](graph), known)


def count_questions(monkeypatch: pytest.MonkeyPatch) -> list[Op]:
    asked: list[Op] = []
    infer = verifier.infer_results
    monkeypatch.setattr(verifier, "infer_results", lambda op: asked.append(op) or infer(op))
    return asked


def test_equal_ops_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones(2, np.float32)
    asked = count_questions(monkeypatch)
    verify_graph(trace_function(lambda x: jnp.sin(jnp.sin(jnp.sin(x))), (x,), {}, name="f").graph)
    assert [op.name for op in asked] == ["sin"]
    asked.clear()
    verify_graph(trace_function(lambda x: jnp.sin(x[:1]) + jnp.sin(x), (x,), {}, name="f").graph)
    assert [op.name for op in asked].count("sin") == 2


def test_parameters_that_only_python_takes_for_equal_are_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = trace_function(lambda x: lax.cumsum(x), (np.ones(2, np.float32),), {}, name="f").graph
    ((known, numbered),) = [(op, {**op.params, "reverse": 0}) for op in graph.ops]
    asked = count_questions(monkeypatch)
    types: KnownTypes = set()
    verify_graph(graph, types)
    assert known.params == numbered
    verify_graph(replace_op(graph, "cumsum", params=numbered), types)
    assert len(asked) == 2


def test_an_op_with_a_parameter_that_cannot_be_compared_is_checked() -> None:
    graph = trace_function(jnp.sin, (np.ones(2, np.float32),), {}, name="f").graph
    params = dict(graph.ops[0].params) | {"accuracy": np.ones(2)}
    with pytest.raises(TypeError):
        hash(params["accuracy"])
    types: KnownTypes = set()
    verify_graph(replace_op(graph, "sin", params=params), types)
    wrong = Value(7, graph.inputs[0].aval.update(shape=(3,)))
    with pytest.raises(InternalError, match="sin gives"):
        verify_graph(replace_op(graph, "sin", params=params, results=(wrong,)), types)


@dataclasses.dataclass(frozen=True)
class BreakGraph:
    """A pass that breaks what it is given."""

    name: str = "break-graph"

    def apply(self, graph: Graph) -> Graph:
        return dataclasses.replace(graph, ops=graph.ops[1:])


def test_the_pipeline_verifies_after_each_pass() -> None:
    with pytest.raises(InternalError, match="used before it is defined"):
        run_passes(make_graph(), (BreakGraph(),))


def test_the_body_of_a_shard_map_is_verified_under_its_axes() -> None:
    mesh = jax.make_mesh((1,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec("i")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def body(x: Any) -> Any:
        return x * jax.lax.psum(x, "i") + 1

    graph = trace_function(lambda x: body(x) * 2, (jnp.ones(2),), {}, name="f").graph
    verify_graph(graph)

    def retype(body: Graph) -> Graph:
        op = next(op for op in body.ops if op.name.startswith("psum"))
        (value,) = op.results
        wrong = Value(value.number, value.aval.update(shape=(3,)))
        return replace_op(body, op.name, results=(wrong,))

    with pytest.raises(InternalError, match=r"is f32\[3\], but psum\w* gives f32\[2\]"):
        verify_graph(replace_subgraph(graph, "shard_map", "jaxpr", retype))
    with pytest.raises(NameError, match="unbound axis name"):
        jax.lax.axis_size("i")
