"""`tg.random`: a replay draws the keys that an eager run would draw, in every kind of capture."""

import copy
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg
from tests.draws import X, assert_same, draw, list_eager, sample
from tests.raw_graphs import record, use_device

KINDS = ("host", "cuda")


def dropout(gen, x):
    kept = jax.random.bernoulli(gen.next_key(), 0.9, x.shape)
    slope = jax.random.uniform(gen.next_key(), x.shape)
    return jnp.where(kept, x * slope, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_g19_replays_and_eager_calls_interleave_exactly(kind, monkeypatch):
    use_device(kind, monkeypatch)
    gen = tg.random.Generator(5)
    x = jnp.arange(8.0)
    step = tg.capture(lambda x: dropout(gen, x))
    for seed in (5, 6, 128, 9999):
        gen.manual_seed(seed)
        found = [step(x), step(x), dropout(gen, x), dropout(gen, x), step(x)]
        assert_same(found, list_eager(seed, 5, lambda gen: dropout(gen, x)))
    assert step.cache_info().captures == 1


DISTRIBUTIONS = {
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, (8,)),
    "bits": lambda key: jax.random.bits(key, (8,)),
    "rademacher": lambda key: jax.random.rademacher(key, (8,)),
    "uniform": lambda key: jax.random.uniform(key, (8,)),
    "randint": lambda key: jax.random.randint(key, (8,), 0, 99),
    "permutation": lambda key: jax.random.permutation(key, 8),
}


def draw_all(gen):
    return [distribution(gen.next_key()) for distribution in DISTRIBUTIONS.values()]


def test_g20_every_distribution_equals_eager_after_a_prelude():
    gen = tg.random.Generator(0)
    step = tg.capture(lambda: draw_all(gen))
    for seed in (6, 314, 271):
        gen.manual_seed(seed)
        draw(gen)
        found = step()
        gen.manual_seed(seed)
        draw(gen)
        assert_same(found, [np.asarray(each) for each in draw_all(gen)])


@pytest.mark.parametrize("kind", KINDS)
def test_raw_graphs_and_functions_draw_from_one_generator_in_turn(kind, monkeypatch):
    use_device(kind, monkeypatch)
    gen = tg.random.Generator(3)
    g, y = record(lambda: draw(gen))
    step = tg.capture(lambda: draw(gen))
    found = []
    for _ in range(2):
        g.replay()
        found += [np.array(y), step(), draw(gen)]
    assert_same(found, list_eager(3, 6))


def test_a_capture_draws_nothing_before_its_replays():
    gen = tg.random.Generator(3)
    record(lambda: draw(gen))
    assert_same([draw(gen)], list_eager(3, 1))
    tg.capture(lambda: draw(gen)).lower()
    assert_same([draw(gen)], list_eager(3, 2)[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_graph_with_hooks_draws_in_each_of_its_executables(kind, monkeypatch):
    use_device(kind, monkeypatch)
    gen, called = tg.random.Generator(1), []
    g = tg.CUDAGraph(keep_graph=True)
    with tg.graph(g):
        y = draw(gen)
    handle = g.register_replay_end_hook(lambda _: called.append(1))
    found = []
    for _ in range(2):
        g.instantiate()
        g.replay()
        found.append(np.array(y))
    handle.remove()
    g.replay()
    assert_same([*found, y, draw(gen)], list_eager(1, 4))
    assert len(called) == 2
    g.reset()
    with tg.graph(g):
        y = draw(gen)
    g.replay()
    assert_same([y], list_eager(1, 5)[4:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_writes_an_input_draws_keys_too(kind, monkeypatch):
    use_device(kind, monkeypatch)
    gen, total = tg.random.Generator(1), tg.static_input((8,))
    g, _ = record(lambda: total.copy_(total + draw(gen)))
    g.replay()
    g.replay()
    first, second = list_eager(1, 2)
    np.testing.assert_array_equal(np.asarray(total), (first + 0) + second)


def test_g21_two_states_are_switched_inside_one_capture():
    own, first, second = (tg.random.Generator(seed) for seed in (0, 1, 2))

    def both():
        own.graphsafe_set_state(first)
        one = draw(own)
        own.graphsafe_set_state(second)
        return one, draw(own), draw(own)

    step = tg.capture(both)
    found = [step() for _ in range(3)]
    assert_same([one for one, _, _ in found], list_eager(1, 3))
    assert_same([each for _, *rest in found for each in rest], list_eager(2, 6))
    for gen, seed, count in ((first, 1, 3), (second, 2, 6)):
        assert_same([draw(gen)], list_eager(seed, count + 1)[count:])


def test_g22_generators_add_no_memory_to_a_pool():
    def count(generators):
        step = tg.capture(lambda: sum(draw(gen) for gen in generators))
        step()
        return step.pool_bytes

    assert count([tg.random.Generator(0)]) <= 2048
    assert count([tg.random.Generator(seed) for seed in range(5)]) <= 8192


def test_a_signature_that_draws_from_another_generator_is_captured_with_both():
    one, two = tg.random.Generator(1), tg.random.Generator(2)

    def choose(x, is_both):
        return draw(one) + (draw(two) if is_both else x)

    step = tg.capture(choose, static_argnums=1)
    alone, both, again = step(X, False), step(X, True), step(X, False)
    first, second = list_eager(1, 3), list_eager(2, 1)
    assert_same([alone, both, again], [first[0], first[1] + second[0], first[2]])


def test_a_signature_that_draws_nothing_keeps_its_graph():
    gen = tg.random.Generator(1)
    step = tg.capture(lambda x, t: x + draw(gen) if t else x + 1, static_argnums=1)
    step(X, False)
    latest = step._latest
    found = [step(X, True), step(X, False), step(X, True)]
    assert step._latest is latest
    assert_same(found[::2], list_eager(1, 2))


def test_the_default_generator_needs_no_name():
    with tg.random.fork_rng():
        assert tg.random.manual_seed(4) is tg.random.default_generator
        step = tg.capture(lambda: sample(tg.random.next_key()))
        assert_same([step(), step()], list_eager(4, 2))
        assert tg.random.initial_seed() == 4


def test_fork_rng_gives_the_state_back_and_all_means_one():
    with tg.random.fork_rng():
        saved = tg.random.get_rng_state_all()
        with tg.random.fork_rng():
            first = tg.random.next_key()
            assert tg.random.seed() == tg.random.initial_seed()
            tg.random.manual_seed_all(1)
            tg.random.seed_all()
        assert tg.random.next_key() == first
        tg.random.set_rng_state_all(saved)
        tg.random.set_rng_state(tg.random.get_rng_state())
        assert tg.random.next_key() == first
        with pytest.raises(tg.ConfigError, match="2 states"):
            tg.random.set_rng_state_all(saved * 2)


def test_a_state_is_saved_and_restored_by_numpy_and_pickle(tmp_path):
    gen = tg.random.Generator(-1)
    step = tg.capture(lambda: draw(gen))
    step()
    np.save(tmp_path / "state.npy", gen.get_state())
    others = [pickle.loads(pickle.dumps(gen)), copy.deepcopy(gen), gen.clone_state()]
    loaded = tg.random.Generator(9).set_state(np.load(tmp_path / "state.npy"))
    wanted = [np.asarray(step())] * 4
    assert_same([draw(each) for each in (*others, loaded)], wanted)
    assert loaded.initial_seed() == gen.initial_seed() == 2**64 - 1


def test_shared_states_advance_together():
    gen = tg.random.Generator(2)
    shared = gen.graphsafe_get_state()
    assert_same([draw(gen), draw(shared), draw(copy.copy(gen))], list_eager(2, 3))


def test_the_counter_carries_into_its_high_word():
    gen = tg.random.Generator(2)
    state = gen.get_state()
    state[3] = 2**32 - 1
    step = tg.capture(lambda: (draw(gen), draw(gen)))
    gen.set_state(state)
    found = step()
    gen.set_state(state)
    assert_same(found, [np.asarray(draw(gen)), np.asarray(draw(gen))])
    assert list(gen.get_state()[2:4]) == [1, 1]


def test_inner_captured_functions_and_transformations_draw_as_eager_ones():
    gen = tg.random.Generator(6)
    inner = tg.capture(lambda x: x * draw(gen))

    def work(x):
        slope = jax.grad(lambda x: inner(x).sum())(x)
        return slope + jax.vmap(inner)(jnp.ones((2, 8)))[1] + inner(jnp.ones(8))

    step = tg.capture(work)
    found = [work(X), step(X), step(X)]
    eager = list_eager(6, 9)
    assert_same(found, [a + b + c for a, b, c in zip(*[iter(eager)] * 3, strict=True)])


def test_g17_a_key_drawn_before_a_checkpoint_is_used_again_by_its_backward():
    gen = tg.random.Generator(42)

    def loss(w):
        block = jax.checkpoint(lambda w, key: (w * sample(key)) ** 2)
        return block(w, gen.next_key()).sum()

    w = jnp.arange(8.0)
    found = tg.capture(jax.grad(loss))(w)
    gen.manual_seed(42)
    assert_same([found], [np.asarray(2 * w * draw(gen) ** 2)])


def test_partial_mode_draws_around_an_eager_part():
    gen = tg.random.Generator(8)

    def work(x):
        x = x + draw(gen)
        x = jax.pure_callback(lambda x: np.asarray(x) * 2, jax.typeof(x), x)
        return x + draw(gen)

    for prefer in ("graph", "auto"):
        gen.manual_seed(8)
        step = tg.capture(work, mode="partial", prefer=prefer)
        eager = list_eager(8, 4)
        assert_same([step(X), step(X)], [eager[0] * 2 + eager[1], eager[2] * 2 + eager[3]])


def test_donated_state_stays_in_the_graph_beside_keys():
    gen = tg.random.Generator(8)

    def step(state, x):
        return {"w": state["w"] + x * draw(gen)}, x.sum()

    captured = tg.capture(step, donate_argnums=0)
    state, twin = {"w": jnp.zeros(8)}, {"w": jnp.zeros(8)}
    pointers = set()
    for _ in range(3):
        state, _ = captured(state, jnp.ones(8))
        pointers.add(state["w"].data_ptr())
    gen.manual_seed(8)
    for _ in range(3):
        twin, _ = step(twin, jnp.ones(8))
    assert_same([state["w"]], [np.asarray(twin["w"])])
    assert len(pointers) == 1


def test_objects_of_nnx_are_updated_beside_keys():
    nnx = pytest.importorskip("flax.nnx", reason="needs flax")
    gen, total = tg.random.Generator(4), nnx.Variable(jnp.zeros(8))

    def add(total, scale):
        key = gen.next_key()
        total.set_value(total.get_value() + scale * sample(key))
        return sample(key)

    step = tg.capture(add)
    found = [step(total, 1.0) for _ in range(3)]
    eager = list_eager(4, 3)
    assert_same([*found, total.get_value()], [*eager, sum(eager)])


def test_types_of_results_are_known_without_a_draw():
    gen = tg.random.Generator(8)
    step = tg.capture(lambda x: x + draw(gen))
    for _ in range(2):
        assert step.eval_shape(X).shape == (8,)
        # What was traced for the types has a key that no program may have.
        with pytest.raises(tg.CaptureError, match="traces on its own"):
            jax.jit(step)(X)
    assert_same([step(X)], list_eager(8, 1))


def test_reports_show_the_state_as_an_argument():
    gen = tg.random.Generator(8)
    step = tg.capture(lambda x: x + draw(gen), name="step")
    assert "u32[4]" in str(step.trace(X))
    assert "`step` can be captured" in step.explain(X)
    step(X)
    assert "`step` is captured" in step.explain(X)
    assert step.get_graph_data(X).nodes
    assert step.timings()["trace"] > 0
    step.reset()
    assert step.cache_info().currsize == 0
    assert_same([step(X)], list_eager(8, 2)[1:])


def test_a_generator_and_its_graphs_go_with_their_last_names():
    def make():
        gen = tg.random.Generator(1)
        step = tg.capture(lambda: draw(gen))
        step()
        block = record(lambda: draw(gen))
        block[0].replay()
        (captured,) = step._list_inner()
        return step, block, weakref.ref(gen._state), weakref.ref(captured)

    gc.collect()
    gc.disable()
    try:
        step, block, state, captured = make()
        del step
        assert captured() is None
        assert state() is not None
        del block
        assert state() is None
    finally:
        gc.enable()


def test_a_device_takes_eager_keys():
    device = jax.local_devices()[-1]
    gen = tg.random.Generator(1, device)
    assert gen.device is device
    assert gen.next_key().devices() == {device}
