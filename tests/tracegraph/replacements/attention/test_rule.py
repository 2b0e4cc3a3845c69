"""Attention over a cache as users write it; the kernel runs on this machine's threads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.fakes import kernels_on_host
from tests.tracegraph.replacements.attention.ways import (
    GROUPS,
    HEADS,
    LENGTH,
    WAYS,
    attend_by_jax,
    attend_grouped,
    draw,
    make_arguments,
    rotate_halves,
)
from tests.tracegraph.replacements.few_rows.test_rule import (
    build,
    compile_nothing,
    evaluate,
)
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements.attention import rule
from tracegraph.replacements.attention.rule import CachedAttention
from tracegraph.replacements.match import Machine, Match
from tracegraph.replacements.splice import splice_matches


def find(function: Any, *args: Any, processors: int = 4) -> tuple[Any, list[Match]]:
    graph = build(function, *args)
    matches = CachedAttention().find(graph, Machine("9.0", processors, compile_nothing))
    verify_graph(splice_matches(graph, matches))
    return graph, matches


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Match]:
    """Checks the one kernel of a function, and returns its match."""

    def check(function: Any, *args: Any, processors: int = 4) -> Match:
        graph, (match,) = find(function, *args, processors=processors)
        known = evaluate(graph, args)
        given = [known[value] for value in match.inputs]
        with monkeypatch.context() as patched:
            patched.setattr(rule, "call_kernel", kernels_on_host.call_on_host)
            found, wanted = match.compute(*given), jax.jit(match.reference)(*given)
        for value, one, right in zip(match.results, found, wanted, strict=True):
            assert (one.shape, one.dtype) == (value.shape, value.dtype)
            ours, theirs, right = (
                np.asarray(each, np.float32) for each in (one, known[value], right)
            )
            np.testing.assert_array_equal(np.isnan(ours), np.isnan(right))
            scale = np.nanmax(np.abs(right), initial=1.0)
            rounding = float(jnp.finfo(value.dtype).eps) * scale + 2e-6
            error = np.nanmax(np.abs(ours - right), initial=0.0)
            assert error <= max(rounding, np.nanmax(np.abs(theirs - right), initial=0.0))
            assert error <= 0.02 * scale
        return match

    return check


@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_one_kernel(way: str, run: Callable[..., Match]) -> None:
    function, make = WAYS[way]
    match = run(function, *make())
    call: Any = match.compute
    has_update = way != "alone"
    assert len(match.results) == (3 if has_update else 1)
    assert len(call.aliases) == (2 if has_update else 0)
    # What is there when the graph is launched: keys and values.
    early = [match.inputs[number].shape for number in call.kernel.early]
    assert len(early) == 2
    assert all(LENGTH in shape for shape in early)


def test_heads_that_share_keys_are_rows_of_one_block() -> None:
    function, make = WAYS["repeated"]
    _, (match,) = find(function, *make())
    call: Any = match.compute
    assert f"ROWS = {HEADS // GROUPS};" in call.kernel.source


@pytest.mark.parametrize("position", [0, 31, 63, 64, 100])
def test_positions_are_split_over_a_cluster(position: int, run: Callable[..., Match]) -> None:
    new = [draw(1, 1, 1, 128, seed=seed) for seed in (1, 2)]
    caches = [draw(1, 77, 1, 128, seed=seed) for seed in (3, 4)]
    args = draw(1, 1, 3, 128), new, caches, jnp.int32(position)
    match = run(functools.partial(attend_grouped, rotate_halves), *args, processors=8)
    call: Any = match.compute
    assert "SPLIT = 4;" in call.kernel.source


def test_more_rows_than_a_block_takes_have_blocks_of_their_own(run: Callable[..., Match]) -> None:
    new = [draw(1, 1, 1, 64, dtype=jnp.float16, seed=seed) for seed in (1, 2)]
    caches = [draw(1, 40, 1, 64, dtype=jnp.float16, seed=seed) for seed in (3, 4)]
    args = draw(1, 1, 11, 64, dtype=jnp.float16), new, caches, jnp.int32(39)
    match = run(functools.partial(attend_grouped, rotate_halves), *args)
    call: Any = match.compute
    assert "CHUNKS = 2;" in call.kernel.source


def test_many_positions_go_around_in_a_ring(run: Callable[..., Match]) -> None:
    new = [draw(1, 1, 1, 32, dtype=jnp.float32, seed=seed) for seed in (1, 2)]
    caches = [draw(1, 700, 1, 32, dtype=jnp.float32, seed=seed) for seed in (3, 4)]
    args = draw(1, 1, 2, 32, dtype=jnp.float32), new, caches, jnp.int32(650)
    match = run(functools.partial(attend_grouped, rotate_halves), *args, processors=1)
    call: Any = match.compute
    assert "PLACES = 2;" in call.kernel.source


def test_what_is_masked_out_may_be_anything(run: Callable[..., Match]) -> None:
    query, new, caches, position = make_arguments()
    keys, values = caches[0].at[:, 30:].set(jnp.nan), caches[1].at[:, 30:].set(1e30)
    run(attend_by_jax, query, new, [keys, values], position)


def test_a_row_without_positions_and_one_with_a_nan_are_not_numbers(
    run: Callable[..., Match],
) -> None:
    def attend(query: Any, keys: Any, values: Any, lengths: Any) -> Any:
        scores = jnp.einsum("bhd,bthd->bht", query, keys)
        is_past = jnp.arange(LENGTH) < lengths[:, None, None]
        shares = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf))
        return jnp.einsum("bht,bthd->bhd", shares, values)

    query, keys, values = (
        draw(*shape, 2, 16, dtype=jnp.float32, seed=seed)
        for seed, shape in enumerate([(3,), (3, LENGTH), (3, LENGTH)])
    )
    keys = keys.at[2, 5, 1, 3].set(jnp.nan)
    match = run(attend, query, keys, values, jnp.array([0, 20, 20]))
    assert len(match.results) == 1


FAULTS = {
    "a larger score": ("const float scale = weigh(best[own], top);", "const float scale = 1;"),
    "the new key": ("t == new_key ? fresh[lane + e] : ", ""),
    "the new value": ("t == new_value ? fresh[WIDTH + lane + e] : ", ""),
    "warps are joined": ("value += scale * line[index % WIDTH];", "value += line[index % WIDTH];"),
    "blocks are joined": ("total += scale * weights[", "total += weights["),
    "the last positions": ("begin + PART < LENGTH ? begin + PART : LENGTH", "begin + PART"),
    "who writes": ("[keys_base + new_key", "[new_key"),
    "a block's own positions": ("const int begin = rank * PART", "const int begin = 0"),
    "all have written": ("    if (SPLIT > 1) sync_cluster();\n    else sync_block();\n", ""),
}


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_fault_in_the_kernel_is_found(
    fault: str, run: Callable[..., Match], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = FAULTS.get(fault, ("", ""))
    # Two sequences; larger numbers, so that single scores decide, and that of the new key is one.
    new = [4 * draw(2, 1, 1, 128, seed=seed) for seed in (1, 2)]
    caches = [4 * draw(2, 301, 1, 128, seed=seed) for seed in (3, 4)]
    # Behind the last position nothing is masked out; there the next sequence begins.
    caches[1] = caches[1].at[1, :3].set(1e6)
    position = 10_000 if fault == "the last positions" else 200
    args = new[0] / 16 + draw(2, 1, 1, 128), new, caches, jnp.int32(position)

    def run_spoilt(kernel: Any, *rest: Any) -> None:
        assert right in kernel.source
        spoilt = dataclasses.replace(kernel, source=kernel.source.replace(right, wrong))
        kernels_on_host.run_kernel_on_host(spoilt, *rest, copies_at_once=True)

    call = functools.partial(kernels_on_host.call_on_host, run=run_spoilt)
    monkeypatch.setattr(kernels_on_host, "call_on_host", call)
    expected = pytest.raises(AssertionError, match=r"not equal|error|<=")
    with expected if fault else contextlib.nullcontext():
        run(functools.partial(attend_grouped, rotate_halves), *args)


def no_mask(query: Any, keys: Any, values: Any) -> Any:
    return jnp.einsum("bhqt,bthd->bqhd", jnp.einsum("bqhd,bthd->bhqt", query, keys), values)


def shared_shares(query: Any, keys: Any, values: Any) -> Any:
    shares = jax.nn.softmax(jnp.einsum("bqhd,bthd->bhqt", query, keys))
    return jnp.einsum("bhqt,bthd->bqhd", shares, values), shares


def other_axis(query: Any, keys: Any, values: Any) -> Any:
    shares = jax.nn.softmax(jnp.einsum("bqhd,bthd->bhqt", query, keys), axis=1)
    return jnp.einsum("bhqt,bthd->bqhd", shares, values)


def other_sum(query: Any, keys: Any, values: Any) -> Any:
    scores = jnp.einsum("bqhd,bthd->bhqt", query, keys)
    shifted = jnp.exp(scores - scores.max(-1, keepdims=True))
    shares = shifted / jnp.exp(scores).sum(-1, keepdims=True)
    return jnp.einsum("bhqt,bthd->bqhd", shares, values)


def narrow(query: Any, keys: Any, values: Any) -> Any:
    return attend(query[..., :6], keys[..., :6], values[..., :6])


def many_rows(query: Any, keys: Any, values: Any) -> Any:
    return attend(jnp.repeat(query, 17, axis=1), keys, values)


def columns_first(query: Any, keys: Any, values: Any) -> Any:
    keys = lax.optimization_barrier(keys.transpose(0, 2, 3, 1))
    shares = jax.nn.softmax(jnp.einsum("bqhd,bhdt->bhqt", query, keys))
    return jnp.einsum("bhqt,bthd->bqhd", shares, values)


def two_axes(query: Any, keys: Any, values: Any) -> Any:
    """Heads are added up, too."""
    shares = jax.nn.softmax(jnp.einsum("bqhd,bthd->bqt", query, keys))
    return jnp.einsum("bqt,bthd->bqhd", shares, values)


def short_values(query: Any, keys: Any, values: Any) -> Any:
    return attend(query, keys, values[..., :8])


def itself(query: Any, keys: Any, values: Any) -> Any:
    """The queries are read from the cache that is written."""
    new = keys.at[:, 3].set(query[:, 0])
    return attend(query + keys[:, 7:8], new, values), new


def attend(query: Any, keys: Any, values: Any) -> Any:
    shares = jax.nn.softmax(jnp.einsum("bqhd,bthd->bhqt", query, keys))
    return jnp.einsum("bhqt,bthd->bqhd", shares, values)


@pytest.mark.parametrize(
    "function",
    [
        *[no_mask, shared_shares, other_axis, other_sum, narrow, many_rows, columns_first],
        *[two_axes, short_values, itself],
    ],
    ids=lambda each: each.__name__,
)
def test_what_is_something_else_is_left_to_xla(function: Any) -> None:
    query, _, (keys, values), _ = make_arguments(heads=2)
    assert len(find(attend, query, keys, values)[1]) == 1
    assert find(function, query, keys, values)[1] == []


def test_a_cache_that_something_else_reads_is_replaced_too() -> None:
    """XLA copies what is written in place and needed as it was."""
    function, make = WAYS["jax"]

    def step(query: Any, new: Any, caches: Any, position: Any) -> Any:
        return *function(query, new, caches, position), caches[0].sum()

    graph, (match,) = find(step, *make())
    spliced = splice_matches(graph, [match])
    (call,) = [op for op in spliced.ops if op.name == "ffi_call"]
    written: Any = match.compute
    assert dict(call.params["input_output_aliases"]) == written.aliases
    assert len(written.aliases) == 2


def test_where_a_full_window_begins_makes_no_difference(run: Callable[..., Match]) -> None:
    def attend(query: Any, new: Any, caches: Any, position: Any, other: Any) -> Any:
        keys, values = (
            lax.dynamic_update_slice(cache, each, (other, position, 0, other))
            for cache, each in zip(caches, new, strict=True)
        )
        return jax.nn.dot_product_attention(query, keys, values), keys, values

    match = run(attend, *make_arguments(), jnp.int32(5))
    call: Any = match.compute
    assert len(match.inputs) == call.count + 1


def test_older_gpus_and_hosts_have_no_such_kernel() -> None:
    function, make = WAYS["jax"]
    graph = build(function, *make())
    for machine in (None, Machine("8.0", 108, compile_nothing)):
        assert CachedAttention().find(graph, machine) == []
