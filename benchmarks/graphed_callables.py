"""A network with a branch in Python: graphed callables against those of PyTorch, on a GPU.

    PYTHONPATH=. python benchmarks/graphed_callables.py [--output DIR] [--repeats N] [--dry-run]

The network is that of PyTorch's CUDA semantics, partial capture: 640 x 4096 -> 2048 -> 1024, where
a value of the first module decides between the other two. A step computes a loss, its gradients and
SGD, without TF32. The sides take turns; PyTorch has a process of its own. Losses of the first steps
are compared before anything is timed. In JAX the step is also captured as it is: partial mode keeps
the branch between two graphs; once with the bits of XLA, once with equivalent numerics.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import gc
import importlib
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from gpu_timing import time_total
from machine import read_driver, read_processor, read_version, write_files

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result file")
_REPEATS = flags.DEFINE_integer("repeats", 9, "turns of each side", 1)
_CALLS = flags.DEFINE_integer("calls", 50, "steps per turn", 1)
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "tiny sizes on any device, without PyTorch")

LIMIT, CHECKED_STEPS, RATE, BATCHES = 0.6, 5, 0.1, 4
CAPTURED, GRAPHED = "the step captured with its branch", "graphed callables"
EQUIVALENT = "captured, equivalent numerics"
JIT, TORCH = "jax.jit of each module", "torch graphed callables"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The network's.

    Attributes:
        batch: rows of an input.
        columns: of the input, the hidden layer and the output.
    """

    batch: int
    columns: tuple[int, int, int]

    def make_weights(self) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Returns the weights of the three modules, with biases."""
        rng = np.random.default_rng(0)
        inputs, hidden, outputs = self.columns
        shapes = [(inputs, hidden), (hidden, outputs), (hidden, outputs)]
        return [
            (
                (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32),
                np.zeros(shape[1], np.float32),
            )
            for shape in shapes
        ]

    def make_batches(self) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Returns inputs and targets."""
        rng = np.random.default_rng(1)
        inputs, _, outputs = self.columns

        def draw(columns: int) -> np.ndarray[Any, Any]:
            return rng.normal(size=(self.batch, columns)).astype(np.float32)

        return [(draw(inputs), draw(outputs)) for _ in range(BATCHES)]


FULL, TINY = Sizes(640, (4096, 2048, 1024)), Sizes(8, (16, 8, 4))


class JaxStep:
    """A train step in JAX: three modules, and a branch in Python.

    Args:
        sizes: of the network.
        side: how it is made fast.
    """

    def __init__(self, sizes: Sizes, side: str) -> None:
        # Imported here because the PyTorch process must not start JAX.
        jax = importlib.import_module("jax")
        jnp, tg = importlib.import_module("jax.numpy"), importlib.import_module("tracegraph")

        def linear(weights: Any, x: Any) -> Any:
            return x @ weights[0] + weights[1]

        self._weights = jax.tree.map(jnp.asarray, sizes.make_weights())
        self._batches = jax.tree.map(jnp.asarray, sizes.make_batches())
        x, hidden = self._batches[0][0], jnp.zeros((sizes.batch, sizes.columns[1]))
        if side == GRAPHED:
            samples = tuple(zip(self._weights, (x, hidden, hidden), strict=True))
            modules = tg.make_graphed_callables((linear,) * 3, samples)
        else:
            modules = (linear if side in (CAPTURED, EQUIVALENT) else jax.jit(linear),) * 3
        first, second, third = modules
        measure = jax.jit(lambda output, target: jnp.mean((output - target) ** 2))
        update = jax.jit(
            functools.partial(jax.tree.map, lambda w, g: w - RATE * g), donate_argnums=0
        )

        def compute_loss(weights: Any, x: Any, target: Any) -> Any:
            hidden = first(weights[0], x)
            # One element: a sum may be so near 0 that rounding alone decides the way.
            way = 1 if hidden[0, 0] > 0 else 2
            return measure((second if way == 1 else third)(weights[way], hidden), target)

        differentiate = jax.value_and_grad(compute_loss)

        def step(weights: Any, x: Any, target: Any) -> Any:
            loss, gradients = differentiate(weights, x, target)
            return update(weights, gradients), loss

        self._step = step
        if side in (CAPTURED, EQUIVALENT):
            numerics = "xla" if side == CAPTURED else "equivalent"
            self._step = tg.capture(step, mode="partial", donate_argnums=0, numerics=numerics)
        self._synchronise = jax.block_until_ready
        self._index = 0

    def advance(self) -> Any:
        """Makes one step and returns its loss."""
        batch = self._batches[self._index % BATCHES]
        self._index += 1
        self._weights, loss = self._step(self._weights, *batch)
        return loss

    def synchronise(self) -> None:
        """Waits for the device."""
        self._synchronise(self._weights)


class TorchStep:
    """The same step with PyTorch's graphed callables.

    Args:
        sizes: of the network.
    """

    def __init__(self, sizes: Sizes) -> None:
        torch = self._torch = importlib.import_module("torch")
        torch.backends.cuda.matmul.allow_tf32 = False
        inputs, hidden, outputs = sizes.columns
        modules = [
            torch.nn.Linear(*shape).cuda()
            for shape in ((inputs, hidden), (hidden, outputs), (hidden, outputs))
        ]
        with torch.no_grad():
            for module, (w, b) in zip(modules, sizes.make_weights(), strict=True):
                module.weight.copy_(torch.from_numpy(w.T.copy()))
                module.bias.copy_(torch.from_numpy(b))
        parameters = [each for module in modules for each in module.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=RATE)
        self._loss = torch.nn.MSELoss()
        self._batches = [
            tuple(torch.from_numpy(each).cuda() for each in batch) for batch in sizes.make_batches()
        ]
        h = torch.randn(sizes.batch, hidden, device="cuda", requires_grad=True)
        # The graph takes the memory of a sample for its input, and later writes all inputs there.
        samples = (self._batches[0][0].clone(), h, h)
        self._modules = [
            torch.cuda.make_graphed_callables(module, (sample,))
            for module, sample in zip(modules, samples, strict=True)
        ]
        self._index = 0

    def advance(self) -> Any:
        """Makes one step and returns its loss."""
        x, target = self._batches[self._index % BATCHES]
        self._index += 1
        first, second, third = self._modules
        self._optimizer.zero_grad(set_to_none=True)
        hidden = first(x)
        output = second(hidden) if hidden[0, 0].item() > 0 else third(hidden)
        loss = self._loss(output, target)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def synchronise(self) -> None:
        """Waits for the device."""
        self._torch.cuda.synchronize()


def serve(connection: Any, sizes: Sizes) -> None:
    """Answers ("losses", count) and ("time", calls) until the pipe is closed."""
    step = TorchStep(sizes)
    while True:
        try:
            request, count = connection.recv()
        except EOFError:
            return
        connection.send(_answer(step, request, count))


def _answer(step: Any, request: str, count: int) -> Any:
    if request == "losses":
        return [float(step.advance()) for _ in range(count)]
    return time_total(step.advance, step.synchronise, count)


def main(argv: Sequence[str]) -> None:
    """Compares and times the sides; ends with 1 when the losses differ."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    sizes, is_dry = (TINY if _DRY_RUN.value else FULL), _DRY_RUN.value
    sides: dict[str, Callable[[str, int], Any]] = {}
    if not is_dry:
        sides[TORCH] = _start_torch(sizes)
    jax = importlib.import_module("jax")
    if not is_dry and jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    jax.config.update("jax_default_matmul_precision", "float32")
    for side in (CAPTURED, EQUIVALENT, GRAPHED, JIT):
        sides[side] = functools.partial(_answer, JaxStep(sizes, side))
    losses = {name: ask("losses", CHECKED_STEPS) for name, ask in sides.items()}
    for name, found in losses.items():
        if not np.allclose(found, losses[JIT], rtol=1e-3):
            sys.exit(f"losses differ: {name} {found}, {JIT} {losses[JIT]}")
    repeats, calls = (2, 3) if is_dry else (_REPEATS.value, _CALLS.value)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, ask in sides.items():
            times[name].append(ask("time", calls))
        gc.collect()
    medians = {name: statistics.median(each) for name, each in times.items()}
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"processor": read_processor(), "gpu": read_driver()},
        "versions": {name: read_version(name) for name in ("jax", "jaxlib", "torch")},
        "sizes": dataclasses.asdict(sizes),
        "microseconds_per_step": times,
        "losses": losses,
    }
    name = "graphed_callables_dry_run" if is_dry else "graphed_callables"
    write_files(_OUTPUT.value, name, document)
    for side, median in medians.items():
        print(f"{side:<32} {median:9.1f} us per step")
    for side in (CAPTURED, EQUIVALENT, GRAPHED):
        if TORCH not in medians:
            break
        ratio = medians[side] / medians[TORCH]
        verdict = "met" if ratio <= LIMIT else "missed"
        print(f"{side}: {ratio:.2f} of PyTorch, limit {LIMIT}: {verdict}")


def _start_torch(sizes: Sizes) -> Callable[[str, int], Any]:
    context = multiprocessing.get_context("spawn")
    connection, far_end = context.Pipe()
    # Ends with this process, or when the pipe does.
    context.Process(target=serve, args=(far_end, sizes), daemon=True).start()
    far_end.close()

    def ask(request: str, count: int) -> Any:
        connection.send((request, count))
        return connection.recv()

    return ask


if __name__ == "__main__":
    app.run(main)
