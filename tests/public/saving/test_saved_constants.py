"""What a saved graph holds of closed-over arrays: all that was asked for, and nothing else."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegraph as tg

# XLA:CPU, which stands for a GPU's compiler, does not write what it has read from JAX's cache.
from tests.optimized import optimized as optimized
from tests.raw_graphs import use_device
from tracegraph.__main__ import run_command
from tracegraph.saving import first_calls

RANDOM = np.random.RandomState(0)
W = jnp.asarray(RANDOM.randn(8, 8).astype(np.float32))
B = RANDOM.randn(8).astype(np.float32)
SHIFT = 3 * B
KEYS = jax.random.split(jax.random.key(3), 2)
X = jnp.asarray(RANDOM.randn(2, 8).astype(np.float32))
GIVEN = {"W": W, "B": B, "KEYS": KEYS, "MODEL.weights": W, "MODEL.inner.b": B, "b": B}
GIVEN |= {"Model.scale": 2 * B, "self['inner'].b": B, "SHIFT": SHIFT}
multiply = jax.jit(lambda z: jnp.tanh(z @ W))


class Model:
    """No tree of JAX."""

    scale = 2 * B

    def __init__(self) -> None:
        self.weights, self.inner = W, types.SimpleNamespace(b=B)

    def __call__(self, x: Any) -> Any:
        return x + self.inner.b

    def read(self, x: Any) -> Any:
        return x + SHIFT


MODEL = Model()


def add(x: Any, b: Any = B) -> Any:
    return x + b


# What is closed over, and the names of what is then to be given.
CLOSED_OVER: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "used": (lambda x: x @ W + B, ["W", "B"]),
    "jit": (multiply, ["W"]),
    "jit below": (lambda x: multiply(x) + 1, ["W"]),
    "loop": (lambda x: jax.lax.scan(lambda c, _: (c @ W, None), x, None, length=2)[0], ["W"]),
    "loop over": (lambda x: jax.lax.scan(lambda c, w: (c * w, None), x, W)[0], ["W"]),
    "gradient": (lambda x: jax.grad(lambda y: jnp.sin(multiply(y)).sum())(x), ["W"]),
    "result": (lambda x: (x * 2, W), ["W"]),
    "keys": (lambda x: x + jax.random.normal(KEYS[0], (8,)), ["KEYS"]),
    "object": (lambda x: x @ MODEL.weights, ["MODEL.weights"]),
    "object below": (lambda x: x + getattr(MODEL.inner, "b"), ["MODEL.inner.b"]),  # noqa: B009
    "class": (lambda x: x + Model.scale, ["Model.scale"]),
    "callable": (Model(), ["self['inner'].b"]),
    "called": (lambda x: MODEL(x), ["MODEL.inner.b"]),
    "default": (add, ["b"]),
    "method": (lambda x: MODEL.read(x), ["SHIFT"]),
    "nothing": (lambda x: x * 2, []),
    "written down": (lambda x: x * np.arange(8.0, dtype=np.float32), []),
}


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "step.tg"


def holds_weights(path: pathlib.Path) -> bool:
    """True where the bytes of a row or a column of the weights are in a file."""
    data = path.read_bytes()
    pieces = [
        np.asarray(W)[0],
        np.asarray(W)[:, 0],
        B,
        2 * B,
        np.asarray(jax.random.key_data(KEYS)),
    ]
    return any(np.ascontiguousarray(each).tobytes() in data for each in pieces)


@pytest.mark.parametrize("name", CLOSED_OVER)
def test_without_constants_a_file_has_none_of_the_users_values(
    name: str, path: pathlib.Path
) -> None:
    function, names = CLOSED_OVER[name]
    step = tg.capture(function)
    wanted = step(X)
    step.save(path, constants=False)
    assert not holds_weights(path)
    if not names:
        np.testing.assert_array_equal(tg.load(path)(X), wanted)
        return
    with pytest.raises(tg.SavedFileError, match=f"needs {len(names)} closed-over") as raised:
        tg.load(path)
    assert [each.split(":")[0] for each in raised.value.where.split(", ")] == names
    loaded = tg.load(path, constants={each: GIVEN[each] for each in names})
    for _ in range(2):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), loaded(X), wanted)


@pytest.mark.parametrize("name", ["used", "jit", "loop"])
def test_with_constants_it_has_them_and_gives_the_same_bits(name: str, path: pathlib.Path) -> None:
    step = tg.capture(CLOSED_OVER[name][0])
    wanted = step(X)
    step.save(path)
    assert holds_weights(path)
    np.testing.assert_array_equal(tg.load(path)(X), wanted)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_other_small_weights_are_given(
    kind: str, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEGRAPH_KERNEL_CACHE_PATH", str(path.parent / "kernels"))
    use_device(kind, monkeypatch)
    proven = []
    for name in ("verify_on_host", "verify_on_device"):
        verify = getattr(first_calls, name)
        note = lambda *args, verify=verify: proven.append(verify(*args)) or proven[-1]  # noqa: E731
        monkeypatch.setattr(first_calls, name, note)
    step = tg.capture(CLOSED_OVER["used"][0])
    step(X)
    step.save(path, constants=False)
    loaded: Any = tg.load(path, constants={"W": 2 * W, "B": 3 * B})
    for _ in range(2):
        np.testing.assert_allclose(loaded(X), X @ (2 * W) + 3 * B, rtol=1e-5)
    # Another program than that of the capture: its first call has verified it.
    assert [report.exact for report in proven] == [1]


def test_a_model_is_given_as_a_whole(path: pathlib.Path) -> None:
    step = tg.capture(CLOSED_OVER["object"][0])
    wanted = step(X)
    step.save(path, constants=False)
    other = Model()
    other.weights = 3 * W
    np.testing.assert_allclose(tg.load(path, constants={"MODEL": other})(X), 3 * wanted, rtol=1e-6)


def test_buckets_have_none_either(path: pathlib.Path) -> None:
    step: Any = tg.capture(lambda x: jnp.tanh(x @ W + B), buckets={"x": {0: (2, 4)}})
    wanted = [step(X), step(jnp.concatenate([X, X[:1]]))]
    step.save(path, constants=False)
    assert not holds_weights(path)
    loaded: Any = tg.load(path, constants={"W": W, "B": B})
    for x in (X, jnp.concatenate([X, X[:1]])):
        np.testing.assert_allclose(loaded(x), wanted.pop(0), rtol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.scan(lambda c, _: (multiply(c), None), x, None, length=2)[0],
        lambda x: jax.lax.cond(x.sum() > 0, multiply, jnp.sin, x),
        lambda x: jax.grad(jax.checkpoint(lambda y: jnp.sin(multiply(y)).sum()))(x),
    ],
)
def test_what_cannot_be_left_out_is_refused(
    function: Callable[[Any], Any], path: pathlib.Path
) -> None:
    step = tg.capture(function, name="step")
    wanted = step(X)
    with pytest.raises(tg.SavedFileError) as raised:
        step.save(path, constants=False)
    error = raised.value
    assert "closes over f32[8,8], which XLA's program then holds" in error.what
    assert "the signature x: f32[2,8]" in error.where
    assert "constants=True" in error.fix
    assert not path.exists()
    step.save(path)
    np.testing.assert_array_equal(tg.load(path)(X), wanted)


def test_show_and_explain_count_what_there_is(path: pathlib.Path) -> None:
    large = jnp.ones((512, 512))
    step = tg.capture(lambda x: x @ W + B + large.sum())
    step(X)
    assert "in XLA's program: 2 closed-over arrays, 288 bytes" in str(step.explain(X))
    step.save(path)
    assert run_command(["show", str(path)]).splitlines()[2:7] == [
        "closed-over arrays: 1, 1,048,576 bytes, with their values",
        "  large: f32[512,512]",
        "closed-over arrays in XLA's program: 2, 288 bytes",
        "  W: f32[8,8]",
        "  B: f32[8]",
    ]
    step.save(path, constants=False)
    lines = run_command(["show", str(path)]).splitlines()
    assert lines[2] == "closed-over arrays: 3, 1,048,864 bytes, to be given to tg.load"
    plain = tg.capture(lambda x: x * 2)
    plain(X)
    assert "closed-over" not in str(plain.explain(X))
    plain.save(path)
    assert "closed-over arrays: none" in run_command(["show", str(path)])
