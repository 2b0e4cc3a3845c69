"""What a device is: the record that users read, under the names of PyTorch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """What a device is. More than six fields because users know them from PyTorch.

    What only a GPU has is 0 for the host device, and its UUID is empty there.

    Attributes:
        name: as ``NVIDIA H200``, or ``cpu``.
        major: of the compute capability, as 9 of 9.0.
        minor: of the compute capability, as 0 of 9.0.
        total_memory: in bytes.
        multi_processor_count: of a GPU; the processors of the host.
        warp_size: threads that run together; 1 on the host.
        max_threads_per_multi_processor: that are resident at once.
        regs_per_multiprocessor: registers of 32 bits.
        shared_memory_per_block: in bytes.
        shared_memory_per_block_optin: in bytes, for a kernel that asks for more.
        shared_memory_per_multiprocessor: in bytes.
        L2_cache_size: in bytes.
        clock_rate: in kHz, the highest.
        memory_clock_rate: in kHz, the highest.
        memory_bus_width: in bits.
        is_integrated: true of a GPU that shares the host's memory, 0 or 1.
        uuid: as ``4d2b8e5c-...``; ``nvidia-smi`` puts ``GPU-`` before it.
        pci_domain_id: of the bus.
        pci_bus_id: in its domain.
        pci_device_id: on its bus.
    """

    name: str
    major: int = 0
    minor: int = 0
    total_memory: int = 0
    multi_processor_count: int = 0
    warp_size: int = 1
    max_threads_per_multi_processor: int = 0
    regs_per_multiprocessor: int = 0
    shared_memory_per_block: int = 0
    shared_memory_per_block_optin: int = 0
    shared_memory_per_multiprocessor: int = 0
    L2_cache_size: int = 0
    clock_rate: int = 0
    memory_clock_rate: int = 0
    memory_bus_width: int = 0
    is_integrated: int = 0
    uuid: str = ""
    pci_domain_id: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
