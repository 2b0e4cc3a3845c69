"""Objects of flax.nnx as arguments: updated as `nnx.jit` updates them, with resident state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tracegraph as tg
from tests.processes import run_program
from tracegraph.objects import state_holder

X = jnp.arange(8.0).reshape(2, 4)


class Model(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs)])

    def __call__(self, x):
        x = self.dropout(self.norm(self.first(x)))
        for layer in self.layers:
            x = layer(x)
        return x


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        self.calls = 0


def train(model, optimizer, metrics, x):
    def find_loss(model):
        y = model(x)
        return jnp.mean(y**2), y

    (loss, y), grads = nnx.value_and_grad(find_loss, has_aux=True)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=y, labels=jnp.zeros(2, jnp.int32))
    return loss


def make_training():
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    return model, optimizer, metrics


def read(tree):
    """Every array of a tree of objects, with its path, as bytes that can be compared."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.split(tree)[1]):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found[jax.tree_util.keystr(path)] = np.asarray(
            jax.random.key_data(leaf) if is_key else leaf
        )
    return found


def assert_same(got, wanted):
    got, wanted = read(got), read(wanted)
    assert got.keys() == wanted.keys()
    for path, value in got.items():
        assert value.dtype == wanted[path].dtype
        np.testing.assert_array_equal(value, wanted[path], err_msg=path)


def test_a_training_is_as_under_nnx_jit():
    objects, others = make_training(), make_training()
    captured, jitted = tg.capture(train), nnx.jit(train)
    for index in range(4):
        loss, other = captured(*objects, X + index), jitted(*others, X + index)
        np.testing.assert_array_equal(np.asarray(loss), np.asarray(other))
        assert_same(objects, others)
    assert type(objects[0].first.kernel.get_raw_value()) is tg.Array
    assert objects[2].compute() == others[2].compute()
    # Another mode is another structure.
    for model, optimizer, metrics in (objects, others):
        model.eval()
        metrics.reset()
        (captured if model is objects[0] else jitted)(model, optimizer, metrics=metrics, x=X)
    assert_same(objects, others)
    assert captured.cache_info() == (3, 2, 64, 2)


def add(model, other=None, x=X):
    model.kernel[...] = model.kernel[...] + 1
    if other is not None:
        other.bias[...] = other.bias[...] + jnp.sum(model.kernel[...])
    return model.kernel[...] * x[0, 0]


def linear(seed=0):
    return nnx.Linear(2, 2, rngs=nnx.Rngs(seed))


def test_what_the_user_holds_stays():
    """Under nnx.jit nothing is donated: an array that was in the model can be read ever after."""
    model, captured = linear(), tg.capture(add)
    kernel = model.kernel.get_value()
    before = np.asarray(kernel).copy()
    captured(model)
    captured(model)
    np.testing.assert_array_equal(np.asarray(kernel), before)
    # An array that the user sets is copied as well, and so is one that two variables hold.
    model.kernel.set_value(kernel)
    captured(model)
    np.testing.assert_array_equal(np.asarray(kernel), before)
    np.testing.assert_array_equal(np.asarray(model.kernel[...]), before + 1)
    twin = nnx.clone(model)
    twin.bias.set_value(model.bias.get_value())  # pyright: ignore
    captured(model, twin)
    np.testing.assert_array_equal(np.asarray(model.kernel[...]), before + 2)


HOLDERS = [
    lambda model: nnx.clone(model),
    lambda model: {"kernel": model.kernel.get_value(), "bias": model.bias.get_raw_value()},
    lambda model: jax.tree.map(lambda leaf: leaf, nnx.to_pure_dict(nnx.state(model))),
]


@pytest.mark.parametrize("hold", HOLDERS)
def test_snapshots_keep_their_values(hold):
    """What holds the same arrays as a model, as a target network does, is not trained with it."""
    model, captured = linear(), tg.capture(add)
    captured(model)
    snapshots = []
    for index in range(4):
        if index != 2:
            held = hold(model)
            values = list(map(np.asarray, jax.tree.leaves(held)))
            snapshots.append((held, [value.copy() for value in values]))
        captured(model)
    for held, values in snapshots:
        for leaf, value in zip(jax.tree.leaves(held), values, strict=True):
            np.testing.assert_array_equal(np.asarray(leaf), value)
    assert captured.cache_info().captures == 1


def test_a_state_that_only_the_model_holds_is_not_copied(monkeypatch):
    copies = []
    make_copy = state_holder._copy
    monkeypatch.setattr(state_holder, "_copy", lambda x: copies.append(x.shape) or make_copy(x))
    models, captured = (linear(), linear(1)), tg.capture(add)
    for _ in range(4):
        captured(*models)
    assert len(copies) == 4
    # Another object takes the slow way, with arrays that can be given up all the same.
    for _ in range(3):
        captured(models[0], models[1], X)
        captured(other=models[1], model=models[0])
    assert len(copies) == 4
    held = models[0].kernel.get_value()
    captured(*models)
    assert len(copies) == 5
    assert held.shape == (2, 2)
    del held
    captured(*models)
    assert len(copies) == 5


def test_a_result_that_is_a_part_of_the_state_keeps_its_value():
    model, captured = Counter(), tg.capture(lambda model: (tick(model), model.count[...])[1])
    results = [captured(model) for _ in range(4)]
    assert [int(value) for value in results] == [1, 2, 3, 4]


def tick(model):
    model.count[...] = model.count[...] + 1


def test_objects_that_are_shared_differently_are_different_calls():
    captured, jitted = tg.capture(add), nnx.jit(add)
    one, two, other_one, other_two = (linear(seed) for seed in (0, 1, 0, 1))
    for pick in ((0, 1), (0, 0), (1, 1), (1, 0), (0, 1)):
        captured(*((one, two)[i] for i in pick))  # pyright: ignore
        jitted(*((other_one, other_two)[i] for i in pick))  # pyright: ignore
        assert_same((one, two), (other_one, other_two))
    assert captured.cache_info().captures == 2


def grow(model, x):
    model.calls += 1
    model.count[...] = model.count[...] + 1
    if not hasattr(model, "seen"):
        model.seen = nnx.Variable(jnp.sum(x))
    model.inner = nnx.Param(x * model.calls)
    return x + model.seen[...]


def test_a_structure_that_changes_inside_changes_outside():
    captured, jitted = tg.capture(grow), nnx.jit(grow)
    model, other = Counter(), Counter()
    for _ in range(3):
        result, wanted = captured(model, X), jitted(other, X)
        np.testing.assert_array_equal(np.asarray(result), np.asarray(wanted))
        assert model.calls == other.calls
        assert_same(model, other)
    assert captured.cache_info().captures == 3


def test_results_may_be_objects():
    def pick(models, x):
        models["a"].kernel[...] = models["a"].kernel[...] + x[0, 0]
        return {"same": models["a"], "new": nnx.Param(x * 2), "x": x}

    captured, jitted = tg.capture(pick), nnx.jit(pick)
    models, others = ({"a": linear(), "b": [linear(1)]} for _ in range(2))
    for _ in range(3):
        result, wanted = captured(models, X), jitted(others, X)
        assert result["same"] is models["a"]
        assert type(result["new"]) is nnx.Param
        assert_same((models, result), (others, wanted))
    assert captured.cache_info().captures == 1


def test_variables_and_generators_by_themselves():
    def draw(rngs, variable, scale=1.0):
        variable[...] = variable[...] + scale
        return jax.random.normal(rngs.params(), (3,)) * variable[...]

    captured, jitted = tg.capture(draw), nnx.jit(draw)
    mine, others = ((nnx.Rngs(7), nnx.Param(jnp.ones(()))) for _ in range(2))
    for _ in range(4):
        got, wanted = captured(mine[0], variable=mine[1]), jitted(others[0], variable=others[1])
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))
    assert_same(mine, others)
    assert captured.cache_info() == (3, 1, 64, 1)


def test_two_functions_share_a_model():
    """Training and evaluation alternate: each takes over the state of the other."""
    step, look = tg.capture(add), tg.capture(lambda model: model.kernel[...] * 2)
    model = linear()
    start = np.asarray(model.kernel[...])
    for index in range(3):
        step(model)
        np.testing.assert_array_equal(np.asarray(look(model)), (start + 1 + index) * 2)
    assert step.cache_info().captures == look.cache_info().captures == 1


def test_a_changed_attribute_and_a_replaced_variable_are_seen():
    model, captured = Counter(), tg.capture(lambda model: model.count[...] * 10 + model.calls)
    assert int(captured(model)) == int(captured(model)) == 0
    model.calls = 1
    assert int(captured(model)) == int(captured(model)) == 1
    model.count = nnx.Variable(jnp.full((), 2, jnp.int32))
    assert int(captured(model)) == int(captured(model)) == 21
    model.count[...] = jnp.full((), 3, jnp.int32)
    assert int(captured(model)) == 31
    model.count.set_metadata(kind="mine")
    assert int(captured(model)) == 31
    assert captured.cache_info().captures == 3


def test_static_donated_and_plain_arguments_beside_objects():
    @tg.capture(static_argnames="kind", donate_argnames="total")
    def step(model, total, kind, x=None):
        model.count[...] = model.count[...] + 1
        return {"sum": total["sum"] + getattr(jnp, kind)(X) * model.count[...]}

    model, total = Counter(), {"sum": jnp.zeros(())}
    given = total["sum"]
    for _ in range(2):
        total = step(model, total, "max")
    assert float(step(model, kind="min", total=total)["sum"]) == 21.0
    assert given.is_deleted()
    # The same function without any object.
    double = tg.capture(lambda x: jax.tree.map(lambda leaf: leaf * 2, x))
    assert double(X)[0, 1] == 2
    double(Counter())
    assert double(X)[0, 1] == 2
    assert double.cache_info() == (1, 2, 64, 2)
    double.reset()
    assert double.cache_info() == (1, 2, 64, 0)


def test_a_state_is_a_tree_of_arrays():
    """The functional style stays as it is: what is passed in a State is not updated."""
    graphdef, state = nnx.split(linear())

    @tg.capture(donate_argnums=1)
    def step(graphdef, state):
        model = nnx.merge(graphdef, state)
        add(model)
        return nnx.state(model)

    start = np.asarray(state["kernel"][...]).copy()
    for _ in range(3):
        state = step(graphdef, state)
    np.testing.assert_array_equal(np.asarray(state["kernel"][...]), start + 3)
    assert step.cache_info().captures == 1


def test_a_function_under_nnx_jit():
    model, other = linear(), linear()
    captured = tg.capture(nnx.jit(add))
    for _ in range(3):
        np.testing.assert_array_equal(
            np.asarray(captured(model, x=X + 1)), np.asarray(nnx.jit(add)(other, x=X + 1))
        )
    assert_same(model, other)


def test_a_failed_call_changes_nothing():
    def fail(model, x):
        model.count[...] = model.count[...] + 1
        if x.shape[0] == 2:
            raise KeyError("mine")
        return x

    model, captured = Counter(), tg.capture(fail)
    with pytest.raises(KeyError, match="mine"):
        captured(model, X)
    assert int(model.count[...]) == 0
    captured(model, X[0])
    with pytest.raises(KeyError, match="mine"):
        captured(model, X)
    captured(model, X[0])
    assert int(model.count[...]) == 2
    model.count.get_raw_value().delete()
    with pytest.raises(tg.CaptureError, match=r"`nnx_state\['model.count'\]` has been deleted"):
        captured(model, X[0])


def test_reports_name_the_variables():
    model, captured = linear(), tg.capture(add)
    assert "nnx_state['model.kernel']: f32[2,2]" in captured.explain(model, show="signature")
    assert captured.lower(model).pool_bytes > 0
    assert "add" in str(captured.trace(model))
    captured(model)
    assert "nnx_state['model.kernel']" in captured.explain(model, show="signature")
    assert captured.timings()["trace"] > 0
    assert captured.cache_info() == (0, 1, 64, 1)


def test_partial_mode_and_checking():
    def step(model):
        model.count[...] = model.count[...] + 1
        jax.debug.callback(lambda value: seen.append(int(value)), model.count[...])
        return model.count[...] * 2

    seen = []
    model, captured = Counter(), tg.capture(step, mode="partial")
    assert [int(captured(model)) for _ in range(3)] == [2, 4, 6]
    jax.effects_barrier()
    assert seen[-3:] == [1, 2, 3]


def test_flax_is_not_imported():
    code = "import sys, tracegraph; print([n for n in sys.modules if n.startswith('flax')])"
    assert run_program(code).strip() == "[]"


def test_inside_another_traced_function_the_objects_are_updated():
    inner = tg.capture(add)

    def outer(model):
        inner(model)
        return model.kernel[...].sum()

    model, other = linear(), linear()
    for _ in range(2):
        got, wanted = nnx.jit(outer)(model), nnx.jit(outer)(other)
        assert float(got) == float(wanted)
    assert float(tg.capture(outer)(model)) == float(nnx.jit(outer)(other))
    assert_same(model, other)


def test_types_of_results_are_found_without_a_capture():
    model, x = Model(), X

    def run(model, x):
        model.first.bias[...] = model.first.bias[...] + 1
        return model(x), nnx.Param(x)

    captured = tg.capture(run)
    before = read(model)
    shapes, parameter = captured.eval_shape(model, x)
    assert shapes == nnx.eval_shape(run, model, x)[0] == jax.ShapeDtypeStruct((2, 4), jnp.float32)
    assert isinstance(parameter, nnx.Param)
    # Weights, statistics and the counters of generators stay as they were.
    after = read(model)
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    assert captured.cache_info().currsize == 0
    wanted = nnx.jit(run)(Model(), x)[0]
    np.testing.assert_array_equal(captured(model, x)[0], wanted)
