"""Programs as XLA writes them, made by hand or at random, and an oracle that runs them.

The oracle gives every byte a token: a kernel reads all its bytes first and then writes tokens made
of its name, the place in its result and everything that it read. Two runs agree on a byte only if
they agree on all that it depends on. ``None`` is a byte that was never written; what is made of
one is ``None`` too. Which way a branch or a loop goes follows from its name and how often it has
run, so that it is the same for any bytes.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tracegraph.lowering.device_program import (
    ConditionalStep,
    Copy,
    DeviceProgram,
    DeviceStep,
    GraphStep,
    Step,
)
from tracegraph.lowering.request import BufferSpec, InputSpec, OutputSpec, Region, Role
from tracegraph.lowering.xla.program import Allocation, AllocationKind, XlaProgram
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, Construct, Node
from tracegraph.runtime.definition.nodes import (
    BufferUse,
    CopyNode,
    FillNode,
    KernelNode,
    LaunchShape,
)
from tracegraph.runtime.definition.nodes import KernelCode as Code

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


def run_steps(
    steps: Sequence[Step],
    memory: Memory,
    place: Mapping[str, int] | None,
    nodes: Sequence[Node] | None = None,
) -> None:
    """Runs steps on a memory of tokens, in the order given.

    Args:
        steps: over buffers.
        memory: tokens by buffer and offset, or with ``place`` by arena offset.
        place: arena offsets of buffers; None gives every buffer bytes of its own.
        nodes: those of the steps; then bodies run in some order that their edges allow.
    """
    for index, step in enumerate(steps):
        if isinstance(step, ConditionalStep):
            _run_conditional(step, memory, place, None if nodes is None else nodes[index])
            continue
        read = [_read(memory, _list_bytes(each, place)) for each in step.reads]
        if not step.writes:
            # What only sets a condition leaves no other trace.
            _leave_trace(memory, f"seen by {step.name}", [t for tokens in read for t in tokens])
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


def _run_conditional(
    step: ConditionalStep, memory: Memory, place: Mapping[str, int] | None, node: Node | None
) -> None:
    run_steps([step.setter], memory, place)
    visits = _leave_trace(memory, f"visited {step.name}", True)
    chance = zlib.crc32(f"{step.name} {visits}".encode())
    if step.construct is Construct.WHILE:
        chosen = [0] * (chance % 3)
    else:
        chosen = [number for number in [chance % 2] if number < len(step.bodies)]
    for turn, number in enumerate(chosen):
        body = step.bodies[number]
        if node is None:
            run_steps(body, memory, place)
            continue
        assert isinstance(node, ConditionalNode)
        inner = node.bodies[number]
        order = shuffle_order(len(body), inner.edges, chance + turn)
        nodes = [inner.nodes[index] for index in order]
        run_steps([body[index] for index in order], memory, place, nodes)


def _leave_trace(memory: Memory, name: str, value: Any) -> int:
    """Keeps a value under a name and the number of values before, which is returned."""
    count = next(number for number in itertools.count() if (name, number) not in memory)
    memory[name, count] = value
    return count


def list_traces(memory: Memory) -> dict[tuple[str, int], Any]:
    """Returns what kernels have read that write nothing, and how often each step was visited."""
    traces = ("seen by ", "visited ")
    return {key: value for key, value in memory.items() if key[0].startswith(traces)}


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


def _draw_steps(
    draw: st.DrawFn,
    ranges: Sequence[BufferUse],
    written: Sequence[BufferUse],
    count: int,
    prefix: str,
) -> list[GraphStep]:
    steps: list[GraphStep] = []
    for index in range(count):
        if len(prefix) < 5 and draw(st.integers(0, 4)) == 0:
            steps.append(_draw_conditional(draw, ranges, written, f"{prefix}{index}."))
            continue
        if draw(st.integers(0, 4)) == 0 and (copied := _draw_copy(draw, ranges, written)):
            steps.append(copied)
            continue
        reads = draw(st.lists(st.sampled_from(ranges), max_size=3))
        writes = draw(st.lists(st.sampled_from(written), min_size=1, max_size=2))
        if draw(st.integers(0, 3)) == 0:
            reads += writes
        name = f"{prefix}{draw(st.integers(0, index))}"
        steps.append(_make_step(name, reads, writes, draw(st.booleans())))
    return steps


def _draw_copy(
    draw: st.DrawFn, ranges: Sequence[BufferUse], written: Sequence[BufferUse]
) -> DeviceStep | None:
    target = draw(st.sampled_from(written))
    sources = [each for each in ranges if each.nbytes == target.nbytes]
    sources = [each for each in sources if not each.overlaps(target)]
    if not sources:
        return None
    source = draw(st.sampled_from(sources))
    return DeviceStep(CopyNode("copy", source, target), (source,), (target,))


def _draw_conditional(
    draw: st.DrawFn, ranges: Sequence[BufferUse], written: Sequence[BufferUse], prefix: str
) -> ConditionalStep:
    construct = draw(st.sampled_from([Construct.IF, Construct.WHILE, Construct.SWITCH]))
    choices = {Construct.IF: (1, 2), Construct.WHILE: (1, 1), Construct.SWITCH: (2, 2)}
    counter = [draw(st.sampled_from(written))] if draw(st.booleans()) else []
    setter = _make_step(f"{prefix}set", [] if counter else [draw(st.sampled_from(ranges))], counter)
    bodies = [
        _draw_steps(draw, ranges, written, draw(st.integers(0, 3)), f"{prefix}{number}.")
        for number in range(draw(st.integers(*choices[construct])))
    ]
    if construct is Construct.WHILE:
        again = counter or [draw(st.sampled_from(ranges))]
        bodies[0].append(_make_step(f"{prefix}again", again, counter))
    return ConditionalStep(f"{prefix}node", construct, tuple(map(tuple, bodies)), setter)


def _make_step(
    name: str, reads: Sequence[BufferUse], writes: Sequence[BufferUse], waits: bool = False
) -> DeviceStep:
    flags = (*(False for _ in reads), *(True for _ in writes))
    node = KernelNode(name, CODE, ONE_BLOCK, (*reads, *writes), flags, waits)
    return DeviceStep(node, tuple(reads), tuple(writes))


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
    # Most of what is made of bytes that were never written is undefined.
    defined = draw(st.sampled_from([(), (*outputs, *temporaries)]))
    steps: list[GraphStep] = [
        _make_step(f"define {name}", (), [BufferUse(name, 0, sizes[name])]) for name in defined
    ]
    steps += _draw_steps(draw, ranges, written, draw(st.integers(1, 9)), "k")
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
