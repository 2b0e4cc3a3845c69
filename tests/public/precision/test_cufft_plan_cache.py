"""`tg.backends.cufft_plan_cache`: its attributes, other devices, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.fakes.cuda_on_host import CudaOnHost
from tests.fakes.devices import use_device
from tests.oracles.error_lines import match
from tracegraph.runtime import plan_cache

CACHE = tg.backends.cufft_plan_cache


class Plan:
    """A plan of cuFFT."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> CudaOnHost:
    """A GPU over host memory, with a cache of its own."""
    monkeypatch.setattr(plan_cache, "_caches", {})
    device = use_device(monkeypatch, "jax")
    assert device is not None
    return device


def add_plans(name: str, *keys: str, freed: list[str] | None = None) -> None:
    noted = [] if freed is None else freed

    def schedule(key: str) -> Callable[[Plan], Callable[[], None]]:
        return lambda plan: lambda: noted.append(key)

    for key in keys:
        plan_cache.find_fft_plans(name).find(key, Plan, schedule(key))


def test_the_host_has_no_plans() -> None:
    captured = tg.capture(lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 2))
    x = np.arange(8, dtype=np.float32)
    assert (captured(x) == jax.jit(lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 2))(x)).all()
    assert (CACHE.size, CACHE.max_size) == (0, 4096)
    CACHE.clear()
    assert CACHE[0].size == 0
    assert str(CACHE).startswith("<cuFFT plans of host: 0 of at most ")


def test_attributes_are_those_of_the_device_that_captures_use(device: CudaOnHost) -> None:
    freed: list[str] = []
    add_plans(device.name, "a", "b", "c", freed=freed)
    assert CACHE.size == 3
    CACHE.max_size = 2
    assert (CACHE.size, CACHE.max_size, freed) == (2, 2, ["a"])
    assert repr(CACHE) == f"<cuFFT plans of {device.name}: 2 of at most 2>"
    CACHE.clear()
    assert (CACHE.size, freed) == (0, ["a", "b", "c"])


def test_each_device_has_its_own(device: CudaOnHost) -> None:
    add_plans(device.name, "a")
    cpu = jax.devices("cpu")[0]
    CACHE[cpu].max_size = 7
    assert (CACHE.size, CACHE.max_size) == (1, 4096)
    assert (CACHE[cpu].size, CACHE[0].max_size) == (0, 7)


def test_the_device_uses_the_cache_that_users_see(device: CudaOnHost) -> None:
    assert device._cufft.cache is not None
    other = CudaOnHost(device.driver)
    add_plans(other.name, "a")
    assert other._cufft.cache.size == CACHE.size == 1


@pytest.mark.parametrize("index", [99, -1, "cuda:0", 1.5, True])
def test_a_device_that_does_not_exist(index: Any) -> None:
    with pytest.raises(tg.ConfigError) as raised:
        CACHE[index]
    match(raised.value, "`device` is", "argument `device`", "this process has the devices", "pass")


@pytest.mark.parametrize("value", [-1, "8", 1.0, None, True])
def test_a_size_that_is_none(value: Any) -> None:
    with pytest.raises(tg.ConfigError) as raised:
        CACHE.max_size = value
    match(
        raised.value,
        f"`max_size` of a plan cache is {value!r}",
        "tg.backends.cufft_plan_cache.max_size",
        "it is a count of plans: 0 keeps none",
        "pass an int that is not negative; 4096 is the default",
    )
    assert CACHE.max_size == 4096


def test_names_that_are_no_attributes() -> None:
    for name in ("size", "maxsize"):
        with pytest.raises(AttributeError):
            setattr(CACHE, name, 3)
    with pytest.raises(TypeError):
        iter(CACHE)


def test_copies_are_the_same_object() -> None:
    assert copy.deepcopy(CACHE) is CACHE
    assert pickle.loads(pickle.dumps(CACHE)) is CACHE
