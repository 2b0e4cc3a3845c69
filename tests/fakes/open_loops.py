"""Loops of unknown length, by hand and at random, and an oracle that runs them guarded or not.

Every byte has a token, as in `gpu_programs`; here loops end after so many iterations as is asked.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.fakes.gpu_programs import copy, fill, kernel, shuffle_order, use
from tests.fakes.xla_programs import ADDITION, read_computation
from tracegraph.lowering.device_program import ConditionalStep, DeviceStep, GraphStep, list_uses
from tracegraph.lowering.kernels.loops.conditions import set_flag, start_turns
from tracegraph.lowering.planning.byte_edges import find_edges
from tracegraph.lowering.planning.memory_plan import ALIGNMENT
from tracegraph.lowering.xla.guard_loops import guard_loops
from tracegraph.runtime.definition.graph_nodes import Construct, Turn
from tracegraph.runtime.definition.nodes import BufferUse, KernelNode

FLAG, COUNTER = use("flag[0:1]"), use("counter[0:4]")
COUNT = kernel("count", "counter[0:4]", "counter[0:4]")
COMPARE = kernel("compare", "counter[0:4]", "flag[0:1]")


def make_loop(*body: GraphStep, name: str = "loop") -> ConditionalStep:
    setter = set_flag(f"{name}@condition", FLAG)
    return ConditionalStep(
        name, Construct.WHILE, ((*body, COUNT, COMPARE, setter),), setter, turn=Turn(1)
    )


def make_instructions(*names: str, adds: bool = False, **opcodes: str) -> dict[int, dict[str, Any]]:
    """Returns fusions by name; with ``adds`` it is known what the one that counts does."""
    found = dict.fromkeys((*names, "count", "compare", "double"), "fusion") | opcodes
    instructions = {
        name: SimpleNamespace(opcode=opcode.replace("_", "-"), called_computation_ids=())
        for name, opcode in found.items()
    }
    if not adds:
        return {0: instructions}
    instructions["count"].called_computation_ids = (1,)
    return {0: instructions, 1: read_computation(ADDITION)}


def guard(
    steps: Sequence[GraphStep], results: str, computations: Any = None
) -> tuple[tuple[GraphStep, ...], list[int]]:
    """Returns the guarded steps, and the sizes of what was added."""
    added: list[int] = []

    def add(nbytes: int) -> BufferUse:
        added.append(nbytes)
        return BufferUse(f"added{len(added)}", 0, nbytes)

    found = computations or make_instructions()
    return guard_loops(steps, map(use, results.split()), found, add), added


def lay_out(steps: Sequence[GraphStep]) -> dict[str, int]:
    names = sorted({each.buffer for step in steps for each in list_uses(step)})
    return {name: number << 20 for number, name in enumerate(names)}


def list_bytes(each: BufferUse) -> list[tuple[str, int]]:
    return [(each.buffer, each.offset + index) for index in range(each.nbytes)]


def order(steps: Sequence[GraphStep], seed: int) -> list[tuple[GraphStep, Any]]:
    """Returns steps in some order that their edges allow, each with its body in such an order.

    A body is run many times: to find the edges of its steps again each time takes longer than to
    run them.
    """
    found = shuffle_order(len(steps), find_edges(steps, lay_out(steps)), seed)
    return [
        (step, order(step.bodies[0], seed) if isinstance(step, ConditionalStep) else None)
        for step in (steps[index] for index in found)
    ]


def run(ordered: list[tuple[GraphStep, Any]], memory: dict[Any, Any], count: int) -> None:
    """Runs what `order` returns; open loops have so many iterations."""
    for step, body in ordered:
        if isinstance(step, DeviceStep):
            run_step(step, memory, count)
        elif step.setter.writes:
            for turn in range(2):
                run(body, memory, count + turn)
        else:
            run_step(step.setter, memory, count)
            while memory["handle"]:
                run(body, memory, count)


def run_step(step: DeviceStep, memory: dict[Any, Any], count: int) -> None:
    node: Any = step.node
    name = step.name.partition("@")[0]
    symbol = node.code.symbol if isinstance(node, KernelNode) else ""
    if symbol.startswith("keep_state"):
        copy_bytes(memory, *node.parameters[0::3], *node.parameters[1::3])
    elif symbol.startswith("end_turn"):
        run_end(node, memory)
    elif symbol == "set_flag":
        memory["handle"] = memory[step.reads[0].buffer, step.reads[0].offset]
    elif symbol.startswith("count_ahead"):
        count_ahead(node, memory)
    elif name == "count":
        memory["counter", 0] += 1
    elif name == "compare":
        (source,), (target,) = step.reads, step.writes
        is_more = memory[source.buffer, source.offset] < count
        memory[target.buffer, target.offset] = int(is_more)
    elif name == "reset":
        memory["counter", 0] = 0
    elif step.kind == "memcpy":
        copy_bytes(memory, *step.reads, *step.writes)
    else:
        seen = tuple(memory.get(each) for part in step.reads for each in list_bytes(part))
        for number, part in enumerate(step.writes):
            for place, each in enumerate(list_bytes(part)):
                memory[each] = hash((name, number, place, seen))


def copy_bytes(memory: dict[Any, Any], *uses: Any) -> None:
    half = len(uses) // 2
    pairs = zip(uses[:half], uses[half:], strict=True)
    found = {
        target: memory.get(source)
        for one, other in pairs
        for source, target in zip(list_bytes(one), list_bytes(other), strict=True)
    }
    memory.update(found)


def run_end(node: Any, memory: dict[Any, Any]) -> None:
    """Does what the kernel of `end_turn` does."""
    count = int(node.code.symbol.split("_")[3])
    flags = [memory[each.buffer, each.offset] for each in node.parameters[1 : count + 1]]
    memory["handle"] = int(all(flags))
    ended = flags.index(0) if 0 in flags else count
    rest = node.parameters[count + 1 :]
    if ended == count - 1:
        return
    size = count + 1
    for first in range(0, len(rest) if ended < count else 0, size):
        copy_bytes(memory, rest[first + 2 + ended], rest[first])


def count_ahead(node: Any, memory: dict[Any, Any]) -> None:
    """Does what the kernel of `count_values` does."""
    source, values, *numbers = node.parameters
    first, step, count = (int.from_bytes(each, "little") for each in numbers)
    start = memory[source.buffer, source.offset] + first
    for index in range(count):
        offset = values.offset + index * ALIGNMENT
        memory |= {(values.buffer, offset + place): 0 for place in range(4)}
        memory[values.buffer, offset] = start + index * step


def draw_program(generator: random.Random) -> tuple[list[GraphStep], str]:
    """Returns a loop, and what is around it, over a few small arrays."""

    def draw(names: str = "xtuv") -> str:
        start = generator.choice([0, 0, 4])
        end = generator.choice([start + 4, 8])
        return f"{generator.choice(names)}[{start}:{end}]"

    def draw_step(index: int) -> DeviceStep:
        target = draw()
        choice = generator.random()
        if choice < 0.2 and use(target).nbytes == 4:
            source = generator.choice([each for each in "xtuv" if each != target[0]])
            return copy(f"k{index}", f"{source}[0:4]", target)
        if choice < 0.25:
            return fill(f"k{index}", target)
        # XLA's scratch may be where the flag is, before it is written.
        reads = draw() if choice < 0.5 else f"{draw()} {target}"
        return kernel(f"k{index}", reads, f"{target} {draw('yz')}" if choice > 0.8 else target)

    more = ""
    body = [draw_step(index) for index in range(generator.randrange(1, 6))]
    if generator.random() < 0.4:
        # A value that is made elsewhere and copied to its place, as XLA does at the end of a body.
        source, target = generator.sample(["x[0:8]", "t[0:8]", "w[0:8]"], 2)
        source = "flag[0:8]" if generator.random() < 0.3 else source
        new = kernel("k7", f"{draw()} {target}" if generator.random() < 0.6 else draw(), source)
        more = f" {target} y[0:8]"
        later = [kernel("k6", source, "y[0:8]")] if generator.random() < 0.2 else body[2:3]
        body[1:] = [new, *body[1:2], copy("k8", source, target), *later]
    elif generator.random() < 0.3:
        body = [kernel("scratch", draw(), "flag[0:4]"), kernel("k9", "flag[0:4] x[0:4]", draw())]
    if generator.random() < 0.5:
        # As a slice that moves, which reads how often the loop has turned.
        body.insert(generator.randrange(len(body)), kernel("k5", "counter[0:4]", draw()))
    loop: GraphStep = make_loop(*body)
    steps: list[GraphStep] = [COMPARE, loop, kernel("after", f"{draw()} {draw()}", draw())]
    if generator.random() < 0.4:
        start = start_turns("outer@start", use("turns[0:4]"))
        inside = (kernel("reset", "q[0:4]", "counter[0:4]"), *steps)
        steps = [ConditionalStep("outer", Construct.WHILE, (inside,), start, turn=Turn(1))]
    results = " ".join({draw("xtuvyz") for _ in range(generator.randrange(1, 4))})
    return steps, results + more + " counter[0:4]" * (generator.random() < 0.3)


NAMES = [*(f"k{index}" for index in range(10)), "scratch", "after", "reset"]


def count_wrong(*, adds: bool = True, enough: int = 101) -> tuple[int, int]:
    """Returns how many random programs were guarded, and how many of them leave other bytes.

    Args:
        adds: it is known that a loop's counter is added to.
        enough: ends at so many that leave other bytes.
    """
    guarded = wrong = 0
    computations = make_instructions(*NAMES, adds=adds)
    for seed in range(100):
        steps, results = draw_program(random.Random(seed))
        found, added = guard(steps, results, computations)
        guarded += bool(added)
        differs = False
        ordered, reordered = order(steps, seed), order(found, seed + 1)
        for count in (0, 1, 2, 4, 5, 6, 11):
            wanted, got = (
                {(n, i): f"{n}{i}" for n in "xtuvyzq" for i in range(8)}
                | {("flag", i): f"flag{i}" for i in range(8)}
                | {("counter", i): 0 for i in range(4)}
                for _ in range(2)
            )
            run(ordered, wanted, count)
            run(reordered, got, count)
            kept = [each for part in map(use, results.split()) for each in list_bytes(part)]
            differs |= any(wanted.get(each) != got.get(each) for each in kept)
        wrong += differs
        if wrong == enough:
            break
    return guarded, wrong
