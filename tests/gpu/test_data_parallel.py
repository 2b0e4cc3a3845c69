"""Arrays over two GPUs: refused, and nothing is lost; skipped where there is one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import tracegraph as tg

pytestmark = pytest.mark.usefixtures("gpu")
X = np.arange(8, dtype=np.float32)


@pytest.fixture
def mesh(gpu: Any) -> Any:
    found = jax.local_devices()
    if len(found) < 2:
        pytest.skip(f"needs two GPUs; there is {len(found)}")
    return jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,), devices=found[:2])


def refuse(captured: Any, *args: Any) -> Any:
    with pytest.raises(tg.CaptureError) as caught:
        captured(*args)
    assert len(str(caught.value).splitlines()) == 4
    return caught.value


def test_arrays_and_meshes_of_two_gpus_are_refused(mesh: Any) -> None:
    over = {"mesh": mesh, "in_specs": jax.P("i"), "out_specs": jax.P()}
    total = tg.capture(jax.shard_map(lambda x: jax.lax.psum(x, "i"), **over), name="total")
    assert refuse(total, X).anchor == "several-devices"
    double = tg.capture(lambda x: x * 2, name="double")
    spread = jax.device_put(X, jax.NamedSharding(mesh, jax.P("i")))
    assert refuse(double, spread).anchor == "other-device"
    with jax.set_mesh(mesh):
        assert refuse(double, X).anchor == "several-devices"
    np.testing.assert_array_equal(double(X), X * 2)
    np.testing.assert_array_equal(jax.jit(double)(spread), X * 2)
