"""GPT-2 small in bfloat16 as a CUDA graph of PyTorch: the peer of `gpt2.py`, in its own process."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from gpu_models import make_batches, make_gpt2_shape, make_parameters
from gpu_timing import time_total
from peer_process import answer_requests

WARMUP_STEPS = 3


class Gpt2Step:
    """A train step with master weights in float32, captured; its batch stays the same.

    Args:
        compiler: mode of `torch.compile`, or empty.
        rate: what gradients are multiplied by.
    """

    def __init__(self, compiler: str, rate: float) -> None:
        self._rate = rate
        self._torch: Any = importlib.import_module("torch")
        torch, peers = self._torch, importlib.import_module("gpu_torch_peers")
        shape = make_gpt2_shape(is_dry=False)
        self._masters = peers.to_device(make_parameters(shape))
        self._leaves = [leaf.requires_grad_() for leaf in peers.list_tensors(self._masters)]
        self._batch = [peers.to_device(array) for array in make_batches(shape, 1)[0]]
        # PyTorch's own attention: flash attention for these sizes.
        compute_loss = peers.make_gpt_loss(shape, "sdpa")

        def compute(masters: Any, *batch: Any) -> Any:
            return compute_loss(_narrow(masters, torch.bfloat16), *batch)

        self._loss = compute
        if compiler:
            self._loss = torch.compile(compute, mode=compiler, fullgraph=True, dynamic=False)
        self._initial = initial = [leaf.detach().clone() for leaf in self._leaves]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                self._advance_eagerly()
        torch.cuda.current_stream().wait_stream(stream)
        self._clear_gradients()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = self._advance_eagerly()
        with torch.no_grad():
            torch._foreach_copy_(self._leaves, initial)

    def train(self, count: int) -> tuple[float, float]:
        """Makes so many steps; returns the last loss, and how far all weights have moved."""
        for _ in range(count):
            self._graph.replay()
        with self._torch.no_grad():
            moved = self._torch._foreach_sub(self._leaves, self._initial)
            squares = sum(float((each * each).sum().item()) for each in moved)
        return float(self._result.item()), squares**0.5

    def time(self, calls: int) -> float:
        """See `gpu_timing.time_total`."""
        return time_total(self._graph.replay, self._torch.cuda.synchronize, calls)

    def _advance_eagerly(self) -> Any:
        self._clear_gradients()
        loss = self._loss(self._masters, *self._batch)
        loss.backward()
        gradients = [leaf.grad for leaf in self._leaves]
        with self._torch.no_grad():
            self._torch._foreach_add_(self._leaves, gradients, alpha=-self._rate)
        return loss.detach()

    def _clear_gradients(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None


def _narrow(tree: Any, dtype: Any) -> Any:
    """Returns a tree of tensors in another type."""
    if isinstance(tree, dict):
        return {key: _narrow(value, dtype) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_narrow(value, dtype) for value in tree]
    return tree.to(dtype)


def serve(connection: Any, compiler: str, rate: float) -> None:
    """Answers requests to train and for times until the pipe is closed."""
    step = Gpt2Step(compiler, rate)
    answer_requests(connection, functools.partial(_answer, step))


def _answer(step: Gpt2Step, request: str, count: int) -> Any:
    return step.time(count) if request == "time" else step.train(count)
