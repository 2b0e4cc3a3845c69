"""What comes before the wait in a kernel's machine code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.machine_code import (
    EXIT,
    IADD3,
    LDC,
    LDG,
    NEVER,
    S2R,
    STG,
    WAIT,
    encode,
    make_image,
    make_waiting_image,
)
from tracegraph.lowering.xla.machine_code import waits_first
from tracegraph.runtime.definition.nodes import KernelCode

IMAGE = make_waiting_image("k")


def waits(*operations: int) -> bool:
    return waits_first(KernelCode("k", make_image({"k": [encode(each) for each in operations]})))


@pytest.mark.parametrize(
    ("operations", "is_first"),
    [
        ((WAIT, LDG, EXIT), True),
        ((LDC, S2R, IADD3, WAIT, LDG, STG, EXIT), True),
        ((LDC, LDG, WAIT, STG, EXIT), False),
        ((STG, WAIT, EXIT), False),
        # What a block that leaves early waits for is nothing.
        ((EXIT, WAIT, LDG, EXIT), False),
        ((LDC, LDG, STG, EXIT), False),
        ((LDC, S2R), False),
        ((), False),
    ],
)
def test_nothing_but_registers_comes_before_the_wait(
    operations: tuple[int, ...], is_first: bool
) -> None:
    assert waits(*operations) is is_first


@pytest.mark.parametrize("operation", [0x3FF, 0x947, 0x9AE, 0x82D])
def test_an_unknown_instruction_counts_as_a_load(operation: int) -> None:
    assert not waits(operation, WAIT)


def test_a_wait_that_depends_on_a_predicate_is_none() -> None:
    for predicate in (0, NEVER):
        image = make_image({"k": [encode(LDC), encode(WAIT, predicate), encode(LDG)]})
        assert not waits_first(KernelCode("k", image))


def test_the_kernel_of_the_symbol_is_read() -> None:
    image = make_image(
        {"first": [encode(LDG), encode(WAIT)], "second": [encode(WAIT)], "sec": [encode(LDG)]}
    )
    found = {name: waits_first(KernelCode(name, image)) for name in ("first", "second", "sec")}
    assert found == {"first": False, "second": True, "sec": False}
    assert not waits_first(KernelCode("third", image))


def test_ptx_is_not_trusted() -> None:
    text = b".visible .entry k() { griddepcontrol.wait; ret; }\0"
    assert not waits_first(KernelCode("k", text))


@pytest.mark.parametrize("at", [0x28, 0x3A, 0x3C, 0x3E])
def test_sections_that_are_not_there_have_no_instructions(at: int) -> None:
    changed = IMAGE[:at] + b"\xff" * 8 + IMAGE[at + 8 :]
    assert waits_first(KernelCode("k", IMAGE))
    assert not waits_first(KernelCode("k", changed))


@given(st.data())
def test_any_bytes_have_an_answer(data: st.DataObject) -> None:
    changed = bytearray(IMAGE[: data.draw(st.integers(0, len(IMAGE)))])
    for _ in range(data.draw(st.integers(0, 4)) if changed else 0):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    assert waits_first(KernelCode("k", bytes(changed))) in (True, False)
