"""What this driver takes inside of loops and branches: ``python -m tests.gpu.diagnosis [CASE...]``.

Each case is built and launched in a process of its own, since a wrong one can lose the context of
the GPU or never end. A line says what became of it; a failure has the whole error, with the node,
the kinds of nodes around it, and what the driver itself logs (CUDA 12.9 or later).
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tracegraph as tg
from tests.gpu.subprocesses import run_python
from tracegraph.lowering.kernels.loops import conditions
from tracegraph.lowering.kernels.loops.guards import end_turn, keep_state
from tracegraph.lowering.kernels.loops.slices import MovingUse, copy_slice
from tracegraph.runtime.cuda.device import find_cuda_device
from tracegraph.runtime.cuda.driver.calls import Port
from tracegraph.runtime.cuda.graphs.builder import format_kinds
from tracegraph.runtime.cuda.graphs.graph import CudaGraph
from tracegraph.runtime.cuda.graphs.kernels import KernelLoader
from tracegraph.runtime.definition.graph import Stage
from tracegraph.runtime.definition.graph_nodes import (
    Body,
    ConditionalNode,
    Construct,
    Node,
    list_nested,
)
from tracegraph.runtime.definition.nodes import BufferUse, CopyNode, FillNode, KernelNode

WORDS, ROWS, TIMEOUT_S = 64, 4, 90.0
ROW = 4 * WORDS
X, Y = BufferUse("x", 0, ROW), BufferUse("y", 0, ROW)
TABLE = BufferUse("table", 0, ROWS * ROW)
FLAG, COUNTER, OUTER = (BufferUse(name, 0, 4) for name in ("flag", "counter", "outer"))
PUT = copy_slice("put", MovingUse(X, ROW, 0), MovingUse(TABLE, ROW, 0, ROW), COUNTER).node
KEEP = copy_slice("keep", MovingUse(X, ROW, 0), MovingUse(Y, ROW, 0), COUNTER).node
START = FillNode("start", COUNTER, 0)


def chain(*nodes: Any, is_early: bool = False) -> Body:
    edges = tuple((index, index + 1) for index in range(len(nodes) - 1))
    return Body(nodes, edges, frozenset(edges) if is_early else frozenset())


def loop(*nodes: Any, counter: BufferUse = COUNTER, is_early: bool = False) -> ConditionalNode:
    turn = conditions.count_turn("turn", counter, ROWS).node
    setter: Any = conditions.start_turns("start", counter).node
    body = chain(*nodes, turn, is_early=is_early)
    return ConditionalNode("loop", Construct.WHILE, (body,), setter)


def branch(construct: Construct, *bodies: Body) -> ConditionalNode:
    is_switch = construct is Construct.SWITCH
    index = conditions.set_index("choose", FLAG, len(bodies))
    setter: Any = (index if is_switch else conditions.set_flag("choose", FLAG)).node
    return ConditionalNode("branch", construct, bodies, setter)


def guarded_loop(*nodes: Any) -> ConditionalNode:
    """Returns a loop that ends after the first of two iterations, and puts back `x` as it was."""
    flags = [FLAG._replace(nbytes=1), FLAG._replace(offset=1, nbytes=1)]
    keep: Any = keep_state("keep", [(X, Y), (COUNTER, OUTER)]).node
    end: Any = end_turn("turn", flags, [(X, [Y]), (COUNTER, [OUTER])]).node
    body = chain(*nodes, keep, FillNode("end", FLAG, 0), end)
    setter: Any = conditions.set_flag("choose", flags[0]).node
    return ConditionalNode("loop", Construct.WHILE, (body,), setter)


COPY, ZERO = CopyNode("copy", X, Y), FillNode("zero", Y)
NOTHING = CopyNode("nothing", BufferUse("x", 0, 0), BufferUse("y", 0, 0))
# Stages made by hand: one kind of node in a body each.
STAGES: dict[str, Sequence[Node]] = {
    "a straight chain": (START, PUT, COPY),
    "WHILE: a kernel": (loop(PUT),),
    "WHILE: kernels with early edges": (loop(PUT, KEEP, is_early=True),),
    "WHILE: a memcpy": (loop(COPY),),
    "WHILE: a memset": (loop(ZERO),),
    "WHILE: an empty node": (loop(NOTHING),),
    "WHILE: guarded iterations": (START, FillNode("on", FLAG, 1, 1), guarded_loop(PUT)),
    "WHILE in a WHILE": (loop(loop(PUT), KEEP, counter=OUTER),),
    "IF": (START, branch(Construct.IF, chain(COPY))),
    "IF and ELSE": (START, branch(Construct.IF, chain(COPY), chain(ZERO))),
    "SWITCH": (START, branch(Construct.SWITCH, chain(COPY), chain(ZERO), chain(PUT))),
    "IF in a WHILE": (loop(branch(Construct.IF, chain(PUT), chain(KEEP))),),
    "an empty body": (START, branch(Construct.SWITCH, chain(), chain(COPY), chain(ZERO))),
}
VECTOR = np.linspace(-1, 1, 256, dtype=np.float32)
MATRIX = np.eye(512, dtype=np.float32) * np.float32(0.9)


def repeat(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 99, lambda c: c * 2 + 1, x)


def multiply(x: Any) -> Any:
    turn = lambda _, c: jnp.matmul(c, c, precision="highest") + x  # noqa: E731
    return lax.fori_loop(0, x[0, 0].astype(int) + 3, turn, x)


def factorize(x: Any) -> Any:
    turn = lambda _, c: jnp.linalg.cholesky(c @ c.T + 4 * jnp.eye(512))  # noqa: E731
    return lax.fori_loop(0, x[0, 0].astype(int) + 3, turn, x)


def transform(x: Any) -> Any:
    turn = lambda _, c: jnp.abs(jnp.fft.fft(c)) / 16  # noqa: E731
    return lax.fori_loop(0, x[0].astype(int) + 3, turn, x)


def solve(x: Any) -> Any:
    turn = lambda _, c: jnp.linalg.solve(c + 4 * jnp.eye(512), c)  # noqa: E731
    return lax.fori_loop(0, x[0, 0].astype(int) + 3, turn, x)


# Functions with a library's child graph, or a handler's, in the body of a loop.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "while_loop": (
        lambda x: lax.while_loop(lambda c: c.sum() < 99, lambda c: c * 2 + 1, x),
        VECTOR,
    ),
    "scan of 2000": (lambda x: lax.scan(lambda c, _: (jnp.sin(c), c[0]), x, None, 2000), VECTOR),
    "cond": (lambda x: lax.cond(x[0] > 0, jnp.sort, jnp.cumsum, x), VECTOR),
    "a matmul in a loop": (multiply, MATRIX),
    "a sort in a loop": (
        lambda x: lax.fori_loop(0, x[0].astype(int) + 3, lambda i, c: jnp.sort(c)[::-1] + i, x),
        VECTOR,
    ),
    "cholesky in a loop": (factorize, MATRIX),
    "a transform in a loop": (transform, VECTOR),
    "a solve in a loop": (solve, MATRIX),
}


def run_stage(name: str) -> str:
    """Builds a stage by hand, launches it twice and returns what the table holds then."""
    nodes = tuple(STAGES[name])
    edges = tuple((index, index + 1) for index in range(len(nodes) - 1))
    sizes = {"x": WORDS, "y": WORDS, "table": ROWS * WORDS, "flag": 1, "counter": 1, "outer": 1}
    arrays = {each: jnp.zeros(size, jnp.int32) + 1 for each, size in sizes.items()}
    jax.block_until_ready(arrays)
    pointers = {each: array.unsafe_buffer_pointer() for each, array in arrays.items()}
    cuda = find_cuda_device(jax.devices()[0])
    driver, primary = cuda.context.driver, cuda.context.order.primary
    stage = Stage(nodes, edges)
    print(f"  building {format_kinds(stage)}", flush=True)
    kernels = KernelLoader(driver, primary)
    graph = CudaGraph(
        driver, stage, lambda use: pointers[use.buffer] + use.offset, kernels, {}, name
    )
    print("  instantiated", flush=True)
    with driver.use_context(primary):
        stream = driver.create_stream()
        graph.upload(stream)
        for _ in range(2):
            graph.launcher(stream)()
        print("  launched", flush=True)
        driver.synchronize_stream(stream)
        driver.destroy_stream(stream)
    ports = [edge.port for edge in driver.list_edges(graph.handles[0], 99)]
    rows = np.asarray(arrays["table"] + 0).reshape(ROWS, WORDS)[:, 0].tolist()
    counter, y = int(arrays["counter"][0]), int(arrays["y"][0])
    return f"table {rows}, counter {counter}, y {y}, ports {ports or Port.COMPLETE}"


def run_function(name: str) -> str:
    """Captures a function, and returns of what its graph consists and how far it is from jit's."""
    function, x = FUNCTIONS[name]
    captured: Any = tg.capture(function, verify=False)
    for stage in captured.lower(x).lowered.definition.stages:
        print(f"  {format_kinds(stage)}", flush=True)
        kernels = [n for n in list_nested(stage.nodes) if isinstance(n, KernelNode)]
        print(f"  {len(kernels)} kernels", flush=True)
    found, wanted = captured(x), jax.jit(function)(x)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return f"greatest difference {max(float(jnp.abs(a - b).max()) for a, b in pairs)}"


def diagnose(name: str) -> bool:
    """Runs one case in a process of its own and prints what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "cuda.log")
        variables = {"CUDA_LOG_FILE": str(log), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        arguments = ["-m", "tests.gpu.diagnosis", "--one", name]
        try:
            ran = run_python(arguments, timeout_s=TIMEOUT_S, variables=variables)
            status, said, errors = str(ran.returncode), ran.stdout, ran.stderr
        except subprocess.TimeoutExpired as expired:
            status, said = "hangs", _to_text(expired.stdout)
            errors = _to_text(expired.stderr)
        is_good = status == "0"
        print(f"{'good' if is_good else 'FAIL'}: {name} ({status})\n{said.rstrip()}", flush=True)
        if not is_good:
            print(errors[-3000:])
        if not is_good and log.exists():
            print(f"  the driver's log: {log.read_text()[-2000:]}")
    return is_good


def _to_text(text: Any) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text or ""


def main(arguments: Sequence[str]) -> None:
    """Runs the cases, or with ``--one`` a single one in this process."""
    if arguments[:1] == ["--one"]:
        name = arguments[1]
        print(f"  {run_stage(name) if name in STAGES else run_function(name)}")
        return
    if jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    outcomes = {name: diagnose(name) for name in arguments or [*STAGES, *FUNCTIONS]}
    failed = [name for name, is_good in outcomes.items() if not is_good]
    print(f"{len(outcomes)} cases, failed: {', '.join(failed) or 'none'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
