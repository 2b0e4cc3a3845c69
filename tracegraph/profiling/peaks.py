"""What a device can do at most: the rate of its memory, the peaks of its tensor cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tracegraph.runtime.definition.graph_nodes import Node
from tracegraph.runtime.definition.library_nodes import Matmul, MatmulNode
from tracegraph.runtime.device_properties import DeviceProperties

# Dense TFLOP/s by the start of a GPU's name, from NVIDIA's data sheets. A longer start comes first.
# Where a name is not here, no peak is stated.
_HOPPER_SXM = {"bf16": 989.4, "f16": 989.4, "tf32": 494.7, "f8": 1978.9, "s8": 1978.9, "f64": 66.9}
_HOPPER_PCIE = {"bf16": 756.0, "f16": 756.0, "tf32": 378.0, "f8": 1513.0, "s8": 1513.0, "f64": 51.0}
_AMPERE = {"bf16": 312.0, "f16": 312.0, "tf32": 156.0, "s8": 624.0, "f64": 19.5}
TENSOR_PEAKS: Mapping[str, Mapping[str, float]] = {
    "NVIDIA H100 PCIe": _HOPPER_PCIE,
    "NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    "NVIDIA H200": _HOPPER_SXM,
    "NVIDIA GH200": _HOPPER_SXM,
    "NVIDIA A100": _AMPERE,
}
_FORMATS = {"bfloat16": "bf16", "float16": "f16", "int8": "s8", "float64": "f64"}


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What a device can do at most; what is not known is not stated.

    Attributes:
        memory_rate: bytes a second, by the clock and the width of its memory; None if unknown.
        tensor_rates: operations a second by format, as ``bf16``; empty if unknown.
    """

    memory_rate: float | None = None
    tensor_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)


def find_peaks(properties: DeviceProperties) -> Peaks:
    """Returns what a device can do at most.

    Args:
        properties: of the device.

    Example:
        >>> h200 = DeviceProperties("NVIDIA H200", 9, 0, memory_clock_rate=3_201_000,
        ...                         memory_bus_width=6144)
        >>> peaks = find_peaks(h200)
        >>> round(peaks.memory_rate / 1e12, 2), round(peaks.tensor_rates["bf16"] / 1e12)
        (4.92, 989)
    """
    # Two transfers in a clock, the clock in kHz, the width in bits.
    memory_rate = 2 * 1000.0 * properties.memory_clock_rate * properties.memory_bus_width / 8
    rates = next(
        (rates for name, rates in TENSOR_PEAKS.items() if properties.name.startswith(name)), {}
    )
    return Peaks(memory_rate or None, {name: 1e12 * rate for name, rate in rates.items()})


def count_operations(node: Node) -> tuple[int, str]:
    """Returns how many multiplications and additions a node does on tensor cores, in which format.

    Known of cublasLt's matmuls only; of others it is 0. A kernel of XLA's does not say what it
    multiplies. The format is empty where a matmul does not use tensor cores.

    Args:
        node: of a graph.
    """
    if not isinstance(node, MatmulNode):
        return 0, ""
    matmul = node.matmul
    inner = matmul.a.columns if matmul.a.transpose == "N" else matmul.a.rows
    operations = 2 * matmul.d.rows * matmul.d.columns * inner * max(matmul.d.batch_count, 1)
    return operations, _find_format(matmul)


def _find_format(matmul: Matmul) -> str:
    if matmul.a.dtype.startswith("float8"):
        return "f8"
    if matmul.a.dtype == "float32":
        for name in ("TF32", "16BF", "16F"):
            if matmul.compute_type.endswith(f"FAST_{name}"):
                return {"TF32": "tf32", "16BF": "bf16", "16F": "f16"}[name]
        return ""
    return _FORMATS.get(matmul.a.dtype, "")
