"""An argument that a callback still computes may need the graph that it is for: no lock is held.

The scenarios run in one process of their own, which a watchdog ends when one of them hangs.
"""

from __future__ import annotations

import pytest

from tests.processes import run_python

PROGRAM = """
import faulthandler
faulthandler.dump_traceback_later(300, exit=True)
import threading
import jax, jax.numpy as jnp, numpy as np
import tracegraph as tg

VECTOR = jax.ShapeDtypeStruct((4,), jnp.float32)
ONE = jnp.ones(4)
side = tg.Stream()


def one_region(state, x):
    return {"w": state["w"] + x}, x * 2


def two_regions(state, x):
    side.wait_stream(tg.current_stream())
    with tg.stream(side):
        y = state["w"] * x
    tg.current_stream().wait_stream(side)
    return {"w": state["w"] + x + y}, x * 2


def two_inputs(state, x):
    side.wait_stream(tg.current_stream())
    with tg.stream(side):
        y = state["w"] * x
    tg.current_stream().wait_stream(side)
    return state, x * 2, x + y


@jax.jit
def start_late(gate):
    # A callback of a program whose arguments are there runs before its call returns.
    for _ in range(3):
        gate = jnp.tanh(gate @ gate)
    return gate[0, :4] * 0 + 1


GATE = jnp.ones((900, 900))


def run(function, donated):
    step = tg.capture(function, verify=False, donate_argnums=donated)
    state, inner = {"w": ONE * 0}, {"w": ONE * 0}
    if donated == ():
        state = inner = {"w": ONE}
    for _ in range(2):
        state = step(state, ONE)[0]
    inner_step = step
    called = threading.Event()

    def call_back(a):
        called.wait(0.5)
        own = {"w": jnp.asarray(np.zeros(4, np.float32))}
        return np.asarray(inner_step(own, jnp.asarray(np.asarray(a)))[1])

    late = jax.jit(lambda x: jax.pure_callback(call_back, VECTOR, x))
    results = []
    for new in (False, True):
        y = late(start_late(GATE))
        if new and donated:
            # Contents that are still computed are replaced.
            state = {"w": np.zeros(4, np.float32)}
        state, number, *_ = step(state, y)
        called.set()
        results.append([float(state["w"][0]), float(number[0])])
    return results


for each, donated in ((one_region, (0,)), (two_regions, (0,)), (two_inputs, ())):
    print(run(each, donated))
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    done = run_python(["-c", PROGRAM], variables={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("index", "wanted"),
    [(0, [[4.0, 4.0], [2.0, 4.0]]), (1, [[11.0, 4.0], [2.0, 4.0]]), (2, [[1.0, 4.0], [1.0, 4.0]])],
    ids=["one region", "two regions", "nothing donated"],
)
def test_the_graph_may_be_called_meanwhile(
    printed: list[str], index: int, wanted: list[list[float]]
):
    assert eval(printed[index]) == wanted
