"""Greedy tokens and samples: the largest element of each row, chosen by the matmul's kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fakes.kernels_on_host import call_on_host
from tests.tracegraph.replacements.few_rows.test_rule import (
    BF16,
    GPU,
    WIDTH,
    build,
    draw,
    draw_bytes,
    evaluate,
    normalise,
)
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements.few_rows import choices, kernels
from tracegraph.replacements.few_rows.rule import FewRowMatmuls
from tracegraph.replacements.match import Match
from tracegraph.replacements.place_errors import measure_places
from tracegraph.replacements.splice import splice_matches

VOCABULARY = 528
f32 = functools.partial(draw, dtype=jnp.float32)


def find(function: Any, *args: Any) -> tuple[Any, list[Match]]:
    graph = build(function, *args)
    matches = FewRowMatmuls().find(graph, GPU)
    verify_graph(splice_matches(graph, matches))
    return graph, matches


def check(monkeypatch: pytest.MonkeyPatch, function: Any, *args: Any) -> Match:
    """Returns the last match of a function, after running its kernels."""
    graph, matches = find(function, *args)
    known = evaluate(graph, args)
    match = matches[-1]
    with monkeypatch.context() as patch:
        for module in (kernels, choices):
            patch.setattr(module, "call_kernel", call_on_host)
        found = match.compute(*(known[value] for value in match.inputs))
    for value, one in zip(match.results, found, strict=True):
        assert (one.shape, one.dtype) == (value.shape, value.dtype)
        # The same, but for what XLA rounds before it: the seeds leave room for that.
        one, wanted = np.asarray(one), np.asarray(known[value])
        if one.dtype == np.int32:
            np.testing.assert_array_equal(one, wanted)
        else:
            bound = 0.02 * np.abs(wanted.astype(np.float32)).max()
            difference = one.astype(np.float32) - wanted.astype(np.float32)
            assert np.abs(difference).max() <= bound
    return match


def list_results(match: Match) -> list[str]:
    return [str(value.dtype) for value in match.results]


def decode(x: Any, gain: Any, head: Any) -> Any:
    return jnp.argmax(normalise(x, gain) @ head, -1).astype(jnp.int32)


@pytest.mark.parametrize(
    ("lead", "dtype"), [((), BF16), ((1,), jnp.float32), ((3,), jnp.float32), ((2, 1), BF16)]
)
def test_a_greedy_token_is_chosen_by_the_head(
    lead: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_one = functools.partial(draw, dtype=dtype)
    args = draw_one(*lead, WIDTH), draw_one(WIDTH), draw_one(WIDTH, VOCABULARY)
    match = check(monkeypatch, decode, *args)
    # No logits.
    assert list_results(match) == ["int32"]
    assert match.op.name == "argmax"


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda logits: (logits.argmax(-1), logits.max(-1)), ["int32", "bfloat16"]),
        (lambda logits: (logits.argmax(-1), logits), ["bfloat16", "int32"]),
        (lambda logits: jnp.argmax(logits[:, None], -1)[..., None], ["int32"]),
        (lambda logits: logits.astype(jnp.float32).argmax(-1), ["int32"]),
        (lambda logits: (30 * jnp.tanh(logits / 30)).argmax(-1, keepdims=True), ["int32"]),
        (lambda logits: jax.random.categorical(jax.random.key(3), logits), ["int32"]),
        (lambda logits: (logits.argmax(-1), (-logits).argmax(-1)), ["int32", "int32"]),
        # What is not only chosen from is stored, and what XLA reads anyway it may reduce.
        (jax.nn.softmax, ["bfloat16"]),
        (lambda logits: logits.max(-1), ["bfloat16"]),
        (lambda logits: logits.argmin(-1), ["bfloat16"]),
        (lambda logits: logits.argmax(0), ["bfloat16"]),
        (lambda logits: logits.argmax(), ["bfloat16"]),
        (lambda logits: logits.reshape(2, 4, -1).argmax(-1), ["bfloat16"]),
    ],
)
def test_what_is_chosen_and_what_is_stored(
    function: Any, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    match = check(
        monkeypatch, lambda x, head: function(x @ head), draw(2, WIDTH), draw(WIDTH, VOCABULARY)
    )
    assert list_results(match) == wanted


def test_heads_as_models_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x, tied = draw(3, WIDTH), draw(VOCABULARY, WIDTH)
    assert list_results(check(monkeypatch, lambda x, t: (x @ t.T).argmax(-1), x, tied)) == ["int32"]
    swapped = check(monkeypatch, lambda x, t: jnp.einsum("vd,bd->vb", t, x).T.argmax(-1), x, tied)
    assert list_results(swapped) == ["int32"]
    weights, scale = draw_bytes(WIDTH, VOCABULARY, dtype=jnp.int8), draw(VOCABULARY)
    small = check(
        monkeypatch, lambda x, w, s: ((x @ w.astype(BF16)) * s).argmax(-1), x, weights, scale
    )
    assert list_results(small) == ["int32"]
    biased = check(monkeypatch, lambda x, t, b: (x @ t.T + b).argmax(-1), x, tied, scale)
    assert list_results(biased) == ["int32"]


def test_rows_of_other_sizes_are_not_those_of_the_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Any, head: Any) -> Any:
        # As many elements as the matmul has, in rows of another length.
        return (x @ head).reshape(VOCABULARY, 2).argmax(-1)

    match = check(monkeypatch, function, draw(2, WIDTH), draw(WIDTH, VOCABULARY))
    assert list_results(match) == ["bfloat16"]


def measure(shift: Any) -> Any:
    """Returns the errors of a choice that a kernel makes with a shift of its columns."""
    args = draw(2, WIDTH), draw(WIDTH), draw(WIDTH, VOCABULARY)
    graph, (match,) = find(decode, *args)
    known = evaluate(graph, args)

    def compute(*given: Any) -> list[Any]:
        del given
        return [shift(jnp.asarray(known[match.results[0]]))]

    object.__setattr__(match, "compute", compute)
    (error,) = measure_places(graph, [match], args)
    return error


def test_a_place_is_measured_by_what_is_found_there() -> None:
    right = measure(lambda column: column)
    assert right.is_allowed
    assert right.ours == right.theirs
    # One unit in the last place of bfloat16, of the largest logit.
    assert 0 < right.rounding < 0.1
    wrong = measure(lambda column: (column + 1) % VOCABULARY)
    assert not wrong.is_allowed
    assert wrong.ours > 10 * wrong.rounding
    outside = measure(lambda column: column + VOCABULARY)
    assert outside.ours == np.inf
    assert not outside.is_allowed


def test_the_two_kernels_are_calls_in_the_graph() -> None:
    args = draw(1, WIDTH), draw(WIDTH), draw(WIDTH, VOCABULARY)
    graph, matches = find(decode, *args)
    spliced = splice_matches(graph, matches)
    names = [op.name for op in spliced.ops]
    assert names.count("ffi_call") == 2
    assert not {"argmax", "dot_general"} & {*names}
