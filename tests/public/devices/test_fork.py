"""A forked child leaves its parent's captured functions as they were."""

from __future__ import annotations

import os

import pytest

from tests.processes import run_python

PROGRAM = """
import os, warnings
import jax.numpy as jnp
import tracegraph as tg

# JAX warns of each fork.
warnings.simplefilter("ignore")

def train(state, x):
    return {"w": state["w"] + x}, (state["w"] * x).sum()

def count_bytes():
    return tg.memory.memory_allocated()

step, x = tg.capture(train, donate_argnums=0), jnp.ones(4)
state, loss = step({"w": jnp.zeros(4)}, x)
# No thread of XLA is at work, and holds a lock, when the process is copied.
loss.block_until_ready()
before = count_bytes()
child = os.fork()
if not child:
    # Drops what it has, with all finalisers, and ends as a child must.
    del step, state
    assert count_bytes() < before
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert count_bytes() == before
state, loss = step(state, x)
assert state["w"].tolist() == [2.0] * 4 and float(loss) == 4.0
assert tg.capture(lambda x: x * 2)(x).tolist() == [2.0] * 4
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_no_harm_to_its_parent():
    ended = run_python(["-c", PROGRAM], variables={"JAX_PLATFORMS": "cpu"})
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
