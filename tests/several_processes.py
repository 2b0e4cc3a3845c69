"""Programs that two processes run together, each with devices of its own."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from typing import Any

from tests.processes import run_copies

# Each process runs all of it; what it prints are the ends of its captures.
START = """
import functools, sys
import jax
own, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, own, local_device_ids=DEVICES)
import jax.numpy as jnp, numpy as np
import tracegraph as tg
from tracegraph.jax_internals import find_key_value_store

count = jax.device_count()
mesh = jax.make_mesh((count,), ("data",), (jax.sharding.AxisType.Auto,))
whole, split = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("data"))

def put(value, sharding):
    shape, dtype = value.shape, value.dtype
    return jax.make_array_from_callback(shape, sharding, lambda index: value[index], dtype=dtype)

def parts(tree):
    return [np.asarray(s.data) for x in jax.tree.leaves(tree) for s in x.addressable_shards]

def read(tree):
    return [part.tobytes() for part in parts(tree)]

def wait_for(word):
    find_key_value_store().key_value_set(f"{word}/{own}", "")
    find_key_value_store().blocking_key_value_get(f"{word}/{1 - own}", 400_000)

def refuse(capture, function, *args, kind=tg.CaptureError):
    try:
        capture(function)(*args)
    except kind as error:
        # Gloo's threads print, too, and not by lines.
        print("\\nsaid: " + str(error).splitlines()[0], flush=True)
        return error
    raise SystemExit("accepted")

def train(w, x):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * gradient, value
"""
# Both end together: the first one keeps the store.
END = """
wait_for("done")
"""
ON_CPU = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}


def run_on_cpus(programs: Sequence[Sequence[object]]) -> list[Any]:
    """Runs both with JAX's own log switched off."""
    return run_copies(programs, variables=ON_CPU)


def run_together(
    program: str,
    *,
    run: Callable[[Sequence[Sequence[object]]], list[Any]] = run_on_cpus,
    devices: str = "None",
) -> tuple[list[str], list[str]]:
    """Runs a program in two processes that `jax.distributed` connects.

    Args:
        program: behind `START`.
        run: runs two commands of Python at the same time, as `tests.processes.run_copies`.
        devices: of each process, as Python has it; all by default.

    Returns:
        For each process the first lines of what it was refused.
    """
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    whole = START.replace("DEVICES", devices) + program + END
    said = []
    for done in run([["-c", whole, own, port] for own in range(2)]):
        assert done.returncode == 0, done.stderr
        said.append(re.findall("^said: (.*)$", done.stdout, re.MULTILINE))
    first, second = said
    return first, second
