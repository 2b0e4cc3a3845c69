"""Programs as XLA writes them, made by hand or at random, and an oracle that runs them.

The oracle gives every byte a token: a kernel reads all its bytes first and then writes tokens made
of its name, the place in its result and everything that it read. Two runs agree on a byte only if
they agree on all that it depends on. ``None`` is a byte that was never written; what is made of
one is ``None`` too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tracegraph.lowering.device_program import Copy, DeviceProgram, DeviceStep, Step
from tracegraph.lowering.request import BufferSpec, InputSpec, OutputSpec, Region, Role
from tracegraph.lowering.xla.program import Allocation, AllocationKind, XlaProgram
from tracegraph.runtime.nodes import BufferUse, CopyNode, FillNode, KernelNode, LaunchShape
from tracegraph.runtime.nodes import KernelCode as Code

BYTE = np.dtype(np.uint8)
CODE, ONE_BLOCK = Code("k", b"cubin"), LaunchShape((1, 1, 1), (32, 1, 1))
Memory = dict[tuple[str, int], Any]


def use(text: str) -> BufferUse:
    """Returns the range that ``name``, or ``name[start:end]``, means (64 bytes by default)."""
    name, _, rest = text.partition("[")
    start, _, end = rest.rstrip("]").partition(":")
    return BufferUse(name, int(start or 0), int(end or 64) - int(start or 0))


def kernel(
    name: str, reads: str, writes: str, *, stream: int = 0, waits: bool = False
) -> DeviceStep:
    """Returns a kernel over ranges separated by blanks; one in both lists is updated."""
    read, written = tuple(map(use, reads.split())), tuple(map(use, writes.split()))
    parameters = (*read, *written)
    flags = (*(False for _ in read), *(True for _ in written))
    node = KernelNode(name, CODE, ONE_BLOCK, parameters, flags, waits)
    return DeviceStep(node, read, written, stream)


def fill(name: str, target: str) -> DeviceStep:
    """Returns a memset to zero."""
    return DeviceStep(FillNode(name, use(target)), (), (use(target),))


def copy(name: str, source: str, target: str) -> DeviceStep:
    """Returns a copy of a range."""
    node = CopyNode(name, use(source), use(target))
    return DeviceStep(node, (use(source),), (use(target),))


def spec(name: str, nbytes: int = 64) -> BufferSpec:
    """Returns a buffer of bytes."""
    return BufferSpec(name, (nbytes,), BYTE)


def allocation(name: str, kind: AllocationKind, nbytes: int = 64, **more: Any) -> Allocation:
    """Returns one of XLA's allocations."""
    return Allocation(name, nbytes, kind, **more)


def make_region(name: str, inputs: Sequence[BufferSpec], outputs: Sequence[BufferSpec]) -> Region:
    """Returns a region whose function is never called."""
    return Region(name, lambda *arrays: (), tuple(inputs), tuple(outputs))


def make_frame(
    inputs: Sequence[BufferSpec], outputs: Sequence[BufferSpec], donated: Sequence[str] = ()
) -> DeviceProgram:
    """Returns a program without steps; results that are inputs update them."""
    names = {buffer.name for buffer in inputs}
    roles = [Role.DONATED if buffer.name in donated else Role.COPIED for buffer in inputs]
    return DeviceProgram(
        "f",
        tuple({buffer.name: buffer for buffer in (*inputs, *outputs)}.values()),
        (),
        (),
        tuple(map(InputSpec, inputs, roles)),
        tuple(OutputSpec(each, each.name if each.name in names else None) for each in outputs),
    )


def run_steps(steps: Sequence[Step], memory: Memory, place: Mapping[str, int] | None) -> None:
    """Runs steps on a memory of tokens, in the order given.

    Args:
        steps: over buffers.
        memory: tokens by buffer and offset, or with ``place`` by arena offset.
        place: arena offsets of buffers; None gives every buffer bytes of its own.
    """
    for step in steps:
        read = [_read(memory, _list_bytes(each, place)) for each in step.reads]
        node = step.node if isinstance(step, DeviceStep) else step
        for number, target in enumerate(step.writes):
            tokens: list[Any]
            if isinstance(node, (Copy, CopyNode)):
                tokens = read[0]
            elif isinstance(node, FillNode):
                tokens = [("filled", node.value)] * target.nbytes
            else:
                seen = tuple(token for tokens in read for token in tokens)
                value = None if None in seen else hash((step.name, number, seen))
                tokens = [value and (value, i) for i in range(target.nbytes)]
            memory.update(zip(_list_bytes(target, place), tokens, strict=True))


def shuffle_order(count: int, edges: Sequence[tuple[int, int]], seed: int) -> list[int]:
    """Returns one of the orders that the edges allow."""
    generator = random.Random(seed)
    left = list(range(count))
    order: list[int] = []
    while left:
        blocked = {second for first, second in edges if first in left}
        order.append(generator.choice([index for index in left if index not in blocked]))
        left.remove(order[-1])
    return order


def _read(memory: Memory, places: Sequence[tuple[str, int]]) -> list[Any]:
    return [memory.get(each) for each in places]


def _list_bytes(each: BufferUse, place: Mapping[str, int] | None) -> list[tuple[str, int]]:
    name, base = (each.buffer, 0) if place is None else ("arena", place[each.buffer])
    return [(name, base + each.offset + i) for i in range(each.nbytes)]


@st.composite
def xla_programs(draw: st.DrawFn) -> tuple[XlaProgram, Region, int]:
    """Draws a program of one region, and how many of its inputs are updated in place."""
    donated = draw(st.integers(0, 2))
    kinds = AllocationKind
    parameters = [f"#p{i}" for i in range(donated + draw(st.integers(0, 1)))]
    outputs = [f"#o{i}" for i in range(draw(st.integers(0, 2)))]
    temporaries = [f"#t{i}" for i in range(draw(st.integers(1, 2)))]
    sizes = dict.fromkeys(parameters, 3) | {
        name: draw(st.integers(1, 6)) for name in (*outputs, *temporaries)
    }
    ranges = [
        BufferUse(name, start, end - start)
        for name, size in sizes.items()
        for start in range(size)
        for end in range(start + 1, size + 1)
    ]
    written = [each for each in ranges if each.buffer not in parameters[donated:]]
    steps = []
    for index in range(draw(st.integers(1, 9))):
        reads = draw(st.lists(st.sampled_from(ranges), max_size=3))
        writes = draw(st.lists(st.sampled_from(written), min_size=1, max_size=2))
        if draw(st.integers(0, 3)) == 0:
            reads += writes
        name = f"k{draw(st.integers(0, index))}"
        flags = (*(False for _ in reads), *(True for _ in writes))
        node = KernelNode(name, CODE, ONE_BLOCK, (*reads, *writes), flags, draw(st.booleans()))
        steps.append(DeviceStep(node, tuple(reads), tuple(writes)))
    results = [
        *parameters[:donated],
        *outputs,
        *draw(st.lists(st.sampled_from([*parameters, *outputs, *temporaries]), max_size=2)),
    ]
    allocations = [
        *(allocation(n, kinds.PARAMETER, 3, parameter=i) for i, n in enumerate(parameters)),
        *(allocation(n, kinds.OUTPUT, sizes[n]) for n in outputs),
        *(allocation(n, kinds.TEMPORARY, sizes[n]) for n in temporaries),
    ]
    inputs = [spec(f"in{i}", 3) for i in range(len(parameters))]
    own = [
        spec(f"out{i}", draw(st.integers(1, sizes[name])))
        for i, name in enumerate(results[donated:])
    ]
    region = make_region("r", inputs, [*inputs[:donated], *own])
    program = XlaProgram("r", tuple(allocations), tuple(steps), tuple(results))
    return program, region, donated
