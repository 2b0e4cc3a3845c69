"""The corpus on a GPU: captured and verified, then replayed on inputs that change each time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.deviceless.programs import PROGRAMS, Program
from tests.gpu.reference import (
    Likeness,
    assert_replayed,
    copy_arguments,
    judge,
    run_reference,
)
from tracegraph.lowering.lower import build_graph

PALLAS_WARNING = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
pytestmark = [pytest.mark.usefixtures("gpu"), pytest.mark.filterwarnings(PALLAS_WARNING)]
# The corpus has it for lowering; `capture` refuses it, for nothing could change from call to call.
WITH_ARGUMENTS = tuple(program for program in PROGRAMS if program.name != "no_arguments")
REPLAYS = 25
MANY_REPLAYS = 1000
SMALL = ("double", "booleans", "product_odd", "donated_update")


def replay_often(program: Program, count: int) -> tg.GraphedFunction:
    """Replays with fresh inputs, from the host and from the device in turns; checks every one."""
    rng = np.random.default_rng(0)
    captured = tg.capture(program.function, donate_argnums=program.donate_argnums)
    for index in range(count):
        args = program.make_arguments(rng)
        given = jax.device_put(args) if index % 2 else copy_arguments(args)
        assert_replayed(captured, captured(*given), args)
    return captured


@pytest.mark.parametrize("program", WITH_ARGUMENTS, ids=lambda program: program.name)
def test_replays_equal_the_executables(program):
    with jax.enable_x64(program.needs_x64):
        captured = replay_often(program, REPLAYS)
    assert captured.cache_info() == (REPLAYS - 1, 1, 64, 1)
    (capture,) = captured._cache.list_latest()
    report = capture.verification
    assert (report.skipped, report.reference) == ("", "XLA's executable")
    assert report.exact + len(report.close) > 0


@pytest.mark.parametrize("name", SMALL)
def test_a_thousand_replays(name):
    program = next(program for program in PROGRAMS if program.name == name)
    captured = replay_often(program, MANY_REPLAYS)
    assert captured.cache_info() == (MANY_REPLAYS - 1, 1, 64, 1)


def test_the_comparison_sees_one_bit():
    captured = tg.capture(lambda x: (x * 2, jnp.arange(3)))
    x = np.linspace(-1, 1, 50, dtype=np.float32)
    doubled, counted = captured(x)
    assert judge(captured, (doubled, counted), (x,)).likeness is Likeness.EQUAL
    flipped = np.array(doubled)
    flipped.view(np.uint32)[7] ^= 1
    verdict = judge(captured, (jnp.asarray(flipped), counted), (x,))
    assert verdict.likeness is Likeness.DIFFERING
    assert "no sum of it is left to chance" in verdict.text
    assert judge(captured, (doubled, counted + 1), (x,)).likeness is Likeness.DIFFERING
    assert judge(captured, (doubled, counted), (x + 1,)).likeness is Likeness.DIFFERING


def test_a_graph_that_lacks_its_last_node_is_refused(monkeypatch):
    """Plants the fault that verification is for: the outputs keep the poison of their pool."""

    def build_shortened(*args, **kwargs):
        definition = build_graph(*args, **kwargs)
        stage = definition.stages[-1]
        last = len(stage.nodes) - 1
        kept = tuple(edge for edge in stage.edges if last not in edge)
        shortened = dataclasses.replace(
            stage,
            nodes=stage.nodes[:-1],
            edges=kept,
            programmatic=stage.programmatic & frozenset(kept),
        )
        return dataclasses.replace(definition, stages=(*definition.stages[:-1], shortened))

    x = jnp.arange(100.0)
    with monkeypatch.context() as patch:
        patch.setattr("tracegraph.lowering.lower.build_graph", build_shortened)
        with pytest.raises(tg.VerificationError, match="differs"):
            tg.capture(lambda x: jnp.sort(x)[::-1] @ x)(x)
    captured = tg.capture(lambda x: jnp.sort(x)[::-1] @ x)
    assert_replayed(captured, captured(x), (x,))


def test_earlier_results_keep_their_values():
    captured = tg.capture(lambda x: (x * 2, jnp.cumsum(x), x))
    inputs = [np.full(3000, index, np.float32) for index in range(20)]
    results = [captured(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        assert_replayed(captured, result, (x,))


def test_typed_keys_go_in_and_come_out():
    captured = tg.capture(lambda key: (jax.random.split(key), jax.random.normal(key, (300,))))
    for seed in range(5):
        key = jax.random.key(seed)
        keys, drawn = captured(key)
        wanted = run_reference(captured, key)
        assert np.array_equal(jax.random.key_data(keys), wanted[0])
        assert np.array_equal(drawn, wanted[1])
        assert jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
