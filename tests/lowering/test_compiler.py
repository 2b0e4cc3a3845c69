"""The compiler: regions become the very programs that `jax.jit` makes of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.compilers import make_compiler
from tracegraph.lowering import compile_gpu, compiler
from tracegraph.lowering.request import BufferSpec, Region

X = jnp.linspace(0.5, 2.0, 4)


def carry_a_dead_sum(x: jax.Array) -> jax.Array:
    """Only the first of what the loop carries is read."""

    def turn(carry: Any, _: Any) -> Any:
        y, total = carry
        return (y * 1.5, total + jnp.sin(y)), None

    return jax.lax.scan(turn, (x, x * 0), None, 3)[0][0]


def carry_a_dead_input(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: ((c[0] * 2, c[1]), None), (x, y), None, 3)[0][0]


def test_what_a_loop_carries_and_nothing_reads_is_dropped_as_by_jit() -> None:
    wanted = jax.jit(carry_a_dead_sum).lower(X).as_text()
    lowered = compiler._lower(carry_a_dead_sum, [jax.ShapeDtypeStruct(X.shape, X.dtype)], 0)
    assert "stablehlo.sine" not in wanted
    assert "stablehlo.sine" not in lowered.as_text()
    kept = jax.jit(carry_a_dead_sum, keep_unused=True).lower(X).as_text()
    assert "stablehlo.sine" in kept


def test_a_parameter_that_nothing_reads_stays() -> None:
    x, y, z = (BufferSpec(name, (4,), np.dtype(np.float32)) for name in "xyz")
    region = Region("region0", lambda *arrays: (carry_a_dead_input(*arrays),), (x, y), (z,))
    executable: Any = make_compiler().compile(region)
    assert None not in jax.tree.leaves(
        executable.input_shardings, is_leaf=lambda each: each is None
    )
    assert np.array_equal(executable(X, X), jax.jit(carry_a_dead_input)(X, X))


DOUBLE = Region(
    "region0",
    lambda x: (x * 2,),
    (BufferSpec("x", (4,), np.dtype(np.float32)),),
    (BufferSpec("y", (4,), np.dtype(np.float32)),),
)
# One that XLA on the host takes, too, and one that no XLA has.
KNOWN, UNKNOWN = ("xla_llvm_disable_expensive_passes", True), ("xla_gpu_unheard_of", True)


def test_options_that_xla_refuses_are_left_out_and_all_others_asked_for_nothing() -> None:
    asked: list[compiler.XlaOptions] = []

    def keep_known(options: compiler.XlaOptions) -> compiler.XlaOptions:
        asked.append(options)
        return tuple(option for option in options if option != UNKNOWN)

    make_compiler().compile(DOUBLE, options=(KNOWN,), keep_known=keep_known)
    assert asked == []
    found = make_compiler().compile(DOUBLE, options=(KNOWN, UNKNOWN), keep_known=keep_known)
    assert asked == [(KNOWN, UNKNOWN)]
    assert np.array_equal(found(X), X * 2)


def test_what_xla_refuses_for_other_reasons_is_its_own_error() -> None:
    wrong = ("xla_llvm_disable_expensive_passes", "perhaps")
    with pytest.raises(jax.errors.JaxRuntimeError, match="perhaps"):
        make_compiler().compile(DOUBLE, options=(wrong,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="perhaps"):
        make_compiler().compile(
            DOUBLE, options=(wrong, UNKNOWN), keep_known=lambda options: options[:1]
        )


def test_no_schema_is_loaded_before_xla_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def compile_with(*arguments: Any, **options: Any) -> Any:
        compiled = compile_region(*arguments, **options)
        happened.append("compiled")
        return compiled

    def load() -> frozenset[str]:
        happened.append("loaded")
        return frozenset([KNOWN[0]])

    compile_region = compiler.Compiler.compile
    monkeypatch.setattr(compiler.Compiler, "compile", compile_with)
    monkeypatch.setattr(compile_gpu, "FIRST_OPTIONS", (KNOWN,))
    monkeypatch.setattr(compile_gpu, "legal_compile_options", load)
    monkeypatch.setattr(compile_gpu, "read_region", lambda *_: None)
    found = compile_gpu._compile_to_kernels(DOUBLE, make_compiler(), in_place=0, count=1)
    assert found[2] == (KNOWN,)
    assert happened == ["compiled", "loaded"]
