"""The reference: XLA's executables of all regions, run one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracegraph.lowering.compiled_region import CompiledRegion
from tracegraph.lowering.reference import run_regions

FLOATS = jax.ShapeDtypeStruct((3,), np.float32)


def region(
    name: str, function: Callable[..., Any], inputs: str, outputs: str, in_place: int = 0
) -> CompiledRegion:
    """Returns a compiled region of float32[3] buffers."""
    names = tuple(inputs.split())
    jitted = jax.jit(function, donate_argnums=range(in_place), keep_unused=True)
    compiled = jitted.lower(*[FLOATS] * len(names)).compile()
    return CompiledRegion(name, compiled, names, tuple(outputs.split()), in_place)


def give(**values: float) -> dict[str, jax.Array]:
    return {name: jnp.full(3, value, np.float32) for name, value in values.items()}


def read(values: dict[str, Any], names: str) -> list[float]:
    return [float(values[name][0]) for name in names.split()]


def test_regions_run_in_order_and_hand_on_their_values() -> None:
    regions = (
        region("one", lambda x: (x + 1, x * 2), "x", "a b"),
        region("two", lambda b, a: b - a, "b a", "c"),
    )
    assert read(run_regions(regions, give(x=5)), "x a b c") == [5, 6, 10, 4]


def test_state_that_is_not_read_later_is_used_up() -> None:
    given = give(s=5)
    regions = (region("one", lambda s: s + 1, "s", "t", in_place=1),)
    assert read(run_regions(regions, given), "t") == [6]
    assert given["s"].is_deleted()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_state_that_a_later_region_reads_is_copied(dtype: Any) -> None:
    with jax.enable_x64(True):
        given = {"s": jnp.full(3, 5, dtype)}
        kind = jax.ShapeDtypeStruct((3,), dtype)
        update = jax.jit(lambda s: s + 1, donate_argnums=0).lower(kind).compile()
        double = jax.jit(lambda s: s * 2).lower(kind).compile()
    regions = (
        CompiledRegion("one", update, ("s",), ("t",), 1),
        CompiledRegion("two", double, ("s",), ("u",)),
    )
    values = run_regions(regions, given)
    assert read(values, "s t u") == [5, 6, 10]
    assert values["t"].dtype == dtype
    assert not given["s"].is_deleted()


def test_an_eager_region_is_called_as_it_is() -> None:
    calls = []

    def eager(x: jax.Array) -> jax.Array:
        calls.append(x)
        return x + 1

    regions = (CompiledRegion("eager", eager, ("x",), ("y",)),)
    given = give(x=1)
    assert read(run_regions(regions, given), "y") == [2]
    assert calls == [given["x"]]


@pytest.mark.parametrize("count", [1, 3])
def test_a_region_with_a_wrong_number_of_results_is_refused(count: int) -> None:
    regions = (CompiledRegion("bad", lambda x: (x,) * count, ("x",), ("a", "b")),)
    with pytest.raises(ValueError, match="argument 2"):
        run_regions(regions, give(x=1))


def test_no_regions() -> None:
    assert read(run_regions((), give(x=3)), "x") == [3]
