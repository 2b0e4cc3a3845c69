"""`numerics="equivalent"` against `"xla"` and `jax.jit`, on a GPU.

    PYTHONPATH=. python benchmarks/numerics.py [--output DIR] [--case NAME] [--rounds N]

The three sides of a case take turns in one process; the figures are medians over the rounds, of the
time per call with the device's work included. Results are compared before anything is timed: those
of the default bit for bit with XLA's own kernels by its verification, the others with `jax.jit`'s
as a norm, see Note [Sensitive steps].

Note [Sensitive steps]
Where matmuls and convolutions round to TF32, what changes a value by its last bit may change a sum
by a thousandth, and batch norm and many layers make more of it: gradients of biases of ResNet-18
move by 8 % when its sums move by 1e-7. So a side may be as far from `jax.jit` as that is from
itself, twice, when each float32 number of the state is the next one; and `TOLERANCE` in any case.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gpu_models
import jax
import jax.numpy as jnp
import numpy as np
import whole_models
from absl import app, flags
from gpu_timing import time_total
from machine import read_driver, read_processor, read_version

import tracegraph as tg

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result file")
_CASES = flags.DEFINE_multi_string("case", [], "these cases only")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "turns of each side", 1)
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "small, on any device")

SIDES = ("jax.jit", "xla", "equivalent")
RATE = 1e-3
TOLERANCE = 2e-2


@dataclasses.dataclass(frozen=True)
class NumericsCase:
    """A step and what it is called with.

    Attributes:
        name: in the results.
        function: ``(state, *batch)`` to ``(state, result)``, the state donated.
        state: before the first call, of NumPy arrays.
        batch: of every call.
        calls: of one timed block.
    """

    name: str
    function: Callable[..., Any]
    state: Any
    batch: tuple[Any, ...]
    calls: int


def list_makers(*, is_dry: bool) -> dict[str, Callable[[], NumericsCase]]:
    """Returns what makes each case: those that replacements are for, then what none may slow."""
    makers: dict[str, Callable[[], NumericsCase]] = {
        "2000_leaves": functools.partial(make_leaves, is_dry),
        "2000_leaves_trained": functools.partial(make_trained_leaves, is_dry),
        "adam_500_leaves": functools.partial(make_adam, is_dry),
        "embedding": functools.partial(make_embedding, is_dry),
        "gpt2_small_bf16": functools.partial(make_gpt2, is_dry),
    }
    for case in gpu_models.make_cases(is_dry=is_dry):
        if case.name in ("gpt_2x128", "gpt_12x128"):
            makers[case.name] = functools.partial(make_gpt, case)
    for program in whole_models.PROGRAMS:
        makers[program.name] = functools.partial(make_whole, program, is_dry)
    return makers


def make_gpt(case: Any) -> NumericsCase:
    """Returns a step of a small GPT of `gpu_replay.py`."""
    state = jax.tree.map(np.asarray, gpu_models.make_state(case.shape, is_smooth=True))
    (batch,) = gpu_models.make_batches(case.shape, 1)
    return NumericsCase(case.name, case.function, state, batch, case.calls)


def make_whole(program: whole_models.WholeProgram, is_dry: bool) -> NumericsCase:
    """Returns a program of `whole_programs.py`."""
    setup = program.make(is_dry)
    calls = 2 if is_dry else program.calls
    return NumericsCase(program.name, setup.function, setup.state, setup.batch, calls)


def make_leaves(is_dry: bool) -> NumericsCase:
    """Returns gradient descent over many small leaves."""
    rng = np.random.default_rng(0)
    leaves = [rng.normal(size=(8, 8)).astype(np.float32) for _ in range(20 if is_dry else 2000)]

    def step(state: Any, gradients: Any) -> Any:
        return [p - RATE * g for p, g in zip(state, gradients, strict=True)], gradients[0].sum()

    return NumericsCase("2000_leaves", step, leaves, (leaves,), 20)


def make_trained_leaves(is_dry: bool) -> NumericsCase:
    """Returns gradient descent over as many leaves, whose gradients the step computes itself."""
    case = make_leaves(is_dry)

    def step(state: Any, scale: Any) -> Any:
        compute = jax.grad(lambda leaves: sum((scale * leaf**2).sum() for leaf in leaves))
        gradients = compute(state)
        moved = [p - RATE * g for p, g in zip(state, gradients, strict=True)]
        return moved, gradients[0].sum()

    batch = (np.float32(0.5),)
    return dataclasses.replace(case, name="2000_leaves_trained", function=step, batch=batch)


def make_adam(is_dry: bool) -> NumericsCase:
    """Returns a step of Adam over leaves of the sizes of biases and norms."""
    rng = np.random.default_rng(1)
    sizes = [(128,), (512,), (3, 128), (64, 64)] * (5 if is_dry else 125)
    leaves = [rng.normal(size=size).astype(np.float32) for size in sizes]
    ones = [np.ones_like(leaf) for leaf in leaves]

    def step(state: Any, gradients: Any) -> Any:
        parameters, first, second, count = state
        count = count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)
        first_scale, second_scale = 1 - 0.9**count, 1 - 0.999**count

        def move(p: Any, m: Any, v: Any) -> Any:
            return p - RATE * (m / first_scale) / (jnp.sqrt(v / second_scale) + 1e-8)

        moved = jax.tree.map(move, parameters, first, second)
        return (moved, first, second, count), gradients[0].sum()

    return NumericsCase("adam_500_leaves", step, (leaves, ones, ones, np.float32(0)), (leaves,), 20)


def make_embedding(is_dry: bool) -> NumericsCase:
    """Returns a step of a table in bfloat16, whose gradient is a scatter."""
    rng = np.random.default_rng(2)
    rows, width = (512, 8) if is_dry else (50304, 768)
    table = jnp.asarray(rng.normal(size=(rows, width)), jnp.bfloat16)
    tokens = rng.integers(0, rows, (8, 16 if is_dry else 256), dtype=np.int32)

    def step(table: Any, tokens: Any) -> Any:
        def loss(table: Any) -> Any:
            return (table[tokens].astype(jnp.float32) ** 2).sum()

        value, gradient = jax.value_and_grad(loss)(table)
        return table - jnp.bfloat16(RATE) * gradient, value

    return NumericsCase("embedding", step, np.asarray(table), (tokens,), 50)


def make_gpt2(is_dry: bool) -> NumericsCase:
    """Returns a step of GPT-2 small in bfloat16, with master weights in float32."""
    shape = gpu_models.make_gpt2_shape(is_dry=is_dry)
    masters = gpu_models.make_parameters(shape)
    (batch,) = gpu_models.make_batches(shape, 1)

    def step(masters: Any, tokens: Any, targets: Any) -> Any:
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), masters)
        compute = jax.value_and_grad(gpu_models.compute_gpt_loss)
        loss, gradients = compute(weights, tokens, targets, shape.heads)
        move = lambda p, g: p - RATE * g.astype(jnp.float32)  # noqa: E731  as users write it
        return jax.tree.map(move, masters, gradients), loss.astype(jnp.float32)

    return NumericsCase("gpt2_small_bf16", step, masters, batch, 2 if is_dry else 20)


class Side:
    """One way to run a case: its state goes from call to call.

    Args:
        case: what is run.
        name: one of ``SIDES``.
    """

    def __init__(self, case: NumericsCase, name: str) -> None:
        options: dict[str, Any] = {} if name == "jax.jit" else {"numerics": name}
        wrap: Any = jax.jit if name == "jax.jit" else tg.capture
        self.call = wrap(case.function, donate_argnums=0, **options)
        # Copies: on the host device an array would share the memory of the one it is made of.
        self._batch, self._state = jax.tree.map(jnp.array, (case.batch, case.state))
        self._result: Any = None

    def advance(self) -> None:
        """Makes one call."""
        self._state, self._result = self.call(self._state, *self._batch)

    def synchronise(self) -> None:
        """Waits for the last call."""
        jax.block_until_ready((jax.tree.leaves(self._state)[-1:], self._result))

    def read(self) -> list[Any]:
        """Returns the state and the result as arrays of float64."""
        leaves = jax.tree.leaves((self._state, self._result))
        return [np.asarray(_take_data(leaf)).astype(np.float64) for leaf in leaves]

    def is_finite(self) -> bool:
        """True if the last result, without the state, has no number that is NaN or infinite."""
        leaves = [np.asarray(_take_data(leaf)) for leaf in jax.tree.leaves(self._result)]
        floats = (leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact))
        return all(np.isfinite(leaf).all() for leaf in floats)

    def list_replacements(self) -> list[str]:
        """Returns what the report says of replacements."""
        report = self.call.explain(self._state, *self._batch)
        lines = report.split("replaced:")[-1].splitlines() if "replaced:\n" in report else []
        return [line.strip() for line in lines[1:] if line.startswith("  ") and "used" in line]


def measure(case: NumericsCase, rounds: int) -> dict[str, Any]:
    """Returns medians in microseconds per side, ratios, differences and what was replaced.

    Raises:
        AssertionError: the results of a side differ from those of `jax.jit`.
    """
    sides = {name: Side(case, name) for name in SIDES}
    nudged = Side(dataclasses.replace(case, state=nudge(case.state)), "jax.jit")
    differences: dict[str, float] = {}
    for name, side in {**sides, "jax.jit, nudged": nudged}.items():
        side.advance()
        pairs = zip(side.read(), sides["jax.jit"].read(), strict=True)
        differences[name] = max(relate(one, other) for one, other in pairs)
    limit = max(TOLERANCE, 2 * differences["jax.jit, nudged"])
    for name in SIDES:
        assert differences[name] <= limit, f"{case.name}, {name}: {differences}"
    samples: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name, side in sides.items():
            samples[name].append(time_total(side.advance, side.synchronise, case.calls))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "microseconds": medians,
        "equivalent / xla": medians["equivalent"] / medians["xla"],
        "equivalent / jax.jit": medians["equivalent"] / medians["jax.jit"],
        "differences": differences,
        "replaced": sides["equivalent"].list_replacements(),
        "capture seconds": {
            name: dict(sides[name].call.timings()) for name in ("xla", "equivalent")
        },
    }


def _take_data(leaf: Any) -> Any:
    """Returns the numbers of a typed key, and any other leaf as it is."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def nudge(state: Any) -> Any:
    """Returns a state with each float32 number replaced by the next larger one."""

    def move(leaf: Any) -> Any:
        is_float32 = getattr(leaf, "dtype", None) == np.float32
        return np.nextafter(leaf, np.float32(np.inf)) if is_float32 else leaf

    return jax.tree.map(move, state)


def relate(one: Any, other: Any) -> float:
    """Returns the norm of a difference, relative to that of the second array."""
    size = float(np.linalg.norm(other))
    distance = float(np.linalg.norm(one - other))
    return distance / size if size else distance


def describe_run(*, is_dry: bool) -> dict[str, Any]:
    """Returns the date, the command, the machine and the versions of a run."""
    return {
        "date": str(datetime.date.today()),
        "command": " ".join(sys.argv),
        "device": jax.devices()[0].device_kind,
        "driver": "none" if is_dry else read_driver(),
        "processor": read_processor(),
        **{name: read_version(name) for name in ("jax", "jaxlib", "nvidia-cuda-nvrtc")},
    }


def main(argv: Sequence[str]) -> None:
    """Runs the cases and writes one file of results."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    if not _DRY_RUN.value and jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    makers = list_makers(is_dry=_DRY_RUN.value)
    unknown = [name for name in _CASES.value if name not in makers]
    if unknown:
        raise app.UsageError(f"no case {', '.join(unknown)}; there are {', '.join(makers)}")
    path = pathlib.Path(_OUTPUT.value) / "numerics_gpu.json"
    record: dict[str, Any] = {**describe_run(is_dry=_DRY_RUN.value), "cases": {}}
    for name in _CASES.value or makers:
        case = makers[name]()
        row = record["cases"][name] = measure(case, 1 if _DRY_RUN.value else _ROUNDS.value)
        times = ", ".join(f"{side} {row['microseconds'][side]:,.1f}" for side in SIDES)
        print(f"{name:18} {times} us; {row['equivalent / xla']:.2f} x xla", flush=True)
        for line in row["replaced"]:
            print(f"    {line}", flush=True)
        # After each case, so that a run that is cut short leaves what it has.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
