"""What a GPU is, and which other GPU's memory it reaches, by the CUDA driver."""

from __future__ import annotations

import importlib.util
import re
import uuid
from typing import Any

from tracegraph.runtime.cuda.driver.driver import CudaDriver, load_driver
from tracegraph.runtime.definition.code_target import CodeTarget
from tracegraph.runtime.device_properties import DeviceProperties

# Of CUDA, that JAX has plugins for.
PLUGIN_MAJORS = (12, 13)
# Our field, and the end of the name of the driver's attribute.
ATTRIBUTES = {
    "major": "COMPUTE_CAPABILITY_MAJOR",
    "minor": "COMPUTE_CAPABILITY_MINOR",
    "multi_processor_count": "MULTIPROCESSOR_COUNT",
    "warp_size": "WARP_SIZE",
    "max_threads_per_multi_processor": "MAX_THREADS_PER_MULTIPROCESSOR",
    "regs_per_multiprocessor": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "shared_memory_per_block": "MAX_SHARED_MEMORY_PER_BLOCK",
    "shared_memory_per_block_optin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "shared_memory_per_multiprocessor": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "L2_cache_size": "L2_CACHE_SIZE",
    "clock_rate": "CLOCK_RATE",
    "memory_clock_rate": "MEMORY_CLOCK_RATE",
    "memory_bus_width": "GLOBAL_MEMORY_BUS_WIDTH",
    "is_integrated": "INTEGRATED",
    "pci_domain_id": "PCI_DOMAIN_ID",
    "pci_bus_id": "PCI_BUS_ID",
    "pci_device_id": "PCI_DEVICE_ID",
}


def read_properties(jax_device: Any) -> DeviceProperties:
    """Returns what a GPU of JAX is.

    Args:
        jax_device: one of ``jax.devices("gpu")``.

    Raises:
        CudaError: there are no bindings of the driver, or it is too old.
    """
    driver, ordinal = load_driver(), jax_device.local_hardware_id
    numbers = {field: driver.read_attribute(ordinal, name) for field, name in ATTRIBUTES.items()}
    return DeviceProperties(
        name=jax_device.device_kind,
        total_memory=driver.read_total_bytes(ordinal),
        uuid=str(uuid.UUID(bytes=driver.read_uuid(ordinal))),
        **numbers,
    )


def can_access_peer(jax_device: Any, peer: Any) -> bool:
    """Returns True when kernels on a GPU can read and write the memory of another.

    Args:
        jax_device: one of ``jax.devices("gpu")``.
        peer: another.

    Raises:
        CudaError: there are no bindings of the driver, or it is too old.
    """
    ordinals = jax_device.local_hardware_id, peer.local_hardware_id
    return load_driver().can_access_peer(*ordinals)


def read_target(jax_device: Any, driver: CudaDriver) -> CodeTarget:
    """Returns what code for a GPU of JAX is compiled for.

    Args:
        jax_device: one of ``jax.devices("gpu")``.
        driver: of CUDA.
    """
    return CodeTarget(
        "cuda",
        getattr(jax_device, "compute_capability", "0.0"),
        jax_device.device_kind,
        compiler=find_compiler(jax_device),
        driver=driver.read_version(),
    )


def find_compiler(jax_device: Any) -> int:
    """Returns the version of CUDA that compiles for a GPU of JAX; 0 where that is not known.

    Args:
        jax_device: of this process, or one that is only described.
    """
    # As in "PJRT C API\ncuda 12090".
    built_with = re.search(r"cuda (\d+)", jax_device.client.platform_version)
    if built_with:
        return int(built_with[1])
    plugins = (f"jax_cuda{major}_plugin" for major in PLUGIN_MAJORS)
    found = [importlib.util.find_spec(name) is not None for name in plugins]
    majors = [major for major, is_here in zip(PLUGIN_MAJORS, found, strict=True) if is_here]
    return 1000 * majors[0] if len(majors) == 1 else 0
