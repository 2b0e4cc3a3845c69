"""Attention over whole rows as users write it, and its gradients; kernels run on this machine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.fakes import kernels_on_host
from tests.tracegraph.replacements.attention.ways import draw
from tests.tracegraph.replacements.few_rows.test_rule import build, compile_nothing, evaluate
from tracegraph.ir.verifier import verify_graph
from tracegraph.replacements.attention import results
from tracegraph.replacements.attention.whole_rows import WholeRows
from tracegraph.replacements.match import Machine, Match
from tracegraph.replacements.splice import splice_matches

BATCH, ROWS, HEADS, WIDTH = 2, 32, 2, 16
MACHINE = Machine("9.0", 4, compile_nothing)


def find(function: Any, *args: Any) -> tuple[Any, list[Match]]:
    graph = build(function, *args)
    matches = WholeRows().find(graph, MACHINE)
    verify_graph(splice_matches(graph, matches))
    return graph, matches


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Match]]:
    """Checks the kernels of a function, and returns its matches."""

    def check(function: Any, *args: Any) -> list[Match]:
        graph, matches = find(function, *args)
        known = evaluate(graph, args)
        for match in matches:
            given = [known[value] for value in match.inputs]
            with monkeypatch.context() as patched:
                patched.setattr(results, "call_kernel", kernels_on_host.call_on_host)
                found, wanted = match.compute(*given), jax.jit(match.reference)(*given)
            for value, one, right in zip(match.results, found, wanted, strict=True):
                assert (one.shape, one.dtype) == (value.shape, value.dtype)
                compare(one, known[value], right)
        return matches

    return check


def compare(ours: Any, theirs: Any, wanted: Any) -> None:
    """Ours is as exact as the other, or as its type can be."""
    rounding = float(jnp.finfo(ours.dtype).eps)
    one, other, right = (np.asarray(each, np.float32) for each in (ours, theirs, wanted))
    np.testing.assert_array_equal(np.isnan(one), np.isnan(right))
    scale = np.nanmax(np.abs(right), initial=1e-6)
    error = np.nanmax(np.abs(one - right), initial=0.0)
    allowed = np.nanmax(np.abs(other - right), initial=0.0)
    # The host's sums of float32 are those of the reference.
    assert error <= max(1.1 * allowed, (32 if ours.dtype == np.float32 else 1) * rounding * scale)
    assert error <= 0.03 * scale


def make(*names: str, dtype: Any = jnp.bfloat16, rows: int = ROWS, heads: int = HEADS) -> list[Any]:
    """Returns arrays of (sequence, position, head, element)."""
    return [draw(BATCH, rows, heads, WIDTH, dtype=dtype, seed=seed) for seed, _ in enumerate(names)]


def attend(query: Any, key: Any, value: Any, edit: Any = lambda scores: scores) -> Any:
    scores = jnp.einsum("bqhd,bthd->bhqt", query, key) * WIDTH**-0.5
    return jnp.einsum("bhqt,bthd->bqhd", jax.nn.softmax(edit(scores)), value)


def hide_future(scores: Any) -> Any:
    return jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)


def attend_joined(x: Any, weights: Any) -> Any:
    """Queries, keys and values are parts of one array."""
    joined = (x @ weights).reshape(BATCH, ROWS, 3, HEADS, WIDTH).transpose(2, 0, 3, 1, 4)
    query, key, value = joined
    shares = jax.nn.softmax(hide_future(query @ key.swapaxes(-1, -2) / 4))
    return (shares @ value).transpose(0, 2, 1, 3).reshape(BATCH, ROWS, -1)


def attend_split(x: Any, weights: Any) -> Any:
    query, key, value = (
        part.reshape(BATCH, ROWS, HEADS, WIDTH) for part in jnp.split(x @ weights, 3, axis=-1)
    )
    return attend(query, key, value, hide_future).reshape(BATCH, ROWS, -1)


def attend_sliced(x: Any, weights: Any) -> Any:
    """The gradients are padded with zeros, and added up."""
    joined = (x @ weights).reshape(BATCH, ROWS, 3, HEADS, WIDTH)
    query, key, value = (joined[:, :, number] for number in range(3))
    return attend(query, key, value, hide_future).reshape(BATCH, ROWS, -1)


def attend_by_hand(query: Any, key: Any, value: Any) -> Any:
    """A softmax without the maximum, divided at the end of each row."""
    weights = jnp.exp(jnp.einsum("bqhd,bthd->bhqt", query, key) / 8)
    return jnp.einsum("bhqt,bthd->bqhd", weights / weights.sum(-1, keepdims=True), value)


def attend_capped(query: Any, key: Any, value: Any) -> Any:
    return attend(query, key, value, lambda scores: 5 * jnp.tanh(scores / 5))


def attend_dropped(query: Any, key: Any, value: Any) -> Any:
    scores = jnp.einsum("bqhd,bthd->bhqt", query, key) / 4
    is_kept = jax.random.bernoulli(jax.random.key(3), 0.8, scores.shape)
    shares = jnp.where(is_kept, jax.nn.softmax(scores) / 0.8, 0)
    return jnp.einsum("bhqt,bthd->bqhd", shares.astype(value.dtype), value)


def attend_biased(query: Any, key: Any, value: Any, bias: Any) -> Any:
    return attend(query, key, value, lambda scores: scores + lax.stop_gradient(bias))


def attend_without_batch(query: Any, key: Any, value: Any) -> Any:
    shares = jax.nn.softmax(query[0, :, 0] @ key[0, :, 0].T)
    return shares @ value[0, :, 0]


def attend_by_jax(query: Any, key: Any, value: Any) -> Any:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def attend_by_flax(query: Any, key: Any, value: Any) -> Any:
    return nn.dot_product_attention(query, key, value)


def attend_by_logarithms(query: Any, key: Any, value: Any) -> Any:
    scores = jnp.einsum("bqhd,bthd->bhqt", query, key).astype(jnp.float32)
    shares = jnp.exp(jax.nn.log_softmax(scores)).astype(value.dtype)
    return jnp.einsum("bhqt,bthd->bqhd", shares, value)


def make_joined(dtype: Any = jnp.bfloat16) -> list[Any]:
    size = HEADS * WIDTH
    return [draw(BATCH, ROWS, size, dtype=dtype), draw(size, 3 * size, dtype=dtype) / 8]


WAYS: dict[str, tuple[Any, Callable[..., list[Any]]]] = {
    "plain": (attend, functools.partial(make, "q", "k", "v")),
    "joined": (attend_joined, make_joined),
    "split": (attend_split, make_joined),
    "sliced": (attend_sliced, make_joined),
    "by_hand": (attend_by_hand, functools.partial(make, "q", "k", "v")),
    "capped": (attend_capped, functools.partial(make, "q", "k", "v")),
    "dropped": (attend_dropped, functools.partial(make, "q", "k", "v")),
    "without_batch": (attend_without_batch, functools.partial(make, "q", "k", "v")),
    "jax": (attend_by_jax, functools.partial(make, "q", "k", "v")),
    "flax": (attend_by_flax, functools.partial(make, "q", "k", "v")),
    "logarithms": (attend_by_logarithms, functools.partial(make, "q", "k", "v")),
}


def differentiate(function: Any, numbers: Any = (0, 1, 2)) -> Any:
    """Returns a function of a loss and its gradients."""

    def compute_loss(*args: Any) -> Any:
        return (function(*args).astype(jnp.float32) ** 2).mean() * 64

    return jax.value_and_grad(compute_loss, argnums=numbers)


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        *((way, jnp.bfloat16) for way in WAYS),
        ("split", jnp.float32),
        ("capped", jnp.float16),
    ],
)
def test_each_way_and_its_gradients_are_kernels(
    way: str, dtype: Any, run: Callable[..., list[Match]]
) -> None:
    function, make_arguments = WAYS[way]
    args = make_arguments(dtype=dtype)
    backward, forward = run(differentiate(function, tuple(range(len(args)))), *args)
    # What the three are parts of is written at once.
    is_one = way in ("joined", "split", "sliced")
    assert len(backward.results) == (1 if is_one else 3)
    assert len(forward.results) == 1
    # What is as large as the scores is neither read nor written, but for what was dropped.
    large = [value for value in backward.inputs if value.aval.shape[2:] == (ROWS, ROWS)]
    assert len(large) == (way == "dropped")


@pytest.mark.parametrize("starts", [(0, 1, 3), (0, 1, 1), (1, 2, 3)])
def test_parts_that_do_not_fill_an_array_are_added_up_by_xla(starts: tuple[int, ...]) -> None:
    def attend_parts(x: Any, weights: Any) -> Any:
        joined = jnp.pad((x @ weights).reshape(BATCH, ROWS, 3, HEADS, WIDTH), ((0, 0),) * 5)
        wide = jnp.concatenate([joined, joined[:, :, :1] * 2], 2)
        query, key, value = (wide[:, :, number] for number in starts)
        return attend(query, key, value, hide_future)

    backward, _ = find(differentiate(attend_parts, (0, 1)), *make_joined())[1]
    assert len(backward.results) == 3


def test_a_bias_is_read(run: Callable[..., list[Match]]) -> None:
    bias = draw(1, HEADS, ROWS, ROWS)
    backward, forward = run(differentiate(attend_biased), *make("q", "k", "v"), bias)
    assert bias.shape in [value.aval.shape for value in backward.inputs]
    assert bias.shape in [value.aval.shape for value in forward.inputs]


def test_a_forward_pass_alone_is_a_kernel(run: Callable[..., list[Match]]) -> None:
    (forward,) = run(attend, *make("q", "k", "v"))
    assert [value.aval.shape for value in forward.inputs] == [(BATCH, ROWS, HEADS, WIDTH)] * 3


def test_values_without_gradients(run: Callable[..., list[Match]]) -> None:
    backward, _ = run(differentiate(attend, (0, 1)), *make("q", "k", "v"))
    assert len(backward.results) == 2


@pytest.mark.parametrize(("rows", "columns"), [(16, 48), (48, 16), (16, 256)])
def test_other_rows_than_columns(rows: int, columns: int, run: Callable[..., list[Match]]) -> None:
    (query,), (key, value) = make("q", rows=rows), make("k", "v", rows=columns)
    assert len(run(differentiate(attend), query, key, value)) == 2


def test_several_layers_have_matches_of_their_own(run: Callable[..., list[Match]]) -> None:
    def two(query: Any, key: Any, value: Any) -> Any:
        return attend(attend(query, key, value), key, value, hide_future)

    matches = run(differentiate(two), *make("q", "k", "v"))
    assert sorted(len(match.results) for match in matches) == [1, 1, 3, 3]


def test_not_a_number_stays_where_it_is(run: Callable[..., list[Match]]) -> None:
    query, key, value = make("q", "k", "v")
    (forward,) = run(attend, query.at[1, 3, 0, 2].set(jnp.nan), key, value)
    assert len(forward.results) == 1


def shared_shares(query: Any, key: Any, value: Any) -> Any:
    shares = jax.nn.softmax(jnp.einsum("bqhd,bthd->bhqt", query, key))
    return jnp.einsum("bhqt,bthd->bqhd", shares, value), shares


def no_sum(query: Any, key: Any, value: Any) -> Any:
    return jnp.einsum("bhqt,bthd->bqhd", jnp.einsum("bqhd,bthd->bhqt", query, key), value)


def other_axis(query: Any, key: Any, value: Any) -> Any:
    shares = jax.nn.softmax(jnp.einsum("bqhd,bthd->bhqt", query, key), axis=1)
    return jnp.einsum("bhqt,bthd->bqhd", shares, value)


def columns_first(query: Any, key: Any, value: Any) -> Any:
    key = lax.optimization_barrier(key.transpose(0, 2, 3, 1))
    shares = jax.nn.softmax(jnp.einsum("bqhd,bhdt->bhqt", query, key))
    return jnp.einsum("bhqt,bthd->bqhd", shares, value)


def narrow(query: Any, key: Any, value: Any) -> Any:
    return attend(query[..., :8], key[..., :8], value[..., :8])


def short_values(query: Any, key: Any, value: Any) -> Any:
    return attend(query, key, value[..., :8])


def long_rows(query: Any, key: Any, value: Any) -> Any:
    return attend(query, jnp.tile(key, (1, 9, 1, 1)), jnp.tile(value, (1, 9, 1, 1)))


def odd_rows(query: Any, key: Any, value: Any) -> Any:
    return attend(query[:, :20], key[:, :20], value[:, :20])


def mirrored_rows(query: Any, key: Any, value: Any) -> Any:
    """Each row is divided by the sum of another one."""
    weights = jnp.exp(jnp.einsum("bqhd,bthd->bhqt", query, key) / 8)
    sums = weights.sum(-1, keepdims=True)
    return jnp.einsum("bhqt,bthd->bqhd", weights / sums[:, :, ::-1], value)


def all_bits(query: Any, key: Any, value: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        return attend(*(each.astype(jnp.float32) for each in (query, key, value)))


def whole_numbers(query: Any, key: Any, value: Any) -> Any:
    query, key, value = (jnp.round(4 * each).astype(jnp.int8) for each in (query, key, value))
    scores = jnp.einsum("bqhd,bthd->bhqt", query, key, preferred_element_type=jnp.int32)
    shares = jnp.round(127 * jax.nn.softmax(scores.astype(jnp.float32))).astype(jnp.int8)
    return jnp.einsum("bhqt,bthd->bqhd", shares, value, preferred_element_type=jnp.int32)


def mixed_types(query: Any, key: Any, value: Any) -> Any:
    return attend(query, key, value.astype(jnp.float32))


@pytest.mark.parametrize(
    "function",
    [
        *[shared_shares, no_sum, other_axis, columns_first, narrow, short_values, long_rows],
        *[odd_rows, mirrored_rows, all_bits, whole_numbers, mixed_types],
    ],
    ids=lambda each: each.__name__,
)
def test_what_is_something_else_is_left_to_xla(function: Any) -> None:
    args = make("q", "k", "v")
    assert len(find(attend, *args)[1]) == 1
    assert find(function, *args)[1] == []


def test_doubles_and_arrays_beyond_32_bits_are_left_to_xla() -> None:
    with jax.enable_x64(True):
        doubles = [each.astype(jnp.float64) for each in make("q", "k", "v")]
        assert find(differentiate(attend), *doubles)[1] == []
    large = [jax.ShapeDtypeStruct((4096, 256, 32, 128), jnp.bfloat16)] * 3
    assert find(attend, *large)[1] == []
    small = [jax.ShapeDtypeStruct((1024, 256, 32, 128), jnp.bfloat16)] * 3
    assert len(find(attend, *small)[1]) == 1


def test_gradients_of_shared_keys_are_added_up_by_xla(run: Callable[..., list[Match]]) -> None:
    def attend_grouped(query: Any, key: Any, value: Any) -> Any:
        return attend(query, *(jnp.repeat(each, 2, axis=2) for each in (key, value)))

    (query,), (key, value) = make("q", heads=4), make("k", "v", heads=2)
    backward, forward = run(differentiate(attend_grouped), query, key, value)
    # The kernels read the keys where they are, and give a gradient for each head of the queries.
    for match in (backward, forward):
        assert (BATCH, ROWS, 2, WIDTH) in [value.aval.shape for value in match.inputs]
    assert {value.shape[:2] for value in backward.results} == {(BATCH, 4)}


def test_scores_that_something_else_reads_are_not_computed_twice() -> None:
    def compute(query: Any, key: Any, value: Any) -> Any:
        scores = jnp.einsum("bqhd,bthd->bhqt", query, key)
        mixed = jnp.einsum("bhqt,bthd->bqhd", jax.nn.softmax(scores), value)
        return (mixed**2).sum() + (scores**2).max()

    assert find(jax.grad(compute, argnums=(0, 1, 2)), *make("q", "k", "v"))[1] == []


FAULTS = {
    "a stage less": ("values[e] + ", "values[e] * 0 + "),
    "another row": ("row + index % VALUES * 4", "index % VALUES * 4"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_is_found(
    fault: str, run: Callable[..., list[Match]], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = FAULTS[fault]
    spoilt: list[str] = []

    def run_spoilt(kernel: Any, *rest: Any) -> None:
        spoilt.extend([kernel.symbol] * (right in kernel.source))
        source = kernel.source.replace(right, wrong)
        kernels_on_host.run_kernel_on_host(dataclasses.replace(kernel, source=source), *rest)

    call = functools.partial(kernels_on_host.call_on_host, run=run_spoilt)
    monkeypatch.setattr(kernels_on_host, "call_on_host", call)
    with pytest.raises(AssertionError):
        run(differentiate(attend), *make("q", "k", "v", rows=64))
    assert spoilt


def test_older_gpus_and_hosts_have_no_such_kernels() -> None:
    graph = build(attend, *make("q", "k", "v"))
    for machine in (None, Machine("8.0", 108, compile_nothing)):
        assert WholeRows().find(graph, machine) == []
