"""A train step in mixed precision: one graph against PyTorch's and `jax.jit`, on a GPU.

    PYTHONPATH=. python benchmarks/amp.py [--output DIR] [--repeats N] [--dtypes D,D] [--dry-run]

The step is that of a GPT with 12 layers of 128, with Adam, from `gpu_models.py`: in bfloat16, and
in float16 with a scaler. PyTorch's peers are CUDA graphs with `torch.autocast` and fused Adam: the
whole step with `GradScaler` in it, and, for float16, as its CUDA semantics write it, with the step
of the scaler after the graph. The best one counts. The sides take turns; each peer has a process of
its own. Losses of the first steps are compared before anything is timed. Ours are two: with XLA's
kernels, and with ``numerics="equivalent"``, which merges small ones as PyTorch's fused Adam does.
What each one's graph waits for is written beside the figures, by `profile()`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from gpu_models import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    GptShape,
    compute_gpt_loss,
    make_batches,
    make_parameters,
)
from gpu_timing import time_total
from machine import read_driver, read_processor, read_version
from peer_process import answer_requests, start_peer

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result file")
_REPEATS = flags.DEFINE_integer("repeats", 7, "turns of each side", 1)
_CALLS = flags.DEFINE_integer("calls", 50, "steps per turn", 1)
_DTYPES = flags.DEFINE_list("dtypes", ["bfloat16", "float16"], "of the matmuls")
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "tiny sizes on any device, without PyTorch")

LIMIT, CHECKED_STEPS, BATCHES, WARMUP_STEPS = 0.6, 8, 2, 3
# Relative: eight bits of a factor, over a few steps whose rounding differs.
TOLERANCE = 2e-2
CAPTURED, EQUIVALENT, JIT = "tg.capture", "tg.capture, equivalent", "jax.jit"
NUMERICS = {CAPTURED: "xla", EQUIVALENT: "equivalent"}
TORCH, TORCH_AFTER = "torch graph", "torch graph, scaler after it"
FULL, TINY = GptShape(12, 128, 4, 256, 64, (4, 64)), GptShape(1, 8, 2, 16, 8, (2, 4))
INITIAL_SCALE = 2.0**12


class JaxStep:
    """The step in JAX: one function.

    Args:
        shape: of the model.
        dtype: of its matmuls.
        side: `CAPTURED`, `EQUIVALENT` or `JIT`.
    """

    def __init__(self, shape: GptShape, dtype: str, side: str) -> None:
        # Imported here because the PyTorch process must not start JAX.
        jax = importlib.import_module("jax")
        jnp, tg = importlib.import_module("jax.numpy"), importlib.import_module("tracegraph")

        def adam(gradient: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
            first, second, count = state
            count = count + 1
            first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, gradient)
            second = jax.tree.map(
                lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, second, gradient
            )
            scales = 1 - BETAS[0] ** count, 1 - BETAS[1] ** count

            def move(p: Any, m: Any, v: Any) -> Any:
                return p - LEARNING_RATE * (m / scales[0]) / (jnp.sqrt(v / scales[1]) + EPSILON)

            return jax.tree.map(move, parameters, first, second), (first, second, count)

        def step(state: Any, tokens: Any, targets: Any) -> Any:
            parameters, moments, scaler = state

            def compute_scaled(parameters: Any) -> Any:
                with tg.amp.autocast(dtype):
                    loss = compute_gpt_loss(parameters, tokens, targets, shape.heads)
                return scaler.scale(loss), loss

            gradient, loss = jax.grad(compute_scaled, has_aux=True)(parameters)
            parameters, moments, found_inf = scaler.step(adam, gradient, moments, parameters)
            return (parameters, moments, scaler.update(found_inf)), loss

        parameters = jax.device_put(make_parameters(shape))
        first, second = (jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))
        scaler = tg.amp.GradScaler(INITIAL_SCALE, enabled=dtype == "float16")
        self._state = parameters, (first, second, jnp.float32(0)), scaler
        self._batches = jax.device_put(make_batches(shape, BATCHES))
        if side == JIT:
            self._step = jax.jit(step, donate_argnums=0)
        else:
            self._step = tg.capture(step, donate_argnums=0, numerics=NUMERICS[side])
        self._synchronise = jax.block_until_ready
        self._index = 0

    def advance(self) -> Any:
        """Makes one step and returns its loss."""
        batch = self._batches[self._index % BATCHES]
        self._index += 1
        self._state, loss = self._step(self._state, *batch)
        return loss

    def synchronise(self) -> None:
        """Waits for the device."""
        self._synchronise(self._state)

    def describe(self) -> tuple[dict[str, Any], str]:
        """Returns what the graph holds and what was replaced, and where its time goes."""
        arguments = (self._state, *self._batches[0])
        _, _, report = str(self._step.explain(*arguments)).partition("replaced:")
        replaced = [line.strip() for line in report.splitlines() if " used" in line]
        sizes = importlib.import_module("gpu_sides").read_sizes(self._step)
        described = {**dataclasses.asdict(sizes), "replaced": replaced}
        return described, str(self._step.profile(*arguments))


class TorchStep:
    """The step in PyTorch: a CUDA graph.

    Args:
        shape: of the model.
        dtype: of its matmuls.
        side: `TORCH` or `TORCH_AFTER`.
        attention: ``explicit`` or ``sdpa``.
    """

    def __init__(self, shape: GptShape, dtype: str, side: str, attention: str) -> None:
        torch = self._torch = importlib.import_module("torch")
        peers = importlib.import_module("gpu_torch_peers")
        parameters = peers.to_device(make_parameters(shape))
        self._parameters = [each.requires_grad_() for each in peers.list_tensors(parameters)]
        self._optimizer = peers.make_optimizer(shape, "fused", self._parameters)
        self._scaler = torch.amp.GradScaler(
            "cuda", init_scale=INITIAL_SCALE, enabled=dtype == "float16"
        )
        self._is_whole = side == TORCH
        self._batches = [peers.to_device(batch) for batch in make_batches(shape, BATCHES)]
        self._static = [torch.empty_like(each) for each in self._batches[0]]
        self._index = 0
        compute_loss = peers.make_gpt_loss(shape, attention)

        def differentiate() -> Any:
            self._optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=getattr(torch, dtype)):
                loss = compute_loss(parameters, *self._static)
            self._scaler.scale(loss).backward()
            return loss.detach()

        # The steps of the warm-up count: their losses are the first ones.
        self._early: list[float] = []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                self._load()
                loss = differentiate()
                self._finish()
                self._early.append(float(loss))
        torch.cuda.current_stream().wait_stream(stream)
        self._optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = differentiate()
            if self._is_whole:
                self._finish()

    def read_early(self) -> list[float]:
        """Returns the losses of the warm-up, once."""
        early, self._early = self._early, []
        return early

    def advance(self) -> Any:
        """Makes one step and returns its loss."""
        self._load()
        self._graph.replay()
        if not self._is_whole:
            self._finish()
        return self._loss

    def synchronise(self) -> None:
        """Waits for the device."""
        self._torch.cuda.synchronize()

    def _load(self) -> None:
        for static, tensor in zip(self._static, self._batches[self._index % BATCHES], strict=True):
            static.copy_(tensor)
        self._index += 1

    def _finish(self) -> None:
        self._scaler.step(self._optimizer)
        self._scaler.update()


def serve(connection: Any, shape: GptShape, dtype: str, side: str, attention: str) -> None:
    """Answers ("losses", count) and ("time", calls) until the pipe is closed."""
    step = TorchStep(shape, dtype, side, attention)
    answer_requests(connection, functools.partial(_answer, step))


def _answer(step: Any, request: str, count: int) -> Any:
    if request == "losses":
        early = step.read_early() if isinstance(step, TorchStep) else []
        return [*early, *(float(step.advance()) for _ in range(count - len(early)))]
    return time_total(step.advance, step.synchronise, count)


def list_peers(dtype: str) -> list[tuple[str, str]]:
    """Returns the sides and attentions of PyTorch for a dtype."""
    sides = [TORCH, TORCH_AFTER] if dtype == "float16" else [TORCH]
    return [(side, attention) for side in sides for attention in ("explicit", "sdpa")]


def main(argv: Sequence[str]) -> None:
    """Compares and times the sides of each dtype; ends with 1 when the losses differ."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    is_dry = _DRY_RUN.value
    folder = pathlib.Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    measured = {dtype: measure(dtype, folder, is_dry=is_dry) for dtype in _DTYPES.value}
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"processor": read_processor(), "gpu": read_driver()},
        "versions": {name: read_version(name) for name in ("jax", "jaxlib", "torch")},
        "sizes": dataclasses.asdict(TINY if is_dry else FULL),
        "microseconds_per_step": {dtype: times for dtype, (times, _) in measured.items()},
        "graphs": {dtype: graphs for dtype, (_, graphs) in measured.items()},
    }
    name = "amp_dry_run" if is_dry else "amp"
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def measure(
    dtype: str, folder: pathlib.Path, *, is_dry: bool
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Returns the microseconds per step of each turn, and what our graphs hold, by side."""
    shape = TINY if is_dry else FULL
    with contextlib.ExitStack() as stack:
        sides: dict[str, Callable[[str, int], Any]] = {}
        for side, attention in [] if is_dry else list_peers(dtype):
            ask = stack.enter_context(start_peer(serve, shape, dtype, side, attention))
            sides[f"{side}, {attention}"] = ask
        jax = importlib.import_module("jax")
        if not is_dry and jax.default_backend() != "gpu":
            sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
        steps = {side: JaxStep(shape, dtype, side) for side in (*NUMERICS, JIT)}
        sides |= {side: functools.partial(_answer, step) for side, step in steps.items()}
        losses = {name: ask("losses", CHECKED_STEPS) for name, ask in sides.items()}
        for name, found in losses.items():
            if not np.allclose(found, losses[JIT], rtol=TOLERANCE):
                sys.exit(f"losses differ in {dtype}: {name} {found}, {JIT} {losses[JIT]}")
        repeats, calls = (2, 3) if is_dry else (_REPEATS.value, _CALLS.value)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, ask in sides.items():
                times[name].append(ask("time", calls))
            gc.collect()
        _print_figures(dtype, {name: statistics.median(each) for name, each in times.items()})
        graphs: dict[str, Any] = {}
        for side, numerics in NUMERICS.items():
            graphs[side], profile = steps[side].describe()
            (folder / f"amp_profile_{dtype}_{numerics}.txt").write_text(f"{profile}\n")
    return times, graphs


def _print_figures(dtype: str, medians: dict[str, float]) -> None:
    for side, median in medians.items():
        print(f"{dtype:<9} {side:<39} {median:9.1f} us per step")
    peers = [median for side, median in medians.items() if side.startswith(TORCH)]
    for side in NUMERICS if peers else ():
        ratio = medians[side] / min(peers)
        verdict = "met" if ratio <= LIMIT else "missed"
        print(f"{dtype:<9} {side}: {ratio:.3f} of PyTorch's best, limit {LIMIT}: {verdict}")


if __name__ == "__main__":
    app.run(main)
