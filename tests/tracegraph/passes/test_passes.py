"""Each pass: what it changes, and what it must not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as extend_core

from tests.fakes.jax_programs import TABLE, assert_same_bits, nested, twice_nested
from tracegraph.ir.graph import Graph, Literal, Op, Origin
from tracegraph.ir.interpreter import evaluate_graph, interpret
from tracegraph.ir.printer import print_graph
from tracegraph.passes.common_subexpressions import CommonSubexpressions
from tracegraph.passes.dead_code import DeadCode
from tracegraph.passes.inline_calls import InlineCalls
from tracegraph.passes.lift_constants import LiftConstants
from tracegraph.passes.pipeline import DEFAULT_PASSES, Pass, run_passes
from tracegraph.passes.resolve_donation import ResolveDonation
from tracegraph.tracing.trace import trace_function

jax.config.update("jax_platforms", "cpu")
SQUARE = np.arange(9, dtype=np.float32).reshape(3, 3)


def trace(function: Any, *args: Any) -> Graph:
    return trace_function(function, args, {}, name="f").graph


def run(graph: Graph, *passes: Pass) -> Graph:
    return run_passes(graph, passes)[0]


def name_ops(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


def test_default_passes_are_the_visible_tuple() -> None:
    names = [each.name for each in DEFAULT_PASSES]
    assert names == ["inline-calls", "lift-constants", "dead-code", "common-subexpressions"]


def test_a_pass_leaves_its_graph_as_it_was() -> None:
    graph = trace(lambda x: (twice_nested(x, x), x + 1, x + 1), SQUARE)
    before = print_graph(graph)
    run_passes(graph, DEFAULT_PASSES)
    assert print_graph(graph) == before


class TestInlineCalls:
    def test_calls_are_inlined_recursively_with_their_constants(self) -> None:
        graph = trace(twice_nested, SQUARE, SQUARE)
        inlined = run(graph, InlineCalls())
        assert not {"jit", "pjit"} & set(name_ops(inlined))
        assert len(inlined.constants) > 2
        assert [value.number for op in inlined.ops for value in op.results] == list(
            range(2 + len(inlined.constants), 2 + len(inlined.constants) + len(inlined.ops))
        )
        assert_same_bits(interpret(inlined, SQUARE, SQUARE), interpret(graph, SQUARE, SQUARE))

    def test_control_flow_keeps_its_calls(self) -> None:
        graph = trace(lambda x: jax.lax.cond(x[0, 0] > 0, nested, jnp.add, x, x), SQUARE)
        inlined = run(graph, InlineCalls())
        (cond,) = (op for op in inlined.ops if op.name == "cond")
        assert any({"jit", "pjit"} & set(name_ops(sub)) for _, sub in cond.subgraphs)

    def test_a_call_that_passes_values_through(self) -> None:
        swap = jax.jit(lambda x, y: (y, x, 3.0, x))
        graph = run(trace(lambda x, y: swap(x + 1, y), 1.0, 2), InlineCalls())
        assert name_ops(graph) == ["add"]
        assert [float(each) for each in interpret(graph, 1.0, 2)] == [2.0, 2.0, 3.0, 2.0]

    def test_scopes_nest_and_lines_stay(self) -> None:
        def outer(x: Any) -> Any:
            with jax.named_scope("outside"):
                return inner(x)

        @jax.jit
        def inner(x: Any) -> Any:
            with jax.named_scope("inside"):
                return jnp.sin(x)

        (sin,) = run(trace(outer, 1.0), InlineCalls()).ops
        assert sin.origin.scope == "outside/inside"
        assert sin.origin.source.endswith(" in inner")

    def test_the_lowered_text_names_the_users_scope_and_line(self) -> None:
        @jax.jit
        def inner(x: Any) -> Any:
            with jax.named_scope("inside"):
                return jnp.sin(x)

        def outer(x: Any) -> Any:
            with jax.named_scope("outside"):
                return inner(x)

        graph = run(trace(outer, 1.0), InlineCalls())
        lowered = jax.jit(lambda x: evaluate_graph(graph, x)).lower(1.0)
        text = lowered.as_text(debug_info=True)
        assert "outside/inside/sin" in text
        assert "test_passes.py" in text

    def test_the_calls_stream_is_inherited(self) -> None:
        def f(x: Any) -> Any:
            with jax.named_scope("tg_stream_4"):
                return nested(x, x)

        graph = trace(f, SQUARE)
        (call,) = graph.ops
        ((name, callee),) = call.subgraphs
        bare = [
            dataclasses.replace(op, origin=dataclasses.replace(op.origin, stream=0))
            for op in callee.ops
        ]
        callee = dataclasses.replace(callee, ops=tuple(bare))
        call = dataclasses.replace(call, subgraphs=((name, callee),))
        inlined = run(dataclasses.replace(graph, ops=(call,)), InlineCalls())
        assert {op.origin.stream for op in inlined.ops} == {4}

    def test_a_call_with_a_placement_stays(self) -> None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        placed = jax.jit(jnp.sin, out_shardings=device)
        graph = run(trace(lambda x: nested(placed(x), x), SQUARE), InlineCalls())
        assert [name for name in name_ops(graph) if name in ("jit", "pjit")] != []
        assert "sin" not in name_ops(graph)
        wanted = jax.jit(lambda x: nested(placed(x), x))(SQUARE)
        got = jax.jit(lambda x: evaluate_graph(graph, x))(SQUARE)
        assert_same_bits(got, [wanted])


class TestLiftConstants:
    def test_one_array_is_one_constant(self) -> None:
        graph = trace(lambda x: twice_nested(x, x) + TABLE, SQUARE)
        lifted = run(graph, InlineCalls(), LiftConstants())
        assert [each.name for each in lifted.constants] == ["c0", "c1"]
        assert_same_bits(interpret(lifted, SQUARE), interpret(graph, SQUARE))

    def test_equal_arrays_are_two_constants(self) -> None:
        first, second = jnp.ones(3), jnp.ones(3)
        graph = run(trace(lambda x: (x + first) * second * first, 1.0), LiftConstants())
        assert graph.constants[0].array is first
        assert graph.constants[1].array is second

    def test_views_of_one_array_differ(self) -> None:
        graph = run(trace(lambda x: x @ TABLE @ TABLE.T, SQUARE), LiftConstants())
        assert len(graph.constants) == 2

    def test_order_is_that_of_first_use(self) -> None:
        first, second = np.ones(3, np.float32), np.zeros(3, np.float32)

        def f(x: Any) -> Any:
            late = jnp.asarray(first)
            return (x + second) * late

        graph = run(trace(f, 1.0), LiftConstants())
        assert_same_bits([graph.constants[0].array], [second])

    def test_an_array_in_an_op_becomes_a_constant_and_a_scalar_stays(self) -> None:
        graph = trace(lambda x: x * 2.0, SQUARE)
        (op,) = graph.ops
        array = Literal(TABLE, op.operands[0].aval)
        planted = dataclasses.replace(op, operands=(op.operands[0], array))
        lifted = run(dataclasses.replace(graph, ops=(planted,)), LiftConstants())
        assert [each.array is TABLE for each in lifted.constants] == [True]
        assert run(graph, LiftConstants()).constants == ()

    def test_key_constants(self) -> None:
        key = jax.random.key(5)
        graph = run(trace(lambda x: jax.random.normal(key) + x, 1.0), *DEFAULT_PASSES)
        assert len(graph.constants) == 1
        assert_same_bits(interpret(graph, 1.0), [jax.jit(jax.random.normal)(key) + 1.0])


stream_mark = extend_core.Primitive("tg_record")
stream_mark.multiple_results = True
stream_mark.def_abstract_eval(lambda *, stream, event: [])


class TestDeadCode:
    def test_unneeded_ops_and_constants_go(self) -> None:
        def f(x: Any) -> Any:
            unused = jnp.sin(x + TABLE)
            return x * 2, jnp.zeros_like(unused)

        graph = run(trace(f, SQUARE), DeadCode())
        assert name_ops(graph) == ["mul", "broadcast_in_dim"]
        assert graph.constants == ()

    def test_constant_names_have_no_holes(self) -> None:
        def f(x: Any) -> Any:
            jnp.sin(x + TABLE)
            return x + TABLE.T

        (constant,) = run(trace(f, SQUARE), LiftConstants(), DeadCode()).constants
        assert constant.name == "c0"

    def test_effects_stay(self) -> None:
        def f(x: Any) -> Any:
            jax.debug.callback(lambda value: None, jnp.cos(x))
            jnp.sin(x)
            return x

        assert name_ops(run(trace(f, 1.0), DeadCode())) == ["cos", "debug_callback"]

    def test_references_stay(self) -> None:
        def f(x: Any) -> Any:
            ref = jax.new_ref(x)
            ref[...] = x * 2
            return ref[...]

        graph = trace(f, SQUARE)
        assert name_ops(run(graph, *DEFAULT_PASSES)) == name_ops(graph)
        assert_same_bits(interpret(run(graph, *DEFAULT_PASSES), SQUARE), [SQUARE * 2])

    def test_stream_marks_stay(self) -> None:
        def f(x: Any) -> Any:
            stream_mark.bind(stream=1, event=1)
            stream_mark.bind(stream=1, event=1)
            return x

        graph = run(trace(f, 1.0), *DEFAULT_PASSES)
        assert print_graph(graph, source=False).count("  tg_record[stream=1, event=1]\n") == 2


def make_pairs() -> dict[str, Any]:
    """Returns programs of two ops that look alike and must both stay."""

    def on_two_streams(x: Any) -> Any:
        with jax.named_scope("tg_stream_1"):
            y = jnp.sin(x)
        return jnp.sin(x), y

    def callbacks(x: Any) -> Any:
        return tuple(jax.pure_callback(np.sin, x, x) for _ in range(2))

    def step(carry: Any, _: Any) -> Any:
        return jnp.sin(carry), None

    def loops(x: Any) -> Any:
        return tuple(jax.lax.scan(step, x, None, length=2)[0] for _ in range(2))

    def reads(x: Any) -> Any:
        ref = jax.new_ref(x)
        first = ref[...]
        ref[...] = x + 1
        return first, ref[...]

    return {
        "signed zero": lambda x: (x + 0.0, x + -0.0),
        "other operands": lambda x: (x - 1.0, 1.0 - x),
        "other params": lambda x: (x.astype(jnp.int32), x.astype(jnp.int16)),
        "streams": on_two_streams,
        "barriers": lambda x: tuple(jax.lax.optimization_barrier(x) for _ in range(2)),
        "callbacks": callbacks,
        "subgraphs": loops,
        "stateful random numbers": lambda x: tuple(
            jax.lax.rng_uniform(0.0, x, (2,)) for _ in range(2)
        ),
        "references": reads,
    }


class TestCommonSubexpressions:
    def test_repeated_ops_are_merged_in_turn(self) -> None:
        graph = trace(lambda x: (jnp.sin(x * 2.0), jnp.sin(x * 2.0), x * 2.0), SQUARE)
        merged = run(graph, CommonSubexpressions())
        assert name_ops(merged) == ["mul", "sin"]
        assert merged.outputs[0] is merged.outputs[1]
        assert_same_bits(interpret(merged, SQUARE), interpret(graph, SQUARE))

    def test_ops_on_the_same_values_are_told_apart_by_the_rest(self) -> None:
        graph = trace(lambda x: (x * 2, x * 3, jnp.cos(x), x * 3, x * 2, jnp.cos(x), x * 4), SQUARE)
        merged = run(graph, CommonSubexpressions())
        assert name_ops(merged) == ["mul", "mul", "cos", "mul"]
        assert_same_bits(interpret(merged, SQUARE), interpret(graph, SQUARE))

    def test_equal_nan_literals_are_merged(self) -> None:
        graph = run(trace(lambda x: (x + np.nan, x + np.nan), 1.0), CommonSubexpressions())
        assert name_ops(graph) == ["add"]

    @pytest.mark.parametrize("pair", sorted(make_pairs()))
    def test_ops_that_only_look_alike_stay(self, pair: str) -> None:
        graph = trace(make_pairs()[pair], 1.5)
        assert name_ops(run(graph, CommonSubexpressions())) == name_ops(graph)

    @pytest.mark.parametrize(
        ("left", "right"),
        [(1, True), (1, 1.0), (0.0, -0.0), (np.float32(1), np.float64(1)), (float("nan"), 0.0)],
    )
    @pytest.mark.parametrize("place", ["operand", "param", "nested param", "array param"])
    def test_literals_are_told_apart_by_type_and_bytes(
        self, place: str, left: Any, right: Any
    ) -> None:
        graph = trace(jnp.sin, 1.0)
        ops = [self.plant(graph.ops[0], place, value, n) for n, value in enumerate((left, right))]
        same = [self.plant(graph.ops[0], place, left, n) for n in range(2)]
        assert len(CommonSubexpressions().apply(self.put(graph, ops)).ops) == 2
        assert len(CommonSubexpressions().apply(self.put(graph, same)).ops) == 1

    @staticmethod
    def plant(op: Op, place: str, value: Any, number: int) -> Op:
        result = dataclasses.replace(op.results[0], number=10 + number)
        if place == "operand":
            literal = Literal(value, op.operands[0].aval)
            return dataclasses.replace(op, operands=(literal,), results=(result,))
        wrapped = {
            "param": value,
            "nested param": [(value,)],
            "array param": {"x": np.asarray(value)},
        }[place]
        return dataclasses.replace(op, params={"planted": wrapped}, results=(result,))

    @staticmethod
    def put(graph: Graph, ops: list[Op]) -> Graph:
        outputs = tuple(op.results[0] for op in ops)
        return dataclasses.replace(graph, ops=tuple(ops), outputs=outputs)

    def test_what_cannot_be_compared_stays(self) -> None:
        graph = trace(jnp.sin, 1.0)
        ops = [self.plant(graph.ops[0], "param", bytearray(b"x"), number) for number in range(2)]
        assert len(CommonSubexpressions().apply(self.put(graph, ops)).ops) == 2

    def test_settings_are_told_apart(self) -> None:
        def f(x: Any) -> Any:
            with jax.threefry_partitionable(False):
                first = jax.random.bits(x, (3,))
            with jax.threefry_partitionable(True):
                return first, jax.random.bits(x, (3,))

        key = jax.random.key(0)
        graph = run(trace(f, key), *DEFAULT_PASSES)
        assert name_ops(graph).count("random_bits") == 2
        got = jax.jit(lambda k: evaluate_graph(graph, k))(key)
        assert_same_bits(got, jax.jit(f)(key))


class TestResolveDonation:
    def alias(
        self, function: Any, args: tuple[Any, ...], donated: set[int], *preferred: tuple[int, int]
    ) -> tuple[tuple[int, int], ...]:
        graph = trace(function, *args)
        return run(graph, ResolveDonation(frozenset(donated), preferred)).aliases

    def test_in_order_by_shape_and_dtype(self) -> None:
        args = (np.ones(2, np.float32), np.ones(3, np.float32), np.ones(3, np.float32))
        aliases = self.alias(lambda a, b, c: (c + 1, a + 1, b + 1), args, {0, 1, 2})
        assert aliases == ((0, 1), (1, 0), (2, 2))

    def test_preferred_pairs_come_first(self) -> None:
        args = (np.ones(3, np.float32), np.ones(3, np.float32))
        assert self.alias(lambda a, b: (a + 1, b + 1), args, {0, 1}, (0, 1)) == ((0, 1), (1, 0))

    def test_each_input_and_output_once(self) -> None:
        args = (np.ones(3, np.float32), np.ones(3, np.float32))
        pairs = ((0, 1), (1, 1), (0, 0))
        assert self.alias(lambda a, b: (a + 1, b + 1), args, {0, 1}, *pairs) == ((0, 1), (1, 0))
        assert self.alias(lambda a, b: (a + 1, a + 2, b), args, {0}) == ((0, 0),)

    @pytest.mark.parametrize("pair", [(0, 0), (0, 2), (5, 0), (0, 9)])
    def test_a_preferred_pair_that_does_not_fit_is_left_out(self, pair: tuple[int, int]) -> None:
        args = (np.ones(3, np.float32), np.ones(3, np.float32), np.ones(3, np.int32))
        assert self.alias(lambda a, b, c: (b + 1,), args, {1, 2, 9}, pair) == ((0, 1),)

    def test_other_dtype_and_nothing_donated(self) -> None:
        args = (np.ones(3, np.float32),)
        assert self.alias(lambda a: a.astype(jnp.int32), args, {0}) == ()
        assert self.alias(lambda a: a + 1, args, set()) == ()

    def test_keys(self) -> None:
        keys = (jax.random.key(0), np.zeros((), np.uint32))
        assert self.alias(lambda k, n: jax.random.split(k)[1], keys, {0, 1}) == ((0, 0),)

    def test_the_report_says_how_many(self) -> None:
        graph = trace(lambda a: (a + 1, a * 2), 1.0)
        _, (report,) = run_passes(graph, (ResolveDonation(frozenset({0})),))
        assert str(report) == "resolve-donation: 2 ops, 1 of 2 outputs in place"


def test_ops_without_a_context_bind() -> None:
    graph = trace(lambda x: jnp.sin(x) + 1, 1.0)
    bare = [dataclasses.replace(op, origin=Origin("nowhere")) for op in graph.ops]
    graph = run(dataclasses.replace(graph, ops=tuple(bare)), *DEFAULT_PASSES)
    assert_same_bits(evaluate_graph(graph, jnp.float32(2)), interpret(graph, 2.0))
