"""Fourier transforms: the plan, its copy, its scaling, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.xla_programs import make_program, name_thunk
from tracegraph.lowering.device_program import list_device_steps
from tracegraph.lowering.xla import fft
from tracegraph.lowering.xla.decode import decode_executable
from tracegraph.runtime.definition.library_calls import LibraryCall, Scale, Transform
from tracegraph.runtime.definition.library_nodes import LibraryCallNode
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode
from tracegraph.runtime.errors import CudaError, UnsupportedError

SOURCE, TARGET = BufferUse("#1", 0, 32), BufferUse("#0", 0, 32)
WORK = 256


def shape(kind: str, dims: str, order: str = "") -> str:
    sizes = dims.split()
    axes = order.split() or [str(axis) for axis in reversed(range(len(sizes)))]
    return (
        f"element_type: {kind} "
        + " ".join(f"dimensions: {size} is_dynamic_dimension: false" for size in sizes)
        + " layout { "
        + " ".join(f"minor_to_major: {axis}" for axis in axes)
        + " tail_padding_alignment_in_elements: 1 }"
    )


def make_fft(
    kind: str = "FFT",
    lengths: str = "4",
    source: str = shape("C64", "4"),
    target: str = shape("C64", "4"),
    sizes: tuple[int, int] = (32, 32),
    more: str = "",
) -> str:
    """Returns a thunk from parameter #1 to result #0."""
    return (
        f"{name_thunk('fft.1')} fft_thunk {{ fft_type: {kind} "
        + " ".join(f"fft_length: {each}" for each in lengths.split())
        + f" input_buffer {{ buffer_allocation_index: 1 size: {sizes[0]} }}"
        f" output_buffer {{ buffer_allocation_index: 0 size: {sizes[1]} }}"
        f" input_shape {{ {source} }} output_shape {{ {target} }} {more} }}"
    )


def decode(thunk: str, plan: Any = lambda call: WORK if call.kind == "fft" else 0) -> list[Any]:
    program = decode_executable(make_program(thunk), name="step", plan_call=plan)
    return list(list_device_steps(program.steps))


def refuse(thunk: str, plan: Any = None) -> str:
    with pytest.raises(UnsupportedError) as caught:
        decode(thunk, plan)
    return caught.value.why


def test_a_forward_transform_is_one_call() -> None:
    (step,) = decode(make_fft())
    work = BufferUse("#added.0", 0, WORK)
    operands = (("source", SOURCE), ("target", TARGET), ("workspace", work))
    call = Transform("C2C", False, (4,), (4,), (4,))
    assert step.node == LibraryCallNode("fft.1", call, operands)
    assert (step.reads, step.writes) == ((SOURCE,), (TARGET, work))
    assert step.node.results == ("#0", "#added.0")
    assert step.node.move(lambda use: use._replace(offset=8)).ranges[0].offset == 8


def test_an_inverse_transform_is_scaled_by_cublas() -> None:
    step, scale = decode(make_fft("IFFT"))
    assert step.node.call == Transform("C2C", True, (4,), (4,), (4,))
    assert scale.node == LibraryCallNode(
        "fft.1@scale", Scale("complex64", 4, 0.25), (("target", TARGET),)
    )
    assert scale.reads == scale.writes == (TARGET,)


def test_a_factor_is_rounded_as_xla_does() -> None:
    shapes = (shape("C64", "2"), shape("F32", "3"))
    *_, scale = decode(make_fft("IRFFT", "3", *shapes, (16, 12)))
    assert scale.node.call == Scale("float32", 3, 0.3333333432674408)
    shapes = (shape("C128", "2"), shape("F64", "3"))
    *_, scale = decode(make_fft("IRFFT", "3", *shapes, (32, 24)))
    assert scale.node.call == Scale("float64", 3, 1 / 3)


def test_scaling_is_cut_where_cublas_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fft, "MAX_SCALED", 3)
    _, *scales = decode(make_fft("IFFT"))
    assert [(step.node.call.count, step.writes[0]) for step in scales] == [
        (3, BufferUse("#0", 0, 24)),
        (1, BufferUse("#0", 24, 8)),
    ]


def test_a_transform_to_reals_reads_a_copy() -> None:
    shapes = (shape("C64", "3"), shape("F32", "4"))
    copy, step, scale = decode(make_fft("IRFFT", "4", *shapes, (24, 16)))
    source, copied = BufferUse("#1", 0, 24), BufferUse("#added.0", 0, 24)
    assert copy.node == CopyNode("fft.1@copy", source, copied)
    assert step.node.call == Transform("C2R", True, (4,), (3,), (4,))
    assert step.reads == (copied,)
    assert copied in step.writes
    assert scale.node.call == Scale("float32", 4, 0.25)


def test_a_batch_in_two_dimensions() -> None:
    shapes = (shape("F32", "2 1 2 2"), shape("C64", "2 1 2 2"))
    (step,) = decode(
        make_fft("RFFT", "2 2", *shapes, (32, 64)).replace(": 0 size: 64", ": 3 size: 64")
    )
    assert step.node.call == Transform("R2C", False, (2, 2), (2, 2), (2, 2), 2)
    assert str(step.node.call) == "R2C forward of 2x2, 2 times"
    assert (step.node.call.source_size, step.node.call.target_size) == (4, 4)


def test_double_precision() -> None:
    shapes = (shape("C128", "2"), shape("C128", "2"))
    step, scale = decode(make_fft("IFFT", "2", *shapes))
    assert (step.node.call.form, scale.node.call.dtype) == ("Z2Z", "complex128")


def test_no_workspace_and_no_device_to_ask() -> None:
    for plan in (None, lambda call: 0):
        (step,) = decode(make_fft(), plan)
        assert dict(step.node.operands).keys() == {"source", "target"}


def test_an_empty_batch_is_nothing() -> None:
    shapes = (shape("C64", "0 4"), shape("C64", "0 4"))
    assert decode(make_fft("IFFT", "4", *shapes, (0, 0))) == []


def test_what_the_library_refuses_is_named() -> None:
    def fail(call: LibraryCall) -> int:
        raise CudaError(f"no {call}", where="w", why="y", fix="pip install it", anchor="cuda")

    text = refuse(make_fft(), fail)
    assert "fft cannot be done by its library: no C2C forward of 4, once (pip install it)" in text


C4, C5 = shape("C64", "4"), shape("C64", "5")
FAULTS: dict[str, tuple[str, str]] = {
    "types": (make_fft(source=shape("F32", "4"), sizes=(16, 32)), "is FFT of F32 to C64"),
    "unknown kind": (make_fft("7"), "is 7 of C64 to C64, for which cuFFT has no plan"),
    "half": (
        make_fft("RFFT", "4", shape("F32", "4"), C4, (16, 32)),
        "is RFFT of lengths (4,) from (4,) to (4,)",
    ),
    "lengths": (make_fft(lengths="3"), "is FFT of lengths (3,) from (4,) to (4,)"),
    "batch": (
        make_fft(
            source=shape("C64", "2 2"), lengths="2", target=shape("C64", "1 2"), sizes=(32, 16)
        ),
        "is FFT of lengths (2,) from (2,) to (2,)",
    ),
    "no axis": (make_fft(lengths=""), "transforms along 0 axes"),
    "four axes": (
        make_fft(lengths="1 1 2 2", source=shape("C64", "1 1 2 2"), target=shape("C64", "1 1 2 2")),
        "transforms along 4 axes",
    ),
    "more axes than there are": (make_fft(lengths="2 2"), "transforms along 2 axes"),
    "length 0": (make_fft(lengths="0", source=shape("C64", "0"), sizes=(0, 32)), "lengths (0,)"),
    "bytes": (make_fft(sizes=(24, 32)), "has an array of 32 bytes in 24"),
    "layout": (
        make_fft(source=shape("C64", "2 2", "0 1"), target=shape("C64", "2 2"), lengths="2"),
        "has an operand whose axes lie in the order [0, 1]",
    ),
    "in place": (
        make_fft().replace(
            "output_buffer { buffer_allocation_index: 0",
            "output_buffer { buffer_allocation_index: 1",
        ),
        "transforms in place",
    ),
    "outside": (make_fft(sizes=(32, 64), target=shape("C64", "8"), lengths="8"), "is FFT of"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused(name: str) -> None:
    thunk, reason = FAULTS[name]
    assert reason in refuse(thunk)


def test_too_many_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fft, "MAX_BATCH", 1)
    shapes = (shape("C64", "2 2"), shape("C64", "2 2"))
    assert "is a batch of 2 transforms" in refuse(make_fft("FFT", "2", *shapes))
