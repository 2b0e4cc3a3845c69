"""Captured functions of each kind that interrupts come to, and whether they are right after one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tracegraph as tg
from tracegraph.replaying.tree_watch import TreeWatch

_SIZE = 4
# As many calls are in one attempt, so that nearly each lasts longer than its delay.
CALLS = 100
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def train(state: Any, x: Any) -> Any:
    """Returns the next state, and a number."""
    return {"w": state["w"] + x.sum(), "inner": {"b": state["inner"]["b"] * 2}}, (x * 3).sum()


def make_state() -> Any:
    """Returns the first state of `train`."""
    return {"w": jnp.arange(float(_SIZE)), "inner": {"b": jnp.ones(_SIZE)}}


def mix(x: Any, y: Any) -> Any:
    """Returns two arrays."""
    return x * y, x + y


def infer(parameters: Any, x: Any) -> Any:
    """Returns one array."""
    return x * parameters["scale"]["a"] + parameters["shift"]


def make_parameters(x: Any) -> Any:
    """Returns parameters of `infer` in dicts that are new."""
    return {"scale": {"a": x}, "shift": x}


class Subjects:
    """Captured functions of each kind, and whether they compute what they should."""

    def __init__(self) -> None:
        self.x = jnp.ones(_SIZE)
        self.train = tg.capture(train, donate_argnums=0)
        self.mix = tg.capture(mix)
        self.infer = tg.capture(infer)
        self.inner = tg.capture(lambda x: x * 2 + 1)
        self.outer = tg.capture(self._call_back, mode="partial", prefer="graph")
        self.check()

    def _call_back(self, x: Any) -> Any:
        y = jax.pure_callback(self._call_inner, jax.ShapeDtypeStruct(x.shape, x.dtype), x + 1)
        return y * 2

    def _call_inner(self, x: Any) -> Any:
        return np.asarray(self.inner(jnp.asarray(x)))

    def check(self) -> None:
        """Raises AssertionError if a function gives a wrong result."""
        state = make_state()
        for _ in range(3):
            state, number = self.train(state, self.x)
            np.testing.assert_array_equal(number, 3.0 * _SIZE)
        np.testing.assert_array_equal(state["w"], np.arange(_SIZE) + 3.0 * _SIZE)
        np.testing.assert_array_equal(state["inner"]["b"], np.full(_SIZE, 8.0))
        product, total = self.mix(self.x * 3, self.x * 4)
        np.testing.assert_array_equal(product, np.full(_SIZE, 12.0))
        np.testing.assert_array_equal(total, np.full(_SIZE, 7.0))
        found = self.infer(make_parameters(self.x * 2), self.x * 3)
        np.testing.assert_array_equal(found, np.full(_SIZE, 8.0))
        np.testing.assert_array_equal(self.outer(self.x), np.full(_SIZE, 10.0))

    def list_locks(self) -> list[tuple[str, Any]]:
        """Returns the locks of the functions, of their graphs and of our modules, with names."""
        locks = []
        for name in ("train", "mix", "infer", "inner", "outer"):
            function = getattr(self, name)
            locks.append((name, function._lock))
            for capture in function._cache.list_latest():
                locks.append((f"a graph of {name}", capture.graph.lock))
                allocator = capture.graph.replay.arena._allocator
                locks.append((f"the allocator of {name}", allocator.lock))
        for name, module in sorted(sys.modules.items()):
            if name.startswith("tracegraph."):
                found = [pair for pair in vars(module).items() if isinstance(pair[1], _LOCKS)]
                locks += [(f"{name}.{word}", lock) for word, lock in found]
        return locks

    def make_replays(self) -> list[Callable[[], None]]:
        """Returns loops of calls: of donated state, plain arrays, new dicts, one in another.

        The last makes watches as the replay of a state does when it meets a new tree.
        """
        state = make_state()

        def call_train() -> None:
            found = state
            for _ in range(CALLS):
                found, _ = self.train(found, self.x)

        def call_mix() -> None:
            for _ in range(CALLS):
                self.mix(self.x, self.x)

        def call_infer() -> None:
            for _ in range(CALLS):
                self.infer(make_parameters(self.x), self.x)

        def call_outer() -> None:
            for _ in range(CALLS // 10):
                self.outer(self.x)

        def watch_trees() -> None:
            for _ in range(CALLS):
                TreeWatch(make_parameters(self.x))

        return [call_train, call_mix, call_infer, call_outer, watch_trees]

    def capture(self) -> None:
        """Captures a new function and replays it."""
        captured = tg.capture(train, donate_argnums=0, verify=False)
        state, _ = captured(make_state(), self.x)
        captured(state, self.x)
