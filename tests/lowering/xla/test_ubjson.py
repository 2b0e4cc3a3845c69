"""Universal Binary JSON: every form that cuDNN's front end writes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.ubjson_writer import write_ubjson
from tracegraph.lowering.xla.refusal import Refusal
from tracegraph.lowering.xla.ubjson import MAX_DEPTH, read_ubjson

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_what_is_written_is_read(value: Any) -> None:
    assert read_ubjson(write_ubjson(value)) == value


def test_float_of_four_bytes_is_read() -> None:
    assert read_ubjson(b"d\x3e\x00\x00\x00") == 0.125


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cannot be read"),
        (b"[i\x01", "cannot be read"),
        (b"I\x01", "cannot be read"),
        (b"Si\x01\xff", "cannot be read"),
        (b"Si\x05ab", "a text of 5 bytes"),
        (b"Si\xffab", "a text of -1 bytes"),
        (b"SSi", "a text of length 'S'"),
        (b"[$i#i\x02\x01\x02", "the mark '$' at 1"),
        (b"ZZ", "ends at 1 of 2 bytes"),
        (b"[" * (MAX_DEPTH + 1), f"the mark '[' at {MAX_DEPTH}"),
    ],
)
def test_anything_else_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(Refusal, match="has a compiled graph") as raised:
        read_ubjson(data)
    assert reason in str(raised.value)
