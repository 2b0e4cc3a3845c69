"""CodeTarget: what compiled code depends on beside its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias


@dataclasses.dataclass(frozen=True)
class CompiledSource:
    """What NVRTC makes of a source.

    Attributes:
        cubin: machine code for one architecture.
        ptx: what it was made from.
    """

    cubin: bytes = dataclasses.field(repr=False)
    ptx: str = dataclasses.field(repr=False)


# The first CUDA whose graphs have nodes that choose among several branches.
FIRST_WITH_CHOICES = 12_080

# Of a source in C++, with options of NVRTC.
CompileKernel: TypeAlias = Callable[[str, tuple[str, ...]], CompiledSource]


@dataclasses.dataclass(frozen=True)
class CodeTarget:
    """What code is compiled for, or runs on.

    Attributes:
        platform: ``cpu`` or ``cuda``.
        architecture: as ``x86_64``; of a GPU its compute capability, as ``9.0``.
        name: what users call the device, as ``NVIDIA H200``.
        features: instructions that a CPU has beyond its architecture; none of a GPU.
        compiler: version of CUDA that compiles for a GPU, as 12090 for 12.9; 0 where that is not
            known, and on a CPU.
        driver: newest version of CUDA that the driver serves; 0 on a CPU.
    """

    platform: str
    architecture: str
    name: str
    features: tuple[str, ...] = ()
    compiler: int = 0
    driver: int = 0

    @property
    def has_choices(self) -> bool:
        """True where a graph's node may choose among branches, or its driver is not known."""
        return not self.driver or self.driver >= FIRST_WITH_CHOICES


def print_cuda(version: int) -> str:
    """Returns a version of CUDA as people write it.

    Example:
        >>> from tracegraph.runtime.definition.code_target import print_cuda
        >>> print_cuda(12090)
        '12.9'
    """
    return f"{version // 1000}.{version % 1000 // 10}"
