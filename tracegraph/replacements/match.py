"""Match: ops of a graph and what can compute their results instead; Rule: what finds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tracegraph.ir.graph import Graph, Op, Operand, Value
from tracegraph.runtime.definition.code_target import CompileKernel
from tracegraph.runtime.device import Device

# The first compute capability with clusters.
OLDEST = "9.0"


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU that kernels of our own are written for.

    Attributes:
        architecture: its compute capability, as ``9.0``.
        processors: how many blocks run at once on a multiprocessor of their own.
        compile_kernel: makes code of a source.
    """

    architecture: str
    processors: int
    compile_kernel: CompileKernel = dataclasses.field(repr=False, compare=False)

    @property
    def has_clusters(self) -> bool:
        """True where blocks can share memory, and kernels can wait for each other's results."""
        return int(self.architecture.partition(".")[0]) >= int(OLDEST.partition(".")[0])


@dataclasses.dataclass(frozen=True, eq=False)
class OpBody:
    """What an op runs once or again and again, as rules see it.

    Attributes:
        op: the loop or checkpoint, in the graph around it.
        name: of its parameter.
        graph: the ops of the body.
    """

    op: Op
    name: str
    graph: Graph = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Match:
    """Ops of a graph, and a function that computes what they do.

    Attributes:
        op: the last of them; its line is the one that reports name.
        results: what is replaced; ops that something else needs stay.
        inputs: what the replacement reads; none depends on a result.
        compute: takes one array per input and returns one per result, of its type.
        reference: the same, added up and returned in a wider type: both sides are measured against
            it.
        terms: how many values each sum has.
        path: the bodies that it is inside of, the outermost first.

    More than six fields because the same match is found, measured, reported and spliced.
    """

    op: Op
    results: tuple[Value, ...]
    inputs: tuple[Operand, ...]
    compute: Callable[..., Sequence[Any]]
    reference: Callable[..., Sequence[Any]]
    terms: int = 1
    path: tuple[OpBody, ...] = ()


class Rule(Protocol):
    """Finds ops that have a replacement: a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """What takes the place of the ops, as reports say it."""
        ...

    def find(self, graph: Graph, machine: Machine | None) -> list[Match]:
        """Returns the matches among a graph's own ops; no value is a result of two of them.

        Args:
            graph: in which to look.
            machine: that it is to run on; None where there are no kernels of our own.
        """
        ...


def find_machine(device: Device) -> Machine | None:
    """Returns what kernels are written for on a device, or None where it takes none."""
    processors = getattr(device.jax_device, "core_count", 0)
    if device.compile_kernel is None or not processors:
        return None
    return Machine(device.target.architecture, processors, device.compile_kernel)
