"""Leaves that are no arrays: part of the signature, and of the results."""

import dataclasses
import enum
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tracegraph as tg
from tracegraph.tracing.static_leaves import StaticLeaf, list_static_leaves, wrap_static_leaves

X = jnp.arange(4.0)


class Mode(enum.Enum):
    DOUBLE = 2
    TRIPLE = 3


@dataclasses.dataclass(frozen=True)
class Config:
    factor: complex


def scale(tree):
    factor = {"double": 2, Mode.DOUBLE: 2, "triple": 3, Mode.TRIPLE: 3}[tree["mode"]]
    return {"value": tree["x"] * factor, "mode": tree["mode"], "op": jnp.sin}


@pytest.fixture(scope="module")
def model():
    return eqx.nn.MLP(4, 2, 3, 1, key=jax.random.key(0))


def assert_same(got, wanted):
    got, wanted = (jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (got, wanted))
    assert len(got) == len(wanted) > 0
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_model_with_functions_is_as_under_filter_jit(model):
    def apply(model, x):
        return model(x)

    captured = tg.capture(apply)
    for current in (model, model, eqx.tree_at(lambda m: m.activation, model, jnp.tanh), model):
        assert_same(captured(current, X), eqx.filter_jit(apply)(current, X))
    assert captured.cache_info().captures == 2


def test_a_donated_model_comes_back_with_its_functions(model):
    optimizer = optax.adam(0.1)

    def train(model, state, x):
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.sum(m(x) ** 2))(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    captured, wanted = tg.capture(train, donate_argnums=(0, 1)), eqx.filter_jit(train)
    state = other_state = optimizer.init(eqx.filter(model, eqx.is_array))
    other = model
    model, state = jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, (model, state))
    for _ in range(4):
        model, state, loss = captured(model, state, X)
        other, other_state, other_loss = wanted(other, other_state, X)
        assert_same((model, state, loss), (other, other_state, other_loss))
        assert model.activation is other.activation
        assert type(model.layers[0].weight) is tg.Array
    assert captured.cache_info().captures == 1


@pytest.mark.parametrize("mode", ["whole", "partial"])
def test_another_value_is_another_graph(mode):
    captured = tg.capture(scale, mode=mode)
    tree = {"mode": "double", "x": X}
    for wanted in ("double", "triple", Mode.DOUBLE, "double", Mode.TRIPLE):
        # The same tree object, changed in place: the leaf is looked at again.
        tree["mode"] = wanted
        result = captured(tree)
        assert (result["mode"], result["op"]) == (wanted, jnp.sin)
        assert result["value"].tolist() == scale(tree)["value"].tolist()
    assert captured.cache_info().captures == 4


def test_an_equal_value_of_another_identity_is_the_same_graph():
    captured = tg.capture(scale)
    texts = ["".join(["dou", "ble"]) for _ in range(2)]
    assert texts[0] is not texts[1]
    tree = {"mode": texts[0], "x": X}
    captured(tree)
    tree["mode"] = texts[1]
    captured(tree)
    assert captured.cache_info().captures == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Config(1), Config(True)),
        (Config(0.0), Config(-0.0)),
        (frozenset({1}), frozenset({1.0})),
        (lambda: 1, lambda: 1),
        (object(), object()),
        ("1", 1),
        (np.dtype("float32"), jnp.float32),
    ],
)
def test_values_that_python_takes_for_equal(one, other):
    seen = []
    captured = tg.capture(lambda x, held: (seen.append(held), x + 1)[1], verify=False)
    captured(X, {"held": one})
    captured(X, {"held": other})
    captured(X, {"held": one})
    assert captured.cache_info().captures == 2


def test_equal_values_are_one():
    captured = tg.capture(lambda x, held: x + held.factor, verify=False)
    for _ in range(3):
        captured(X, Config(2.0))
    assert captured.cache_info() == (2, 1, 64, 1)


class Factor:
    """No `__eq__`: compared by its identity."""

    def __init__(self, factor):
        self.factor = factor


def test_an_object_without_an_eq_is_compared_by_identity_and_its_inside_is_not_seen():
    captured = tg.capture(lambda x, held: x * held.factor, verify=False)
    one, same = Factor(2.0), Factor(2.0)
    captured(X, one)
    captured(X, same)
    assert captured.cache_info().captures == 2
    one.factor = 3.0
    np.testing.assert_array_equal(captured(X, one), X * 2)
    assert captured.cache_info().captures == 2
    # As a static argument of `jax.jit`.
    jitted = jax.jit(lambda x, held: x * held.factor, static_argnums=1)
    one.factor = 2.0
    jitted(X, one)
    one.factor = 3.0
    np.testing.assert_array_equal(jitted(X, one), X * 2)


def test_an_address_that_comes_again_is_not_taken_for_the_object_that_had_it():
    captured = tg.capture(lambda x, held: x * held.factor, verify=False)
    for factor in range(1, 6):
        # Each is dropped at once, so that Python may give its address to the next.
        np.testing.assert_array_equal(captured(X, Factor(float(factor))), X * factor)
    assert captured.cache_info().captures == 5


def test_an_eq_of_the_users_own_decides_and_a_hash_alone_does_not():
    class Named:
        def __init__(self, name, factor):
            self.name, self.factor = name, factor

        def __eq__(self, other):
            return type(other) is Named and other.name == self.name

        def __hash__(self):
            return 1

    captured = tg.capture(lambda x, held: x * held.factor, verify=False)
    np.testing.assert_array_equal(captured(X, Named("a", 2.0)), X * 2)
    np.testing.assert_array_equal(captured(X, Named("b", 3.0)), X * 3)
    np.testing.assert_array_equal(captured(X, Named("a", 2.0)), X * 2)
    assert captured.cache_info().captures == 2


def test_a_leaf_can_change_between_data_and_static():
    captured = tg.capture(lambda tree: X + len(jax.tree.leaves(tree)), verify=False)
    for tree in (["a", 1.0], [1.0, "a"], ["a", "b"], [1.0, 2.0], ["a", 1.0]):
        captured(tree)
    assert captured.cache_info().captures == 4


def test_all_results_may_be_static():
    captured = tg.capture(lambda x: "text")
    assert captured(X) == captured(X) == "text"


def test_a_result_that_holds_a_traced_value_is_refused():
    with pytest.raises(tg.CaptureError, match="returns a function"):
        tg.capture(lambda x: lambda: x)(X)
    with pytest.raises(tg.CaptureError, match=r"returns a types\.SimpleNamespace"):
        tg.capture(lambda x: types.SimpleNamespace(x=x))(X)


def test_a_static_result_that_changes_is_python_work():
    counter = iter(range(100))
    with pytest.raises(tg.CaptureError, match=r"`result\[1\]` is 'n0' at one trace and 'n1' at"):
        tg.capture(lambda x: (x, f"n{next(counter)}"))(X)
    # A function that is made anew is known by its identity: that of the first trace is returned.
    captured = tg.capture(lambda x: (x, lambda: 1))
    assert captured(X)[1] is captured(X)[1]


def test_static_leaves_can_be_refused():
    captured = tg.capture(scale, static_leaves="refuse")
    with pytest.raises(tg.CaptureError, match=r"a str, not an array(?s:.*)leave static_leaves out"):
        captured({"mode": "double", "x": X})
    with pytest.raises(tg.CaptureError, match=r"returns a str"):
        tg.capture(lambda x: "text", static_leaves="refuse")(X)
    with pytest.raises(tg.ConfigError, match="static_leaves='no' is unknown"):
        tg.capture(scale, static_leaves="no")  # pyright: ignore


def test_reports_name_static_leaves():
    captured = tg.capture(scale)
    tree = {"mode": "double", "x": X}
    assert "static leaf tree['mode']: 'double'" in captured.explain(tree)
    graph = captured.lower(tree).instantiate()
    assert graph(tree)["value"].tolist() == [0.0, 2.0, 4.0, 6.0]
    with pytest.raises(tg.ReplayError, match=r"tree\['mode'\]: wanted 'double', got 'triple'"):
        graph(tree | {"mode": "triple"})


def test_a_result_of_another_structure_is_not_taken_for_the_state():
    """The same leaves in another container are another signature."""
    step = tg.capture(
        lambda s: (s["a"] + 1, s["b"] + 1) if isinstance(s, dict) else (s[0] - 1, s[1] - 1),
        donate_argnums=0,
    )
    state = step({"a": X + 0, "b": X + 1})
    assert step(state)[0].tolist() == X.tolist()


def test_structures_hold_static_leaves():
    tree = {"a": "text", "b": 1.0, "c": [jnp.sin]}
    wrapped = wrap_static_leaves(tree)
    leaves, structure = jax.tree.flatten(wrapped)
    assert leaves == [1.0]
    assert structure.unflatten(leaves) == tree
    assert list_static_leaves(structure) == [("['a']", "text"), ("['c'][0]", jnp.sin)]
    assert structure != jax.tree.structure(wrap_static_leaves(tree | {"a": "other"}))
    assert wrap_static_leaves(wrapped) is wrapped
    assert wrap_static_leaves(same := [1.0, X]) is same
    assert repr(StaticLeaf("text")) == "static 'text'"
    assert StaticLeaf(1) != 1
