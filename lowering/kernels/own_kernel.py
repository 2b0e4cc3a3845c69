"""OwnKernel: a kernel of our own in C++, on its way through XLA to a node.

Note [Kernels inside of XLA's program]
A kernel that takes the place of ops has to be inside of the program that XLA compiles: XLA plans
the memory of its operands and results. XLA takes PTX as a custom call that it leaves alone, so that
its own executable computes with the same kernel, and can be compared with. The PTX carries the
source as comments. When XLA's program has been read, the source is compiled anew, to machine code
that loads without the driver's compiler, and what XLA cannot be told is known again: which operands
the kernel loads before it waits for the kernels ahead of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re

from tracegraph.runtime.definition.nodes import LaunchShape

# Products are rounded once, with the sum that they are added to; the rest is XLA's precision.
OPTIONS = ("--std=c++17",)

_FIRST_LINE = "// tracegraph kernel, version 1"
_EARLY = "// loads before its wait:"
_SOURCE = "//|"
# New versions of NVRTC write new versions of PTX, which older drivers refuse. What is used here is
# in the first one that knows the instructions of compute capability 9.0.
_VERSION = re.compile(r"^\.version [0-9.]+$", re.MULTILINE)
_OLDEST_VERSION = ".version 8.0"


@dataclasses.dataclass(frozen=True)
class OwnKernel:
    """A kernel that begins its work on what others wrote with a wait.

    Attributes:
        symbol: its name in the source.
        source: in C++; it begins with `HEAD`.
        shape: of a launch. Its clusters are a part of the source, as ``CLUSTERED``.
        early: numbers of the parameters that it loads from before the wait.
    """

    symbol: str
    source: str = dataclasses.field(repr=False)
    shape: LaunchShape
    early: tuple[int, ...] = ()


def leaves_room(blocks: int, processors: int) -> bool:
    """Returns True for a launch beside which another one has places on the GPU.

    Only then may the next kernel start before this one has ended: blocks that wait in the places of
    blocks that could work gain nothing. In a step of GPT-2 such starts cost 2 % on an H100.

    Args:
        blocks: of the launch.
        processors: multiprocessors of the GPU.
    """
    return 2 * blocks <= processors


def name_kernel(stem: str, source: str) -> str:
    """Returns a symbol that no other source has.

    Args:
        stem: what the kernel does.
        source: all that makes the kernel differ from others.
    """
    return f"{stem}_{hashlib.sha256(source.encode()).hexdigest()[:12]}"


def write_listing(kernel: OwnKernel, ptx: str) -> str:
    """Returns a kernel's PTX with what is needed to compile it anew, see Note [Kernels inside…].

    Args:
        kernel: whose code it is.
        ptx: of NVRTC.
    """
    lines = [
        _FIRST_LINE,
        " ".join([_EARLY, *map(str, kernel.early)]),
        *(f"{_SOURCE}{line}" for line in kernel.source.split("\n")),
        _VERSION.sub(_OLDEST_VERSION, ptx, count=1),
    ]
    return "\n".join(lines)


def read_listing(image: bytes, symbol: str, shape: LaunchShape) -> OwnKernel | None:
    """Returns the kernel that a listing is of, or None for any other code.

    Args:
        image: PTX, or machine code.
        symbol: of the kernel.
        shape: of its launch.
    """
    if not image.startswith(_FIRST_LINE.encode()):
        return None
    _, early, *rest = image.decode().split("\n")
    source = [line.removeprefix(_SOURCE) for line in rest if line.startswith(_SOURCE)]
    numbers = tuple(map(int, early.removeprefix(_EARLY).split()))
    return OwnKernel(symbol, "\n".join(source), shape, numbers)
