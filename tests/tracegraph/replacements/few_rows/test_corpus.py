"""Programs of all kinds: what is found in them can take the place of their ops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.deviceless.pipeline import setting_for
from tests.deviceless.programs import PROGRAMS, Program
from tests.tracegraph.replacements.few_rows.test_rule import GPU, build
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements.few_rows import rule
from tracegraph.replacements.few_rows.rule import FewRowMatmuls
from tracegraph.replacements.splice import splice_matches

HERE = [program for program in PROGRAMS if not program.needs_gpu]


@pytest.mark.parametrize("program", HERE, ids=lambda each: each.name)
def test_a_program_has_the_same_types_with_all_that_is_found(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "SIZES", dataclasses.replace(rule.SIZES, matrix_bytes=0))
    with setting_for(program):
        graph = build(program.function, *program.make_arguments(np.random.default_rng(0)))
        spliced = splice_matches(graph, FewRowMatmuls().find(graph, GPU))
    verify_graph(spliced)
    kinds = [[str(each.aval) for each in one.outputs] for one in (graph, spliced)]
    assert kinds[0] == kinds[1]
