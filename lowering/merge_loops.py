"""Merge loops: many kernels that compute the same function of small arrays become few.

Note [Merged loops]
An optimizer updates each leaf of a model by a kernel of its own: a thousand small leaves are a
thousand nodes of a microsecond each. XLA has no pass that would merge them. Here those that compute
the same for each element, see `ElementLoop`, become one node with the arrays of all of them.

A step is moved back to the place of the last one that it is merged with. It may, if no step on the
way writes what it reads or touches what it writes. Steps are grouped by function and by size, since
blocks of a small array would wait for those of a large one. A group ends where a step cannot be
moved, where the parameters of one kernel end, or where the temporaries that wait for it would take
more memory than is worth it: a gradient is alive until its leaf is updated. It also ends where more
steps that cannot be merged lie between its members than it has members: a layer's update runs
beside the backward kernels of the layers before it, and takes no time until it waits for the last.

What is left is moved ahead, to the place of the first one: the weights of each layer are rounded to
16 bits in front of its matmul, which must not wait for the weights of the last layer.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from tracegraph.lowering.device_program import DeviceProgram, DeviceStep, Step, list_uses
from tracegraph.lowering.element_loops import ElementLoop, LoopFunction
from tracegraph.lowering.kernels.loops.merged_loops import (
    OPTIONS,
    SYMBOL,
    THREADS,
    LoopArguments,
    write_merged_loops,
)
from tracegraph.lowering.planning.drop_steps import drop_steps
from tracegraph.lowering.planning.rename_values import rename_passing_values
from tracegraph.runtime.definition.code_target import CompileKernel
from tracegraph.runtime.definition.nodes import BufferUse, KernelCode, KernelNode, LaunchShape

# Fewer small kernels take about as long as one that has to find its arrays.
MIN_STEPS = 8
# Above it a kernel of its own keeps most of a GPU busy.
MAX_ELEMENTS = 1 << 16
# Values of loops that take part; see Note [Passing values].
MAX_VALUE_BYTES = 4 * MAX_ELEMENTS
# Of temporaries that one merged kernel reads.
MAX_HELD_BYTES = 4 << 20
# A kernel takes 4096 bytes of parameters on every GPU; a rest is left for what the driver adds.
MAX_PARAMETERS = 500


def merge_loops(program: DeviceProgram, compile_kernel: CompileKernel) -> DeviceProgram:
    """Returns the program with small loops merged, see Note [Merged loops].

    Args:
        program: on one stream; one on several is returned as it is. Its edges lead from earlier
            steps to later ones.
        compile_kernel: of the device.

    Returns:
        The program; what its kernels compute is left out.

    Raises:
        UnsupportedError: there is no compiler.
    """
    if len({step.stream for step in program.steps}) <= 1:
        freed = rename_passing_values(program, MAX_VALUE_BYTES)
        if groups := _Grouping(freed).find_groups():
            program = _merge_groups(freed, groups, -1, compile_kernel)
        groups = _Grouping(program, moves_ahead=True).find_groups()
        program = _merge_groups(program, groups, 0, compile_kernel)
    plain = tuple(_forget_loop(step) for step in program.steps)
    return dataclasses.replace(program, steps=plain)


def _merge_groups(
    program: DeviceProgram, groups: Sequence[list[int]], place: int, compile_kernel: CompileKernel
) -> DeviceProgram:
    """Returns the program with each group merged, in place of the member that is named."""
    steps = list(program.steps)
    gone: list[int] = []
    for group in groups:
        members = [steps[index] for index in group]
        loops = [each for each in members if isinstance(each, DeviceStep)]
        kept = group.pop(place)
        steps[kept] = _merge(loops, compile_kernel)
        gone += group
    return drop_steps(dataclasses.replace(program, steps=tuple(steps)), gone)


def _forget_loop(step: Step) -> Step:
    if not isinstance(step, DeviceStep) or step.loop is None:
        return step
    return dataclasses.replace(step, loop=None)


def can_merge(step: DeviceStep) -> bool:
    """True for a step whose kernel is known to be a loop over few elements."""
    loop = step.loop
    return isinstance(step.node, KernelNode) and loop is not None and 0 < loop.count <= MAX_ELEMENTS


class _Group:
    """Steps that become one, at the place of the last of them or of the first.

    Args:
        fixed: buffers that are there all the time.
        moves_ahead: at the place of the first one, so that what they write is held, not what they
            read.
        others: the same.

    Attributes:
        members: their indices, in order.
        others: steps in front of the first one that cannot be merged.
    """

    def __init__(self, fixed: frozenset[str], others: int, *, moves_ahead: bool) -> None:
        self.members: list[int] = []
        self.others = others
        self._fixed, self._moves_ahead, self._held_bytes = fixed, moves_ahead, 0
        self._parameters: set[BufferUse] = set()
        self._reads: defaultdict[str, set[BufferUse]] = defaultdict(set)
        self._writes: defaultdict[str, set[BufferUse]] = defaultdict(set)

    def add(self, index: int, step: DeviceStep) -> None:
        """Adds a step behind the others."""
        self.members.append(index)
        self._parameters.update(step.ranges)
        self._held_bytes += self._count_held(step)
        for use in step.reads:
            self._reads[use.buffer].add(use)
        for use in step.writes:
            self._writes[use.buffer].add(use)

    def has_room(self, step: DeviceStep) -> bool:
        """True where one kernel takes a further step's parameters, and memory what it holds."""
        held = self._held_bytes + self._count_held(step)
        is_small = len(self._parameters.union(step.ranges)) <= MAX_PARAMETERS
        return is_small and held <= MAX_HELD_BYTES

    def _count_held(self, step: DeviceStep) -> int:
        uses = step.writes if self._moves_ahead else step.reads
        return sum(use.nbytes for use in uses if use.buffer not in self._fixed)

    def can_pass(self, step: Step) -> bool:
        """True where all members may change places with a step behind them."""
        writes = [(use, self._reads.get(use.buffer, ())) for use in step.writes]
        uses = [(use, self._writes.get(use.buffer, ())) for use in list_uses(step)]
        return not any(use.overlaps(own) for use, others in (*writes, *uses) for own in others)


class _Grouping:
    """Finds the steps that can be merged, in one walk over a program.

    Args:
        program: on one stream.
        moves_ahead: at the place of the first of a group, not of the last.
    """

    def __init__(self, program: DeviceProgram, *, moves_ahead: bool = False) -> None:
        self._steps, self._moves_ahead = program.steps, moves_ahead
        # Steps so far that cannot be merged; for each buffer the last that wrote or touched it.
        self._others = 0
        self._written: dict[str, int] = {}
        self._touched: dict[str, int] = {}
        specs = (*program.inputs, *program.outputs)
        self._fixed = frozenset(spec.buffer.name for spec in specs)

    def find_groups(self) -> list[list[int]]:
        """Returns the indices of the steps of each group."""
        found: list[_Group] = []
        latest: dict[Hashable, _Group] = {}
        for index, step in enumerate(self._steps):
            if isinstance(step, DeviceStep) and step.loop is not None and can_merge(step):
                key = _make_key(step, step.loop)
                group = latest.get(key)
                if group is None or not self._takes(group, index, step):
                    ahead = self._moves_ahead
                    group = latest[key] = _Group(self._fixed, self._others, moves_ahead=ahead)
                    found.append(group)
                group.add(index, step)
            else:
                self._others += 1
            self._written.update((use.buffer, index) for use in step.writes)
            self._touched.update((use.buffer, index) for use in list_uses(step))
        return [group.members for group in found if len(group.members) >= MIN_STEPS]

    def _takes(self, group: _Group, index: int, step: DeviceStep) -> bool:
        """True where a group and a step may be moved to one place."""
        if not group.has_room(step):
            return False
        if self._moves_ahead:
            return self._may_rise(step, group.members[0])
        if self._others - group.others > len(group.members):
            return False
        behind = range(group.members[-1] + 1, index + 1)
        return all(group.can_pass(self._steps[each]) for each in behind)

    def _may_rise(self, step: DeviceStep, place: int) -> bool:
        """True where a step may be moved to the place of an earlier one."""
        latest = [self._written.get(use.buffer, -1) for use in step.reads]
        latest += [self._touched.get(use.buffer, -1) for use in step.writes]
        return max(latest, default=-1) < place


def _make_key(step: DeviceStep, loop: ElementLoop) -> Hashable:
    assert isinstance(step.node, KernelNode)
    blocks = -(-loop.count // THREADS)
    return loop.function, blocks.bit_length(), step.node.begins_with_wait


def _merge(steps: Sequence[DeviceStep], compile_kernel: CompileKernel) -> DeviceStep:
    """Returns one step for several of one function."""
    members = [(step.loop, step.node) for step in steps if step.loop is not None]
    nodes = [(loop, node) for loop, node in members if isinstance(node, KernelNode)]
    first, waits = nodes[0][0].function, nodes[0][1].begins_with_wait
    kinds = _list_kinds(first)
    parameters: dict[BufferUse, tuple[str, bool]] = {}
    for loop, node in nodes:
        for place, kind in zip(loop.arguments, kinds, strict=True):
            use, is_written = node.uses[place]
            is_written |= parameters.get(use, (kind, False))[1]
            parameters[use] = kind, is_written
    numbers = {use: number for number, use in enumerate(parameters)}
    arguments = [_number_arguments(loop, node, numbers) for loop, node in nodes]
    types = [kind for kind, _ in parameters.values()]
    source = write_merged_loops(first, arguments, types, waits=waits)
    blocks = max(-(-each.count // THREADS) for each in arguments)
    node = KernelNode(
        steps[0].name,
        KernelCode(SYMBOL, compile_kernel(source, OPTIONS).cubin),
        LaunchShape((blocks, len(steps), 1), (THREADS, 1, 1)),
        tuple(parameters),
        tuple(is_written for _, is_written in parameters.values()),
        waits,
    )
    reads = dict.fromkeys(use for step in steps for use in step.reads)
    writes = dict.fromkeys(use for step in steps for use in step.writes)
    return DeviceStep(node, tuple(reads), tuple(writes), steps[0].stream)


def _number_arguments(
    loop: ElementLoop, node: KernelNode, numbers: Mapping[BufferUse, int]
) -> LoopArguments:
    places = [numbers[node.ranges[place]] for place in loop.arguments]
    count = len(loop.function.operands)
    return LoopArguments(loop.count, tuple(places[:count]), tuple(places[count:]))


def _list_kinds(function: LoopFunction) -> list[str]:
    operands = [operand.kind for operand in function.operands]
    return operands + [function.find_kind(result) for result in function.results]
