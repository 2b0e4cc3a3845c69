"""The primitives whose bodies are kernels: texts of another language, which no rule looks into."""

from __future__ import annotations

# Of Pallas `pallas_call`, its forms for several cores, `core_map` and `mpmd_map`, and what they
# become; their bodies have axes and references of their own.
KERNEL_CALLS = frozenset(
    {"pallas_call", "core_map", "mpmd_map", "mosaic_gpu", "triton_kernel_call"}
)
