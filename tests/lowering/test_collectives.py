"""Collectives are counted in XLA's text, whatever they are called there."""

from __future__ import annotations

import pytest

from tracegraph.lowering.collectives import Collective, list_collectives

TEXT = """
ENTRY %main {
  %a = (f32[8,2]{1,0}, bf16[4]{0}) all-reduce(%x, %y), channel_id=1, to_apply=%add
  ROOT %b = pred[3]{0} all-gather(%p), dimensions={0}
  %c = (f32[2]{0}, f32[4]{0}) all-gather-start(%q), dimensions={0}
  %d = f32[4]{0} all-gather-done(%c)
  %e = (s8[5]{0}, s8[5]{0}, u32[], u32[]) collective-permute-start(%r)
  %f = c64[2,2]{1,0} all-reduce(%s), metadata={op_name="all-gather(x)"}
  %g = f32[2]{0} fusion(%t), calls=%all-reduce-body
  %h = f8e4m3fn[6]{0} reduce-scatter(%u)
}
"""


def test_kinds_counts_and_bytes():
    assert list_collectives(TEXT) == (
        Collective("all-reduce", 2, 64 + 8 + 32),
        Collective("all-gather", 2, 3 + 16),
        Collective("collective-permute", 1, 5),
        Collective("reduce-scatter", 1, 6),
    )


@pytest.mark.parametrize("text", ["", "%x = f32[2]{0} add(%a, %b)"])
def test_a_program_without_any(text):
    assert list_collectives(text) == ()


def test_it_prints():
    assert str(Collective("all-to-all", 2, 4096)) == "2 all-to-all (4,096 bytes on each device)"
