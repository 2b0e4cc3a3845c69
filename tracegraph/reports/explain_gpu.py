"""The parts of `explain`'s report that only a capture on a GPU has."""

from __future__ import annotations

from collections import Counter

from tracegraph.lowering.lower import Lowered
from tracegraph.options import Options
from tracegraph.runtime.definition.graph_nodes import ConditionalNode, list_nested
from tracegraph.runtime.device import Device
from tracegraph.tracing.checked_graph import CheckedGraph
from tracegraph.verification.expectation import expect
from tracegraph.verification.report import VerificationReport

# In the order of the report.
_KINDS = ("call", "kernel", "memcpy", "memset", "matmul", "cudnn", "fft", "scale")
_KINDS += ("triangular_solve", "ffi_call", "if", "switch", "while")
# Where the kind is not the word.
_WORDS = {
    "cudnn": "cuDNN call",
    "fft": "FFT",
    "triangular_solve": "triangular solve",
    "ffi_call": "handler call",
}


def describe_device(device: Device) -> str:
    """Returns the name of a device and what it is, as ``cuda:0: NVIDIA H200``."""
    return f"{device.name}: {device.jax_device.device_kind}"


def list_compiled_regions(lowered: Lowered) -> list[str]:
    """Returns one line per region, and one per option of XLA that it was compiled with."""
    eager = lowered.eager_regions
    lines = []
    for region in lowered.regions:
        how = "eager, one call between two graphs" if region.name in eager else "captured"
        in_place = f", {region.in_place} of them in place" if region.in_place else ""
        lines.append(
            f"{region.name}: {how}, reads {_count(len(region.inputs), 'buffer', 'buffers')}, "
            f"writes {len(region.outputs)}{in_place}"
        )
        lines += [
            f"  compiled with {name}={value}, over XLA's defaults" for name, value in region.options
        ]
    return lines


def count_nodes(lowered: Lowered) -> str:
    """Returns how many nodes of each kind there are, and how many edges are programmatic.

    Nodes inside of branches and loops count once, however often they run.
    """
    stages = [stage for stage in lowered.definition.stages if stage.is_captured]
    kinds = Counter(node.kind for stage in stages for node in list_nested(stage.nodes))
    words = {kind: _WORDS.get(kind, kind) for kind in _KINDS if kinds[kind]}
    nodes = [_count(kinds[kind], word, f"{word}s") for kind, word in words.items()]
    edges = sum(len(stage.edges) for stage in stages)
    programmatic = sum(len(stage.programmatic) for stage in stages)
    text = (
        f"{_count(len(stages), 'graph', 'graphs')}: {', '.join(nodes) or 'no nodes'}; "
        f"{_count(edges, 'edge', 'edges')}"
    )
    # Compiled calls wait for each other as a whole.
    return f"{text}, {programmatic} of them programmatic" if lowered.takes_kernels else text


def list_turns(lowered: Lowered) -> list[str]:
    """Returns a line with how many loops have so many iterations per turn; none without a loop.

    See Note [Unrolled loops] in `lowering/xla/control_flow.py` and Note [Guarded iterations] in
    `lowering/xla/guard_loops.py`.
    """
    turns = Counter(
        str(node.turn)
        for stage in lowered.definition.stages
        for node in list_nested(stage.nodes)
        if isinstance(node, ConditionalNode) and node.turn is not None
    )
    found = [f"{count} with {turn}" for turn, count in turns.items()]
    return [f"loops: {', '.join(found)}"] if found else []


def describe_verification(
    options: Options,
    checked: CheckedGraph,
    lowered: Lowered,
    report: VerificationReport | None,
) -> str:
    """Returns what the graph was compared with, or will be at its first call.

    Args:
        options: how it is captured.
        checked: the traced graph.
        lowered: its lowering.
        report: of the captured graph; None before the first call.
    """
    if report is not None:
        return str(report)
    if not options.verify:
        return "none: verify=False"
    expected = expect(checked, lowered)
    if expected.skipped:
        return f"none: {expected.skipped}"
    text = f"at the first call: two replays compared with {expected.reference}, {expected.promise}"
    return f"{text}; {expected.note}" if expected.note else text


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
