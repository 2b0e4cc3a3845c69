"""The kernels that compare memory at capture, on the borders of what one block of threads takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tracegraph.runtime.cuda import comparison, measurement
from tracegraph.verification.difference import measure_difference, relate

pytestmark = pytest.mark.usefixtures("gpu")
PIECE = comparison.PIECE_BYTES


@pytest.mark.parametrize("nbytes", [1, 255, 257, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_one_changed_byte_is_found_wherever_it_is(nbytes: int) -> None:
    captured = tg.capture(lambda x: x + 1)
    captured(np.ones(3, np.float32))
    device = captured._device
    content = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    one, same = (jax.device_put(content.copy()) for _ in range(2))
    for index in {0, nbytes // 2, nbytes - 1}:
        changed = content.copy()
        changed[index] ^= 1
        other = jax.device_put(changed)
        jax.block_until_ready((one, same, other))
        pairs = [(one, same), (one, other), (other, one), (other, other)]
        ranges = [(a.unsafe_buffer_pointer(), b.unsafe_buffer_pointer(), nbytes) for a, b in pairs]
        assert device.comparison.find_unequal([*ranges, (0, 0, 0)]) == [1, 2]
        read = device.comparison.read_range(
            other.unsafe_buffer_pointer(), (nbytes,), np.dtype(np.uint8)
        )
        np.testing.assert_array_equal(read, changed)


@pytest.mark.parametrize("dtype", measurement.FORMATS)
def test_floats_are_measured_as_on_the_host(dtype: str) -> None:
    captured = tg.capture(lambda x: x + 1)
    captured(np.ones(3, np.float32))
    device, random = captured._device, np.random.default_rng(3)
    wide = jnp.dtype(dtype)
    with jax.enable_x64(True):
        for size in (1, 255, PIECE // wide.itemsize + 1, 3 * PIECE // wide.itemsize + 7):
            values = random.standard_normal(size).astype(wide)
            last = size - 1
            changes = [(0, 0.5), (last, np.nan), (last, np.inf), (size // 2, -0.0), (last, 1e-7)]
            for index, value in changes:
                changed = values.copy()
                changed[index] = value
                both = [jax.block_until_ready(jax.device_put(each)) for each in (changed, values)]
                one, other = (each.unsafe_buffer_pointer() for each in both)
                pairs = [(one, other, size, wide), (other, one, size, wide), (one, one, size, wide)]
                found = [relate(each) for each in device.comparison.measure_floats(pairs)]
                expected = [
                    measure_difference(*pair)
                    for pair in ((changed, values), (values, changed), (changed, changed))
                ]
                np.testing.assert_equal(found, expected)
