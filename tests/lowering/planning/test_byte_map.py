"""ByteMap against a list with one value per byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tracegraph.lowering.planning.byte_map import ByteMap

RANGES = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(["replace", "change"]), RANGES, st.integers(1, 9))))
def test_every_byte_has_the_value_that_it_was_given(changes: list[tuple[str, tuple, int]]):
    pieces, plain = ByteMap(0), [0] * 20
    for kind, (start, end), value in changes:
        held = pieces.read(start, end)
        if kind == "replace":
            assert pieces.replace(start, end, value) == held
            plain[start:end] = [value] * (end - start)
        else:
            assert pieces.change(start, end, lambda old, v=value: old + v) == held
            plain[start:end] = [old + value for old in plain[start:end]]
        for offset in range(20):
            assert pieces.read(offset, offset + 1) == [plain[offset]]
    for start in range(20):
        assert [*dict.fromkeys(pieces.read(start, 20))] == [*dict.fromkeys(plain[start:])]


def test_an_empty_range_holds_nothing_and_changes_nothing():
    pieces = ByteMap("a")
    assert pieces.replace(3, 3, "b") == []
    assert pieces.change(5, 4, str.upper) == []
    assert pieces.read(3, 3) == []
    assert pieces.read(0, 9) == ["a"]


def test_a_replaced_range_is_one_piece():
    pieces = ByteMap(0)
    for offset in range(10):
        pieces.replace(offset, offset + 1, offset)
    pieces.replace(2, 8, -1)
    assert pieces.read(0, 10) == [0, 1, -1, 8, 9]
