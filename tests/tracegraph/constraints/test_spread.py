"""The rules of calls over several devices, with devices that are only described."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegraph.constraints.arguments import (
    ArgumentLeaf,
    check_arguments,
    find_spread_sharding,
    is_reachable,
)
from tracegraph.constraints.spread import Spread, check_spread, find_spread, print_sharding
from tracegraph.runtime.jax_interop import ArrayImpl

X = jnp.arange(4.0)
DEVICE = jax.devices()[0]
LEAF = ArgumentLeaf("argument 0 `x`", X, False)


def describe(process: int, platform: str = "gpu") -> Any:
    return types.SimpleNamespace(process_index=process, platform=platform)


def test_a_call_of_one_device_is_not_spread():
    assert find_spread([LEAF, ArgumentLeaf("argument 1 `y`", np.zeros(2), False)]) is None
    assert find_spread_sharding(X) is None


def test_devices_of_other_processes_are_refused():
    for devices, whose in (
        ((describe(0), describe(1)), "2 processes"),
        ((describe(1), describe(1)), "another process"),
    ):
        (violation,) = check_spread(Spread(devices, "shard_map", "a.py:1 in f", ""), [LEAF])
        assert violation.rule == "several-processes"
        assert violation.what == f"shard_map is on the devices of {whose}"
        assert violation.where == "a.py:1 in f"
        is_part = whose == "2 processes"
        assert ('mode="partial"' in violation.fix) == is_part
        cut = check_spread(Spread(devices, "shard_map", "a.py:1 in f", ""), [], is_cut=True)
        assert cut == ([] if is_part else [violation])


def test_cpu_devices_of_several_processes_are_reachable_from_each_of_them():
    for is_cut in (False, True):
        assert is_reachable((describe(0, "cpu"), describe(1, "cpu")), is_cut=is_cut)
        assert not is_reachable((describe(1, "cpu"), describe(2, "cpu")), is_cut=is_cut)
        assert is_reachable((describe(0), describe(1)), is_cut=is_cut) == is_cut
        assert is_reachable((describe(0), describe(0)), is_cut=is_cut)


def test_an_argument_that_this_process_cannot_read_is_refused(monkeypatch):
    monkeypatch.setattr(ArrayImpl, "is_fully_addressable", property(lambda array: array is not X))
    for takes_spread in (False, True):
        found = check_arguments([LEAF], device=DEVICE, takes_spread=takes_spread)
        assert [violation.rule for violation in found] == ["several-processes"]


def test_shardings_print_in_short():
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=[DEVICE])
    assert print_sharding(jax.NamedSharding(mesh, jax.P(None, "data"))) == (
        "P(None, 'data') over 'data': 1"
    )
    assert "SingleDevice" in print_sharding(X.sharding)
