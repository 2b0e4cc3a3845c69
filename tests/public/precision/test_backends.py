"""`tg.backends`: what the flags change in captured functions, and what they leave alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegraph as tg
from tests.oracles.error_lines import line, match

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
FLAGS = [
    (tg.backends.matmul, "allow_tf32"),
    (tg.backends.matmul, "allow_fp16_reduced_precision_reduction"),
    (tg.backends.matmul, "allow_bf16_reduced_precision_reduction"),
    (tg.backends.cudnn, "allow_tf32"),
]
FLAG_NAMES = {
    (group, name): f"tg.backends.{'cudnn' if group is tg.backends.cudnn else 'matmul'}.{name}"
    for group, name in FLAGS
}


@pytest.fixture(autouse=True)
def unset() -> Iterator[None]:
    """Leaves all flags as they are by default."""
    yield
    for group, name in FLAGS:
        setattr(group, name, None)


def square(x: Any) -> Any:
    return x @ x


def compile_text(captured: Any, *args: Any) -> str:
    return captured.lower(*args).compile().as_text()


@pytest.mark.parametrize(("group", "name"), FLAGS)
def test_a_flag_is_none_until_it_is_set(group: Any, name: str) -> None:
    assert getattr(group, name) is None
    for value in (True, False, None):
        setattr(group, name, value)
        assert getattr(group, name) is value


def test_unset_flags_leave_the_program_of_jit() -> None:
    captured = tg.capture(square)
    assert (captured(X) == jax.jit(square)(X)).all()
    assert "operand_precision" not in compile_text(captured, X)


def test_a_changed_flag_is_captured_anew_and_explained() -> None:
    captured = tg.capture(square)
    captured(X)
    tg.backends.matmul.allow_tf32 = False
    result = captured(X)
    with jax.default_matmul_precision("highest"):
        assert (result == jax.jit(square)(X)).all()
    assert captured.cache_info().captures == 2
    report = captured.explain(X)
    assert "  tg.backends: matmul.allow_tf32=False after unset\n" in report
    assert "precision=(HIGHEST, HIGHEST)" in report.ir
    assert "operand_precision={highest,highest}" in compile_text(captured, X)
    # The first graph is still there.
    tg.backends.matmul.allow_tf32 = None
    captured(X)
    assert captured.cache_info().captures == 2


def test_a_flag_that_concerns_nothing_still_makes_a_signature() -> None:
    captured = tg.capture(jnp.sin)
    captured(X)
    with tg.backends.cudnn.flags(allow_tf32=True):
        captured(X)
    assert captured.cache_info().captures == 2


def test_a_lowered_function_keeps_its_flags() -> None:
    with tg.backends.matmul.flags(allow_tf32=False):
        lowered = tg.capture(square).lower(X)
    assert "operand_precision={highest,highest}" in lowered.compile().as_text()


def test_the_precision_that_an_op_or_jax_names_wins() -> None:
    captured = tg.capture(lambda x: jnp.matmul(x, x, precision="default"))
    with tg.backends.matmul.flags(allow_tf32=False):
        assert "operand_precision" not in compile_text(captured, X)
        with jax.default_matmul_precision("high"):
            text = compile_text(tg.capture(square), X)
    assert "operand_precision={high,high}" in text


def test_state_and_gradients_keep_their_flags() -> None:
    def step(state: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.tanh(x @ w).sum())(state["w"])
        return {"w": state["w"] - gradient}, loss

    captured = tg.capture(step, donate_argnums=0)
    with tg.backends.matmul.flags(allow_tf32=False):
        state, loss = captured({"w": jnp.asarray(X)}, X)
        state, _ = captured(state, X)
        with jax.default_matmul_precision("highest"):
            wanted, first = jax.jit(step)({"w": jnp.asarray(X)}, X)
            wanted, _ = jax.jit(step)(wanted, X)
    assert loss == first
    assert (state["w"] == wanted["w"]).all()
    assert captured.cache_info().hits == 1


def test_convolutions_have_a_flag_of_their_own() -> None:
    def convolve(i: Any, f: Any) -> Any:
        return lax.conv(i, f, (1, 1), "SAME") @ X

    args = np.ones((1, 2, 8, 8), np.float32), np.ones((2, 2, 3, 3), np.float32)
    captured = tg.capture(convolve)
    with tg.backends.cudnn.flags(allow_tf32=False):
        assert captured.trace(*args).graph.ops[0].params["precision"] == (
            lax.Precision.HIGHEST,
            lax.Precision.HIGHEST,
        )
        assert captured.trace(*args).graph.ops[1].params["precision"] is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_sums_end_in_32_bits(dtype: str) -> None:
    x = jnp.asarray(X, dtype)
    captured = tg.capture(square)
    with tg.backends.matmul.flags(
        allow_fp16_reduced_precision_reduction=False, allow_bf16_reduced_precision_reduction=False
    ):
        result = captured(x)
        first, second = captured.trace(x).graph.ops
    assert (first.results[0].aval.dtype, second.name) == ("float32", "convert_element_type")
    wanted = lax.dot(x, x, preferred_element_type=jnp.float32).astype(dtype)
    assert result.dtype == dtype
    assert (result == wanted).all()


def test_eager_parts_keep_the_flags() -> None:
    def show(x: Any) -> Any:
        y = jax.pure_callback(np.sin, jax.typeof(x), x @ x)
        return y @ y

    captured = tg.capture(show, mode="partial")
    with tg.backends.matmul.flags(allow_tf32=False):
        captured(X)
        assert captured.explain(X).ir.count("HIGHEST, HIGHEST") == 2


@pytest.mark.parametrize("value", [1, 0, "True", np.bool_(True), 1.0, []])
@pytest.mark.parametrize(("group", "name"), FLAGS)
def test_other_values_are_refused(group: Any, name: str, value: Any) -> None:
    with pytest.raises(tg.ConfigError) as caught:
        setattr(group, name, value)
    match(
        caught.value,
        f"{FLAG_NAMES[group, name]} is set to {value!r}",
        f"tests/public/precision/test_backends.py:{line() - 4}",
        "the flag is True or False, or None",
        f"{FLAG_NAMES[group, name]} = False",
    )
    with pytest.raises(tg.ConfigError), group.flags(**{name: value}):
        pass
    assert getattr(group, name) is None


def test_a_misspelled_flag_is_refused() -> None:
    with pytest.raises(AttributeError):
        tg.backends.matmul.allow_tf23 = True  # pyright: ignore[reportAttributeAccessIssue]


def test_a_flag_cannot_change_within_a_capture() -> None:
    def assign(x: Any) -> Any:
        tg.backends.matmul.allow_tf32 = False
        return x @ x

    def enter(x: Any) -> Any:
        with tg.backends.matmul.flags(allow_tf32=False):
            return x @ x

    for function in (assign, enter):
        with pytest.raises(tg.ConfigError, match="while a function is traced") as caught:
            tg.capture(function)(X)
        match(
            caught.value,
            "tg.backends.matmul.allow_tf32 is set while a function is traced",
            "tests/public/precision/test_backends.py:",
            "one capture has one set of flags",
            "set it before the call",
        )
    assert tg.backends.matmul.allow_tf32 is None
    assert (tg.capture(square)(X) == jax.jit(square)(X)).all()


def test_another_thread_may_change_a_flag_within_a_capture() -> None:
    def change(x: Any) -> Any:
        thread = threading.Thread(
            target=setattr, args=(tg.backends.matmul, "allow_tf32", not is_first)
        )
        thread.start()
        thread.join()
        return x @ x

    for is_first in (True, False):
        tg.backends.matmul.allow_tf32 = is_first
        captured = tg.capture(change)
        ops = captured.trace(X).graph.ops
        wanted = lax.Precision.DEFAULT if is_first else lax.Precision.HIGHEST
        assert ops[-1].params["precision"] == (wanted, wanted)


def test_a_with_block_holds_in_its_thread_and_ends() -> None:
    matmul, seen = tg.backends.matmul, []

    def look() -> None:
        seen.append((matmul.allow_tf32, tg.backends.cudnn.allow_tf32))

    matmul.allow_tf32 = True
    with matmul.flags(allow_tf32=False):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
        with tg.backends.cudnn.flags(allow_tf32=False):
            look()
            # Until the block ends, as in PyTorch.
            matmul.allow_tf32 = None
            look()
        look()
    look()
    assert seen == [(True, None), (False, None), (False, False), (None, False), (False, None)] + [
        (True, None)
    ]
    with pytest.raises(KeyError), matmul.flags(allow_tf32=False):
        raise KeyError
    assert matmul.allow_tf32 is True


def test_flags_are_not_for_jit() -> None:
    tg.backends.matmul.allow_tf32 = False
    assert "HIGHEST" not in jax.jit(square).lower(X).as_text()
    assert "HIGHEST" not in jax.jit(tg.capture(square)).lower(X).as_text()


def test_a_flag_compiles_nothing_of_jit_again() -> None:
    traces = []
    jitted = jax.jit(lambda x: traces.append(1) or x @ x)
    jitted(X)
    tg.backends.matmul.allow_tf32 = False
    jitted(X)
    assert len(traces) == 1


def test_groups_print_their_flags() -> None:
    tg.backends.matmul.allow_tf32 = True
    assert repr(tg.backends.matmul).startswith("<tg.backends: matmul.allow_tf32=True, matmul.")
    assert repr(tg.backends.cudnn) == "<tg.backends: cudnn.allow_tf32=None>"
