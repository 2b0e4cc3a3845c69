"""Arguments, state, results and constants with elements of less than a byte."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.compilers import make_compiler
from tests.fakes.devices import use_device
from tracegraph.lowering.pack_elements import pack_elements
from tracegraph.lowering.request import BufferSpec, CaptureRequest, InputSpec, Role
from tracegraph.runtime.definition.packing import PACKED_BITS

# The host device, and a GPU over host memory.
KINDS = ("host", "jax")
DTYPES = tuple(PACKED_BITS)


def draw(name: str, *shape: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 4, shape)
    return (values - (0 if name.startswith("u") else 2)).astype(getattr(jnp, name))


def assert_equal(got: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["whole", "partial"])
@pytest.mark.parametrize("name", DTYPES)
def test_arguments_and_results_equal_jit(
    kind: str, mode: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_device(monkeypatch, kind)

    def run(x: Any, y: Any) -> Any:
        wide = x.astype(jnp.float32)
        if mode == "partial":
            wide = jax.pure_callback(lambda a: a, wide, wide)
        return x[::-1], wide * 2, (wide + y).astype(x.dtype), x

    captured = tg.capture(run, mode=mode)
    for seed in range(3):
        # An odd count: the last byte is not full.
        x, y = draw(name, 3, 5, seed=seed), np.float32(seed % 2)
        for each in (x, jnp.asarray(x)):
            assert_equal(captured(each, y), jax.jit(run)(x, y))
    assert captured.cache_info().captures == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["int4", "float4_e2m1fn"])
def test_donated_state_is_updated(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, kind)

    def step(state: Any, x: Any) -> Any:
        new = (state["w"].astype(jnp.float32) * x).astype(state["w"].dtype)
        return {"w": new}, new.astype(jnp.float32).sum()

    captured = tg.capture(step, donate_argnums=0)
    state: Any = {"w": jnp.asarray(draw(name, 7))}
    wanted: Any = {"w": jnp.asarray(draw(name, 7))}
    for factor in (np.float32(-1), np.float32(1), np.float32(-1)):
        state, total = captured(state, factor)
        wanted, expected = jax.jit(step)(wanted, factor)
        assert_equal((state, total), (wanted, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_arguments_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, kind)
    captured = tg.capture(lambda x: x[::-1])
    x = draw("int4", 9)
    assert_equal(captured(captured(captured(x))), x[::-1])
    kept = [captured(draw("int4", 9, seed=seed)) for seed in range(4)]
    for seed, each in enumerate(kept):
        assert_equal(each, draw("int4", 9, seed=seed)[::-1])


@pytest.mark.parametrize("kind", KINDS)
def test_closed_over_arrays(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, kind)
    for size in (5, 1 << 21):
        weights = jnp.asarray(draw("uint4", size))
        captured = tg.capture(lambda x, w=weights: (w.astype(jnp.float32) * x)[:7])
        assert_equal(captured(np.float32(2)), (weights.astype(jnp.float32) * 2)[:7])


@pytest.mark.parametrize("kind", KINDS)
def test_a_scalar_and_an_empty_array(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, kind)
    captured = tg.capture(lambda x, y: (x, y.astype(jnp.int8)))
    x, y = draw("int4"), draw("int4", 0, 3)
    for _ in range(2):
        assert_equal(captured(x, y), (x, y.astype(np.int8)))


@pytest.mark.parametrize("name", ["int1", "uint1"])
def test_one_bit_is_refused_on_a_gpu(name: str) -> None:
    buffer = BufferSpec("x", (3,), np.dtype(getattr(jnp, name, None) or np.bool_))
    if buffer.dtype.name != name:
        pytest.skip(f"this JAX has no {name}")
    request = CaptureRequest("f", (), (InputSpec(buffer, Role.COPIED),), ())
    with pytest.raises(tg.UnsupportedError, match=f"`x` is {name}"):
        pack_elements(request)


def test_a_request_of_whole_bytes_is_left_alone() -> None:
    spec = InputSpec(BufferSpec("x", (3,), np.dtype(np.int8)), Role.COPIED)
    request = CaptureRequest("f", (), (spec,), ())
    assert pack_elements(request) is request
    assert make_compiler().target.takes_kernels is False
