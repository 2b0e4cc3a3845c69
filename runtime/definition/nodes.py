"""Nodes of a graph: what one does, and to which bytes, before buffers have addresses.

Here are byte ranges, compiled calls, memcpy, memset and kernels; ``library_nodes.py`` and
``graph_nodes.py`` have the others.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias, TypeVar


# A tuple: thousands are hashed in one capture, and sorted.
class BufferUse(NamedTuple):
    """A byte range of a buffer that a step or a node reads or writes."""

    buffer: str
    offset: int
    nbytes: int

    def overlaps(self, other: BufferUse) -> bool:
        """True when both name at least one common byte."""
        return self.buffer == other.buffer and max(self.offset, other.offset) < min(
            self.offset + self.nbytes, other.offset + other.nbytes
        )

    def contains(self, other: BufferUse) -> bool:
        """True when every byte of another range is one of this.

        Example:
            >>> BufferUse("a", 0, 8).contains(BufferUse("a", 4, 4))
            True
            >>> BufferUse("a", 0, 8).contains(BufferUse("a", 4, 8))
            False
        """
        return (
            self.buffer == other.buffer
            and self.offset <= other.offset
            and other.offset + other.nbytes <= self.offset + self.nbytes
        )

    def fits(self, nbytes: int) -> bool:
        """True when it lies within a buffer of so many bytes.

        Example:
            >>> BufferUse("a", 32, 32).fits(64), BufferUse("a", 64, 0).fits(64)
            (True, True)
            >>> BufferUse("a", 32, 33).fits(64), BufferUse("a", -1, 1).fits(64)
            (False, False)
        """
        return self.offset >= 0 and self.nbytes >= 0 and self.offset + self.nbytes <= nbytes


Relocate: TypeAlias = Callable[[BufferUse], BufferUse]
Locate: TypeAlias = Callable[[BufferUse], int]


@dataclasses.dataclass(frozen=True)
class CallNode:
    """One call of a compiled region: reads buffers, defines buffers (both by name).

    Attributes:
        name: the region's name.
        executable: returns its one result, or a tuple of several.
        arguments: names of the buffers that it reads, in order.
        results: names of the buffers that it defines, in order.
        in_place: how many of the first arguments are donated to the executable; the result at the
            same place is the new value in the same buffer.
    """

    name: str
    executable: Callable[..., Any] = dataclasses.field(repr=False)
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    in_place: int = 0

    kind = "call"

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """None: it takes whole buffers, by their names."""
        return ()


@dataclasses.dataclass(frozen=True)
class CopyNode:
    """Copies a byte range of one buffer into one of another."""

    name: str
    source: BufferUse
    target: BufferUse

    kind = "memcpy"

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        return (self.source, self.target)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The source."""
        return (self.source.buffer,)

    @property
    def results(self) -> tuple[str, ...]:
        """The target."""
        return (self.target.buffer,)

    def move(self, relocate: Relocate) -> CopyNode:
        """Returns the node with each of its byte ranges replaced."""
        return CopyNode(self.name, relocate(self.source), relocate(self.target))


@dataclasses.dataclass(frozen=True)
class FillNode:
    """Sets a byte range to a repeated value.

    Attributes:
        name: of the instruction that it belongs to.
        target: the byte range.
        value: one element, as an unsigned number.
        element_bytes: 1, 2 or 4; the range holds whole elements.
    """

    name: str
    target: BufferUse
    value: int = 0
    element_bytes: int = 1

    kind = "memset"
    arguments: tuple[str, ...] = dataclasses.field(default=(), init=False)

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        return (self.target,)

    @property
    def results(self) -> tuple[str, ...]:
        """The target."""
        return (self.target.buffer,)

    def move(self, relocate: Relocate) -> FillNode:
        """Returns the node with its byte range replaced."""
        return FillNode(self.name, relocate(self.target), self.value, self.element_bytes)


@dataclasses.dataclass(frozen=True)
class KernelCode:
    """A compiled kernel.

    Attributes:
        symbol: to look up in the image.
        cubin: the image, which the driver loads.
        early: of a kernel that begins with a wait the numbers of the parameters that it loads from
            before that.
    """

    symbol: str
    cubin: bytes = dataclasses.field(repr=False)
    early: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class LaunchShape:
    """How many threads run a kernel, in x, y and z, and with how much dynamic shared memory."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0


class Swizzle(enum.IntEnum):
    """CUtensorMapSwizzle."""

    NONE = 0
    BYTES_32 = 1
    BYTES_64 = 2
    BYTES_128 = 3


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A kernel parameter of 128 bytes that describes a tiled array to the bulk copy engine.

    More than six fields because they are the parameters of ``cuTensorMapEncodeTiled``, one to one.

    Attributes:
        use: where the array is; the descriptor holds its address.
        element_bytes: 1, 2, 4 or 8.
        dims: elements per dimension, innermost first.
        strides: bytes between elements of the dimensions but the innermost.
        box: elements per dimension of one tile.
        element_strides: step per dimension inside a tile.
        interleave: CUtensorMapInterleave: 0 none, 1 16 bytes, 2 32 bytes.
        swizzle: how tiles lie in shared memory.
        l2_promotion: CUtensorMapL2promotion: 0 none, 1 64, 2 128, 3 256 bytes.
        fills_nan: True when reads out of bounds give NaN, not zero.
    """

    use: BufferUse
    element_bytes: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: Swizzle = Swizzle.NONE
    l2_promotion: int = 0
    fills_nan: bool = False


class ConditionHandle(enum.Enum):
    """A kernel parameter: the handle of the conditional node that the kernel decides for.

    It is the node whose body the kernel is in, or whose `ConditionalNode.setter` it is.
    """

    OWN = "own"


# A pointer to a byte range, a tensor map, a handle, or the bytes of a value.
KernelParameter: TypeAlias = BufferUse | TensorMap | ConditionHandle | bytes


@dataclasses.dataclass(frozen=True)
class KernelNode:
    """One launch of a kernel.

    Attributes:
        name: of the instruction that it computes.
        code: what runs.
        shape: on how many threads.
        parameters: in the order of the kernel's parameters.
        written: for each parameter whether the kernel writes through it.
        begins_with_wait: True when the kernel itself waits for the kernels before it before it
            touches memory, but for its code's early loads; see Note [Programmatic edges] of
            ``lowering/build_graph.py``.
    """

    name: str
    code: KernelCode
    shape: LaunchShape
    parameters: tuple[KernelParameter, ...]
    written: tuple[bool, ...]
    begins_with_wait: bool = False

    kind = "kernel"

    @functools.cached_property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        return tuple([use for use, _ in self.uses])

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the buffers that it reads, or may read, each once."""
        return name_buffers(use for use, _ in self.uses)

    @functools.cached_property
    def results(self) -> tuple[str, ...]:
        """Names of the buffers that it writes, each once."""
        return name_buffers(use for use, is_written in self.uses if is_written)

    @functools.cached_property
    def uses(self) -> tuple[tuple[BufferUse, bool], ...]:
        """Every byte range, and whether it is written."""
        found: list[tuple[BufferUse, bool]] = []
        for parameter, is_written in zip(self.parameters, self.written, strict=True):
            # Most are of the first kind.
            if isinstance(parameter, BufferUse):
                found.append((parameter, is_written))
            elif isinstance(parameter, TensorMap):
                found.append((parameter.use, is_written))
        return tuple(found)

    @property
    def early_loads(self) -> tuple[BufferUse, ...]:
        """The byte ranges that it reads before it waits."""
        early = [self.parameters[number] for number in self.code.early]
        return tuple(each for each in early if isinstance(each, BufferUse))

    def bind(self, handle: int) -> KernelNode:
        """Returns the node with the handle of the conditional node that it decides for."""
        parameters = tuple(
            handle.to_bytes(8, "little") if each is ConditionHandle.OWN else each
            for each in self.parameters
        )
        return dataclasses.replace(self, parameters=parameters)

    def move(self, relocate: Relocate) -> KernelNode:
        """Returns the node with each of its byte ranges replaced."""
        parameters = tuple([_move_parameter(p, relocate) for p in self.parameters])
        return KernelNode(
            self.name, self.code, self.shape, parameters, self.written, self.begins_with_wait
        )


Named = TypeVar("Named")


def rename(node: Named, name: str) -> Named:
    """Returns a node under another name.

    Example:
        >>> rename(FillNode("a", BufferUse("x", 0, 4)), "b").name
        'b'
    """
    renamed = object.__new__(type(node))
    # Unlike `dataclasses.replace` this keeps the ranges that were found, which hold no name: of a
    # body that is repeated they are found once.
    renamed.__dict__.update(node.__dict__, name=name)
    return renamed


def name_buffers(uses: Iterable[BufferUse]) -> tuple[str, ...]:
    """Returns the name of each buffer that the byte ranges lie in, once, in order of first use."""
    return tuple(dict.fromkeys(use.buffer for use in uses))


def _move_parameter(parameter: KernelParameter, relocate: Relocate) -> KernelParameter:
    if isinstance(parameter, BufferUse):
        return relocate(parameter)
    if isinstance(parameter, TensorMap):
        return dataclasses.replace(parameter, use=relocate(parameter.use))
    return parameter
