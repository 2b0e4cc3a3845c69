"""What the host device is: JAX's name of it, its memory, its processors."""

from __future__ import annotations

import os
import pathlib
import platform
from typing import Any

from tracegraph.runtime.definition.code_target import CodeTarget
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


def read_target(jax_device: Any) -> CodeTarget:
    """Returns what code for a CPU device of JAX is compiled for: this CPU, with all that it can.

    Args:
        jax_device: one of ``jax.devices("cpu")``.
    """
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        # Where there is no such file, all CPUs of an architecture are taken for the same.
        text = ""
    lines = (line.partition(":") for line in text.splitlines())
    words = next((w for head, _, w in lines if head.strip() in ("flags", "Features")), "")
    features = tuple(sorted(set(words.split())))
    return CodeTarget("cpu", platform.machine(), jax_device.device_kind, features)
