"""Captures over CPU devices of two processes, which `jax.distributed` connects."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor

from tests.processes import run_python

# Each process runs all of it; what it prints are the ends of its captures.
PROGRAM = """
import sys
import jax
own, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, own)
import jax.numpy as jnp, numpy as np
import tracegraph as tg
from tracegraph.capturing import agreement
from tracegraph.jax_internals import find_key_value_store

mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
whole, split = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("data"))

def put(value, sharding):
    shape, dtype = value.shape, value.dtype
    return jax.make_array_from_callback(shape, sharding, lambda index: value[index], dtype=dtype)

def read(tree):
    return [np.asarray(s.data).tobytes() for x in jax.tree.leaves(tree)
            for s in x.addressable_shards]

def wait_for(word):
    find_key_value_store().key_value_set(f"{word}/{own}", "")
    find_key_value_store().blocking_key_value_get(f"{word}/{1 - own}", 400_000)

def refuse(function, kind=tg.CaptureError, *, of=None):
    try:
        tg.capture(function)(x if of is None else of)
    except kind as error:
        # Gloo's threads print, too, and not by lines.
        print("\\nsaid: " + str(error).splitlines()[0], flush=True)

def train(w, x):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * gradient, value

# 1. A train step equals that of jax.jit on every device, with its state in place.
w = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
x = put(np.arange(24, dtype=np.float32).reshape(8, 3) / 8, split)
step, twin = tg.capture(train, donate_argnums=0), jax.jit(train, donate_argnums=0)
ours, theirs = put(w, whole), put(w, whole)
for _ in range(3):
    ours, value = step(ours, x)
    theirs, wanted = twin(theirs, x)
    assert read((ours, value)) == read((theirs, wanted))
assert step.cache_info().misses == 1

# 2. Different programs, then one that fails in one process: refused in both.
def scale(x):
    return x.sum() * (2 + own)

def fail(x):
    if own:
        raise ValueError("planted")
    return x.sum()

refuse(scale)
refuse(fail, Exception)

# 3. One process does not come; its next capture is in step all the same.
agreement.WAIT_S = 0.01
if not own:
    refuse(lambda x: x.sum() * 3)
agreement.WAIT_S = 400.0
wait_for("refused")
assert float(tg.capture(lambda x: x.sum() * 4)(x).addressable_data(0)) == 4 * 276 / 8
# 4. The devices of the other process alone are none to capture for.
theirs_alone = jax.sharding.Mesh([d for d in jax.devices() if d.process_index != own], "data")
refuse(lambda x: x * 2, of=put(w, jax.NamedSharding(theirs_alone, jax.P())))
# Both end together: the first one keeps the store.
wait_for("done")
"""

OF_FIRST = [
    "`scale` is not captured: process 1 captures another program, `scale`",
    "`fail` is not captured: process 1 failed: ValueError: planted",
    "`<lambda>` is not captured: process 1 has not come to it within 0 seconds",
]
OF_SECOND = [
    "`scale` is not captured: process 0 captures another program, `scale`",
    "planted",
]


def test_two_processes_capture_together_or_not_at_all() -> None:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    variables = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}

    def run(own: int) -> list[str]:
        done = run_python(["-c", PROGRAM, own, port], variables=variables)
        assert done.returncode == 0, done.stderr
        return re.findall("^said: (.*)$", done.stdout, re.MULTILINE)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, range(2))
    assert first[:3] == OF_FIRST
    assert second[:2] == OF_SECOND
    for own, line in ((0, first[3]), (1, second[2])):
        assert line == "argument 0 `x` is on the devices of another process", (own, line)
