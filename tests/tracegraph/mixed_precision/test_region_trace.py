"""What a region does to jaxprs: what is rewritten, what is left, and what is kept of it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from tests.tracegraph.mixed_precision.matmuls import list_equations, name_matmuls
from tracegraph.jax_internals import make_function, trace_state
from tracegraph.mixed_precision.cast_rules import CastRules, make_rules
from tracegraph.mixed_precision.region_trace import RegionTrace, enter_region, rewrite_jaxpr

BF16 = np.dtype(jnp.bfloat16)
RULES = CastRules(BF16)
X = jnp.ones((4, 4))


def loop(x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y @ x), x)


def test_types_of_inputs_and_results_stay() -> None:
    before = jax.make_jaxpr(loop)(X)
    after = rewrite_jaxpr(before, RULES)
    assert after is not before
    assert [str(aval) for aval in after.in_avals] == [str(aval) for aval in before.in_avals]
    assert [str(aval) for aval in after.out_avals] == [str(aval) for aval in before.out_avals]
    assert name_matmuls(make_function(after), X) == ["bfloat16"]
    assert name_matmuls(make_function(before), X) == ["float32"]


def test_a_jaxpr_without_matmuls_is_the_same_one() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x))(X)
    assert rewrite_jaxpr(jaxpr, RULES) is jaxpr


def test_a_jaxpr_is_rewritten_once_and_dropped_with_it() -> None:
    """JAX compiles by identity: an eager loop must not compile anew at each call."""
    jaxpr = jax.make_jaxpr(lambda x: jax.jit(lambda y: y @ x)(x))(X)
    first = rewrite_jaxpr(jaxpr, RULES)
    assert rewrite_jaxpr(jaxpr, CastRules(BF16)) is first
    assert rewrite_jaxpr(jaxpr, CastRules(np.dtype(np.float16))) is not first
    alive = weakref.ref(first)
    del jaxpr, first
    gc.collect()
    assert alive() is None


def test_a_region_leaves_nothing_behind() -> None:
    before = trace_state.value
    with enter_region(RULES):
        trace = trace_state.value
        assert type(trace) is RegionTrace
        _ = X @ X
        assert trace._casts
        with enter_region(RULES):
            assert trace_state.value.parent_trace is before
    assert trace_state.value is before
    assert not trace._casts


def test_the_mark_of_a_region_is_in_the_scope_of_its_ops() -> None:
    def run(x: Any) -> Any:
        with enter_region(RULES), enter_region(None):
            return jnp.sin(x)

    (sine,) = list_equations(run, X)
    assert str(sine.source_info.name_stack) == "tg_autocast_1/tg_autocast_2"


@pytest.mark.parametrize(
    ("name", "types", "wanted"),
    [
        ("dot_general", ("float32", "float32"), "bfloat16"),
        ("dot_general", ("float32", "bfloat16"), "bfloat16"),
        ("dot_general", ("float32", "float16"), "bfloat16"),
        ("dot_general", ("float16", "float16"), None),
        ("dot_general", ("float64", "float64"), None),
        ("dot_general", ("float32", "float8_e4m3fn"), None),
        ("dot_general", ("int8", "int8"), None),
        ("conv_general_dilated", ("float32", "float32"), "bfloat16"),
        ("exp", ("bfloat16",), "float32"),
        ("exp", ("float32",), None),
        ("reduce_sum", ("float16",), "float32"),
        ("add", ("bfloat16", "bfloat16"), None),
        ("convert_element_type", ("float32",), None),
    ],
)
def test_the_table(name: str, types: tuple[str, ...], wanted: str | None) -> None:
    primitive = Primitive(name)
    found = RULES.choose_dtype(primitive, {}, [jnp.dtype(each) for each in types])
    assert found == (None if wanted is None else jnp.dtype(wanted))


def test_rules_are_one_value_however_they_are_written() -> None:
    one = make_rules("bfloat16", {"tanh": "keep", "exp": np.float16}, caches=True)
    other = make_rules(jnp.bfloat16, {"exp": "float16", "tanh": "keep"}, caches=True)
    assert one == other
    assert hash(one) == hash(other)
