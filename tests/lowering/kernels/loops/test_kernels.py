"""The kernels of our own: their text is one that CUDA takes, and launches fit it."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

from tests.deviceless import topology
from tracegraph.lowering.device_program import DeviceStep
from tracegraph.lowering.kernels.loops.conditions import (
    CONDITIONS,
    count_turn,
    set_branch,
    set_flag,
    set_index,
    start_turns,
)
from tracegraph.lowering.kernels.loops.counters import COUNT_AHEAD, count_values
from tracegraph.lowering.kernels.loops.guards import end_turn, keep_state
from tracegraph.lowering.kernels.loops.piece_loops import Piece, PieceLoop, write_piece_loops
from tracegraph.lowering.kernels.loops.slices import COPY_SLICE, MovingUse, copy_slice
from tracegraph.runtime.cuda.comparison import COMPARE_PIECES
from tracegraph.runtime.cuda.measurement import MEASURE_PIECES
from tracegraph.runtime.definition.nodes import BufferUse, ConditionHandle, KernelNode

FLAG, COUNTER = BufferUse("flag", 8, 1), BufferUse("counter", 0, 4)
STEPS = {
    "set_flag": set_flag("a", FLAG),
    "set_index": set_index("a", COUNTER, 3),
    "set_branch_1": set_branch("a", FLAG, 1, 2),
    "set_branch_4": set_branch("a", COUNTER, 1, 3),
    "start_turns": start_turns("a", COUNTER),
    "count_turn": count_turn("a", COUNTER, 7),
}


def make_copy(nbytes: int, first: int = 0, step: int = 0) -> DeviceStep:
    source = MovingUse(BufferUse("a", 0, 4096), nbytes, first, step)
    return copy_slice("copy", source, MovingUse(BufferUse("b", 0, nbytes), nbytes, 0), COUNTER)


def read_kernel(step: DeviceStep) -> KernelNode:
    assert isinstance(step.node, KernelNode)
    return step.node


KEPT = [(BufferUse("a", 0, 64), BufferUse("b", 0, 64)), (FLAG, BufferUse("b", 64, 1))]
KEEP = keep_state("keep", KEPT)
COUNT = count_values("count", COUNTER, BufferUse("values", 0, 516), 1, 1)
END = end_turn("turn", [FLAG] * 3, [(target, [source] * 2) for source, target in KEPT])

PIECES = (Piece(0, 3, 8, 20), Piece(1, 0, 5, 7), Piece(1, 1, 64, 64))
PIECE_OPS = (("add", 0, 1), ("subtract", 2, 3), ("multiply", 4, 2))
PIECE_LOOP = PieceLoop(64, PIECES, PIECE_OPS, ((5, 2),))

TEXTS = {
    "keep_state": read_kernel(KEEP).code.cubin,
    "end_turn": read_kernel(END).code.cubin,
    "conditions": CONDITIONS,
    "counters": COUNT_AHEAD,
    "pieces": write_piece_loops([PIECE_LOOP] * 2, [(0, 1, 0), (2, 1, 3)]),
    "slices": COPY_SLICE,
    "comparison": COMPARE_PIECES.cubin,
    "measurement": MEASURE_PIECES.cubin,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_assembler_takes_the_text(text: bytes, tmp_path: pathlib.Path):
    assembler = topology.find_assembler()
    if assembler is None:
        pytest.skip("needs the wheel of nvcc; run make deviceless")
    source = tmp_path / "kernels.ptx"
    source.write_bytes(text.rstrip(b"\0"))
    for target in ("sm_80", "sm_90a"):
        command = [assembler, f"-arch={target}", "-c", str(source), "-o", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr


@pytest.mark.parametrize(
    "step",
    [*STEPS.values(), make_copy(64), COUNT, KEEP, END],
    ids=lambda step: step.node.code.symbol,
)
def test_a_launch_has_the_parameters_of_its_kernel(step: DeviceStep):
    node = read_kernel(step)
    head = re.search(rf"\.entry {node.code.symbol}\(([^)]*)\)", node.code.cubin.decode())
    assert head is not None
    assert len(head[1].split(",")) == len(node.parameters) == len(node.written)
    assert head[1].count("64") == len(node.parameters)


@pytest.mark.parametrize("name", STEPS)
def test_a_setter_takes_the_handle_first(name: str):
    step, node = STEPS[name], read_kernel(STEPS[name])
    assert node.parameters[0] is ConditionHandle.OWN
    assert {use for use, _ in node.uses} == {*step.reads, *step.writes}
    assert {use for use, is_written in node.uses if is_written} == {*step.writes}
    assert node.bind(77).parameters[0] == (77).to_bytes(8, "little")
    assert node.bind(77).parameters[1:] == node.parameters[1:]


@pytest.mark.parametrize(
    ("nbytes", "first", "step", "word_bytes"),
    [(64, 0, 64, 16), (64, 16, 8, 8), (64, 4, 64, 4), (6, 0, 6, 1), (64, 0, 2, 1), (24, 0, 24, 8)],
)
def test_the_widest_access_that_is_aligned_at_every_turn(
    nbytes: int, first: int, step: int, word_bytes: int
):
    assert read_kernel(make_copy(nbytes, first, step)).code.symbol == f"copy_slice_{word_bytes}"


def test_a_piece_stays_within_its_bounds():
    piece = MovingUse(BufferUse("a", 32, 64), 16, -8, 24)
    assert [piece.find(turn).offset - 32 for turn in range(4)] == [0, 16, 40, 48]


def test_what_is_around_a_piece_is_kept():
    whole = BufferUse("b", 0, 256)
    step = copy_slice("copy", MovingUse(FLAG, 1, 0), MovingUse(whole, 1, 0, 1), COUNTER)
    assert whole in step.reads
    assert step.writes == (whole,)
    assert make_copy(64).reads == (BufferUse("a", 0, 4096), COUNTER)
