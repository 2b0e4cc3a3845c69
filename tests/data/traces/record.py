"""Records graphs and a trace of their replays anew, and writes them beside this file. Needs a GPU.

Run from the top of the tree: ``python -m tests.data.traces.record``. The files are of jax 0.11.2 on
an H100. They were recorded before nodes had a scope: lines of `graphs.json` count from another
start, its scopes are the names below, and each node's bytes are in one range. In the trace is what
ran on the GPU. `tests/fakes/trace_recordings.py` reads both.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import tracegraph as tg
from tests.paths import DATA

FOLDER = DATA / "traces"
SIZE = 1024


def simple(x: Any, w: Any) -> Any:
    with jax.named_scope("encoder"):
        y = jnp.tanh(x @ w)
    with jax.named_scope("decoder"):
        return jnp.cumsum(y, 0), jnp.sort(y)


def big(x: Any, w: Any) -> Any:
    with jax.named_scope("one"):
        y = x @ w
    with jax.named_scope("two"):
        z = jnp.linalg.cholesky(y @ y.T + 1000 * jnp.eye(y.shape[0]))
    with jax.named_scope("three"):
        return z, z.at[3].set(1.0), jnp.fft.fft(y)


def loop(x: Any, w: Any) -> Any:
    with jax.named_scope("loop"):
        y = lax.while_loop(lambda c: c.sum() < 1e4, lambda c: jnp.abs(c) * 2 + 1, x)
    with jax.named_scope("after"):
        return y @ w, lax.cond(y[0, 0] > 3, jnp.sin, lambda v: jnp.cumsum(v, 0), y)


def record_graphs() -> None:
    """Writes each graph as records, and two replays of each in one trace."""
    x, w = jnp.ones((SIZE, SIZE)), jnp.ones((SIZE, SIZE)) * 0.01
    captured: dict[str, Any] = {
        f.__name__: tg.capture(f, verify=False) for f in (simple, big, loop)
    }
    for function in captured.values():
        jax.block_until_ready(function(x, w))
    graphs = {
        name: dataclasses.asdict(function.get_graph_data(x, w)) | {"buffers": []}
        for name, function in captured.items()
    }
    (FOLDER / "graphs.json").write_text(json.dumps(graphs, separators=(",", ":")))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for function in [*captured.values()] * 2:
                jax.block_until_ready(function(x, w))
            tg.synchronize()
        (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        trace = json.loads(gzip.decompress(path.read_bytes()))
    trace["traceEvents"] = keep_gpu(trace["traceEvents"])
    text = json.dumps(trace).encode()
    (FOLDER / "replays.trace.json.gz").write_bytes(gzip.compress(text, mtime=0))


def keep_gpu(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the events of a GPU's rows, and the empty one at the end."""
    rows = [event for event in events if event.get("name") == "process_name"]
    gpus = {event["pid"] for event in rows if "GPU" in event["args"]["name"]}
    return [event for event in events if event.get("pid") in gpus or not event]


if __name__ == "__main__":
    record_graphs()
