"""Nodes whose work depends on which of several GPUs they are on: collectives, device numbers.

One definition serves all GPUs of a capture. When it is made executable on one of them, these nodes
become kernels and memsets of that GPU, see `runtime/definition/placement.py`. Only a collective
over GPUs of several processes stays what it is: Note [Joint collectives] in
`lowering/cut_collectives.py`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from tracegraph.runtime.definition.nodes import BufferUse, KernelCode, LaunchShape, Relocate

# Bytes of a sum that each GPU sends to the others whole, at once; see Note [Two ways to add].
ONE_SHOT_BYTES = 256 << 10
# GPUs that one exchange may have.
MAX_MEMBERS = 16


class CollectiveKind(enum.Enum):
    """What a collective does; the values are XLA's words."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    PERMUTE = "collective-permute"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective over one array of each GPU.

    Attributes:
        kind: what is exchanged.
        dtype: XLA's name of the elements' type, as ``BF16``.
        count: elements of the source on each GPU; of a reduce-scatter and an all-to-all a multiple
            of the number of members.
        groups: numbers of the GPUs that exchange among themselves, in order of their parts.
        reduction: ``SUM``, ``PRODUCT``, ``MIN`` or ``MAX``; empty where nothing is added.
        pairs: of a permute, from which number to which.
    """

    kind: CollectiveKind
    dtype: str
    count: int
    groups: tuple[tuple[int, ...], ...]
    reduction: str = ""
    pairs: tuple[tuple[int, int], ...] = ()

    def find_group(self, number: int) -> tuple[int, ...]:
        """Returns the GPUs that one exchanges with, itself included.

        Example:
            >>> pairs = Exchange(CollectiveKind.ALL_REDUCE, "F32", 8, ((0, 2), (1, 3)), "SUM")
            >>> pairs.find_group(3)
            (1, 3)
        """
        (group,) = [group for group in self.groups if number in group]
        return group

    def crosses(self, owners: Sequence[int]) -> bool:
        """True where GPUs of several processes exchange something.

        Args:
            owners: the process of each GPU.

        Example:
            >>> pairs = Exchange(CollectiveKind.ALL_REDUCE, "F32", 8, ((0, 2), (1, 3)), "SUM")
            >>> pairs.crosses([0, 0, 1, 1]), pairs.crosses([0, 1, 0, 1])
            (True, False)
        """
        return any(len({owners[number] for number in group}) > 1 for group in self.groups)

    def find_sender(self, number: int) -> int | None:
        """Returns which GPU a permute sends to one; None if none does.

        Example:
            >>> shift = Exchange(CollectiveKind.PERMUTE, "F32", 8, ((0, 1),), pairs=((0, 1),))
            >>> shift.find_sender(1), shift.find_sender(0)
            (0, None)
        """
        return next((first for first, second in self.pairs if second == number), None)


@dataclasses.dataclass(frozen=True)
class CollectiveNode:
    """One collective, as all GPUs of a capture have it.

    Attributes:
        name: of the instruction that it computes.
        exchange: what it does.
        source: the bytes that this GPU gives.
        target: the bytes that it gets.
        code: the kernel that does it, None before it is compiled.
        shape: of the kernel's launch, the same.
    """

    name: str
    exchange: Exchange
    source: BufferUse
    target: BufferUse
    code: KernelCode | None = None
    shape: LaunchShape | None = None

    kind = "collective"

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        return (self.source, self.target)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The source, and the target where other GPUs read what this one has written there."""
        return tuple(dict.fromkeys((self.source.buffer, self.target.buffer)))

    @property
    def results(self) -> tuple[str, ...]:
        """The target."""
        return (self.target.buffer,)

    def move(self, relocate: Relocate) -> CollectiveNode:
        """Returns the node with each of its byte ranges replaced."""
        source, target = relocate(self.source), relocate(self.target)
        return dataclasses.replace(self, source=source, target=target)


@dataclasses.dataclass(frozen=True)
class JointCollectiveNode:
    """Collectives over GPUs of several processes: one eager call of XLA between two graphs.

    Attributes:
        members: the collectives, of which none needs another.
    """

    members: tuple[CollectiveNode, ...]

    kind = "joint_collective"

    @property
    def name(self) -> str:
        """That of the first collective."""
        return self.members[0].name

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        return tuple(use for member in self.members for use in member.ranges)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The buffers of the sources."""
        return tuple(dict.fromkeys(member.source.buffer for member in self.members))

    @property
    def results(self) -> tuple[str, ...]:
        """The buffers of the targets."""
        return tuple(dict.fromkeys(member.target.buffer for member in self.members))

    def move(self, relocate: Relocate) -> JointCollectiveNode:
        """Returns the node with each of its byte ranges replaced."""
        return JointCollectiveNode(tuple(member.move(relocate) for member in self.members))


@dataclasses.dataclass(frozen=True)
class NumberNode:
    """Writes the number of the GPU among those of the capture, as four bytes."""

    name: str
    target: BufferUse

    kind = "device_number"
    arguments: tuple[str, ...] = dataclasses.field(default=(), init=False)

    @property
    def ranges(self) -> tuple[BufferUse, ...]:
        """Every byte range that it names."""
        return (self.target,)

    @property
    def results(self) -> tuple[str, ...]:
        """The target."""
        return (self.target.buffer,)

    def move(self, relocate: Relocate) -> NumberNode:
        """Returns the node with its byte range replaced."""
        return NumberNode(self.name, relocate(self.target))
