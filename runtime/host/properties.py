"""What the host device is: JAX's name of it, its memory, its processors."""

from __future__ import annotations

import os
from typing import Any

from tracegraph.runtime.device_properties import DeviceProperties
from tracegraph.runtime.memory.providers.host import HostProvider


def read_properties(jax_device: Any) -> DeviceProperties:
    """Returns what a CPU device of JAX is.

    Args:
        jax_device: one of ``jax.devices("cpu")``.
    """
    return DeviceProperties(
        name=jax_device.device_kind,
        total_memory=HostProvider().total_bytes(),
        multi_processor_count=os.cpu_count() or 1,
    )
