"""The printer: golden texts, and what they must not depend on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from tests.fakes.jax_programs import TABLE, nested, relu
from tracegraph.ir.graph import Graph
from tracegraph.ir.printer import print_dtype, print_graph, print_op, print_type
from tracegraph.passes.pipeline import DEFAULT_PASSES, PassReport, run_passes
from tracegraph.passes.resolve_donation import ResolveDonation
from tracegraph.tracing.trace import trace_function

jax.config.update("jax_platforms", "cpu")
ROW = jax.ShapeDtypeStruct((3,), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((3, 3), jnp.float32)


@jax.custom_vjp
def clip_gradient(x: Any) -> Any:
    return x * 1.0


clip_gradient.defvjp(
    lambda x: (clip_gradient(x), None), lambda _, cotangent: (jnp.clip(cotangent, -1, 1),)
)


def train(params: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        # Not tanh: its derivative is another op in each version of JAX.
        hidden = jnp.sin(x @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


PARAMS = {
    "b1": jax.ShapeDtypeStruct((8,), jnp.float32),
    "w1": jax.ShapeDtypeStruct((4, 8), jnp.float32),
    "w2": jax.ShapeDtypeStruct((8, 1), jnp.float32),
}
BATCH = (jax.ShapeDtypeStruct((16, 4), jnp.float32), jax.ShapeDtypeStruct((16, 1), jnp.float32))


def control_flow(x: Any, n: Any) -> Any:
    x = jax.lax.cond(n > 0, lambda v: v * 2, lambda v: v, x)
    x, _ = jax.lax.while_loop(lambda c: c[1] < n, lambda c: (jnp.sin(c[0]), c[1] + 1), (x, 0))
    return jax.lax.scan(lambda c, a: (c + a * n, c), x, jnp.ones((5, 3)), reverse=True)


def streams(x: Any) -> Any:
    with jax.named_scope("tg_stream_2"):
        y = jnp.sin(x)
    return y + jnp.cos(x)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "elementwise": (lambda x, y: jnp.sin(x) * y + 2.0, (ROW, ROW)),
    "mlp_with_grad": (train, (PARAMS, *BATCH)),
    "control_flow": (control_flow, (ROW, jax.ShapeDtypeStruct((), jnp.int32))),
    "custom_derivatives": (lambda x: clip_gradient(relu(x)), (ROW,)),
    "keys": (lambda key: jax.random.bits(jax.random.split(key)[0], (2,)), (jax.random.key(0),)),
    "constants": (lambda x: nested(x, TABLE + x) @ np.eye(3, dtype=np.float32), (SQUARE,)),
    "streams": (streams, (ROW,)),
}


def trace(name: str) -> Graph:
    function, args = PROGRAMS[name]
    return trace_function(function, args, {}, name=name).graph


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_golden_text(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"graph_{name}", print_graph(trace(name), source=False))


def test_golden_text_after_passes(golden: Callable[[str, str], None]) -> None:
    donate = ResolveDonation(frozenset({0, 1, 2}))
    graph, reports = run_passes(trace("mlp_with_grad"), (*DEFAULT_PASSES, donate))
    text = "".join(f"{report}\n" for report in reports)
    golden("graph_donation_after_passes", text + print_graph(graph, source=False))


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_text_is_stable_and_free_of_addresses(name: str) -> None:
    text = print_graph(trace(name))
    assert text == print_graph(trace(name))
    assert "0x" not in text


def test_source_lines_end_the_lines() -> None:
    line = inspect.getsourcelines(streams)[1] + 2
    text = print_graph(trace("streams"))
    assert f"  %1: f32[3] = sin %0  stream=2  # test_printer.py:{line} in streams\n" in text


def test_one_op_as_error_messages_show_it() -> None:
    def f(x: Any) -> Any:
        jax.debug.callback(print, x)
        return jax.pure_callback(np.sin, x, x * 2.0)

    texts = [print_op(op) for op in trace_function(f, (ROW,), {}, name="f").graph.ops]
    assert texts == ["debug_callback %0", "%1 = mul %0, 2.0:f32[]", "%2 = pure_callback %1"]


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("float32", "f32"),
        ("bfloat16", "bf16"),
        ("float8_e4m3fn", "f8_e4m3fn"),
        ("uint8", "u8"),
        ("int4", "i4"),
        ("complex64", "c64"),
        ("bool", "bool"),
    ],
)
def test_dtypes(dtype: str, text: str) -> None:
    assert print_dtype(jnp.dtype(dtype)) == text
    assert print_type(jax.ShapeDtypeStruct((2, 0), dtype)) == f"{text}[2,0]"


def test_references_print() -> None:
    def f(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[...] += 1.0
        return ref[...]

    assert "ref<f32[3]>" in print_graph(trace_function(f, (ROW,), {}, name="f").graph)


def test_callables_are_printed_by_name() -> None:
    def f(x: Any) -> Any:
        return jax.pure_callback(np.sin, x, x)

    assert "at 0x" not in print_graph(trace_function(f, (ROW,), {}, name="f").graph)


def test_numpy_scalars_among_parameters_are_printed_by_value() -> None:
    scale = Primitive("scale")
    scale.def_abstract_eval(lambda x, by: x)

    def f(x: Any) -> Any:
        return scale.bind(x, by=np.float32(0.5))

    # Comparing one with `()` gives an empty array, which is neither true nor false.
    assert "scale[by=0.5]" in print_graph(trace_function(f, (ROW,), {}, name="f").graph)


def test_report_prints_as_one_line() -> None:
    assert str(PassReport("dead-code", 3, 3)) == "dead-code: 3 ops"
    assert str(PassReport("dead-code", 3, 1, "x")) == "dead-code: 3 -> 1 ops, x"
