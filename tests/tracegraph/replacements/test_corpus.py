"""Programs of all kinds: what is found in them can take the place of their ops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.deviceless.pipeline import setting_for
from tests.deviceless.programs import PROGRAMS, Program
from tests.tracegraph.replacements.few_rows.test_rule import GPU, build
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements import matmul_updates
from tracegraph.replacements.few_rows import rule, small_matmuls
from tracegraph.replacements.few_rows.rule import FewRowMatmuls
from tracegraph.replacements.few_rows.small_matmuls import SmallMatmuls
from tracegraph.replacements.match import Rule
from tracegraph.replacements.matmul_updates import MatmulUpdates
from tracegraph.replacements.row_fusions import rule as row_fusions
from tracegraph.replacements.row_fusions.rule import RowFusions
from tracegraph.replacements.splice import splice_matches

HERE = [program for program in PROGRAMS if not program.needs_gpu]


@pytest.mark.parametrize("program", HERE, ids=lambda each: each.name)
def test_a_program_has_the_same_types_with_all_that_is_found(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (rule, small_matmuls):
        monkeypatch.setattr(module, "SIZES", dataclasses.replace(module.SIZES, matrix_bytes=0))
    monkeypatch.setattr(small_matmuls, "MAX_ELEMENTS_EACH", 1 << 20)
    monkeypatch.setattr(matmul_updates, "MIN_ELEMENTS", 0)
    for name, least in (("MIN_ELEMENTS", 0), ("MIN_ROWS", 2), ("MIN_COLUMNS", 8)):
        monkeypatch.setattr(row_fusions, name, least)
    rules: tuple[Rule, ...] = (FewRowMatmuls(), SmallMatmuls(), MatmulUpdates(), RowFusions())
    with setting_for(program):
        graph = build(program.function, *program.make_arguments(np.random.default_rng(0)))
        found = [splice_matches(graph, each.find(graph, GPU)) for each in rules]
    for spliced in found:
        verify_graph(spliced)
        kinds = [[str(each.aval) for each in one.outputs] for one in (graph, spliced)]
        assert kinds[0] == kinds[1]
