"""The PyTorch peers of `gpu_replay.py`: the same models as CUDA graphs, in a process of their own.

Nothing but this process imports PyTorch, so that neither side's libraries, threads or memory pool
disturb the other. It answers requests from a pipe one by one, see `serve`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import math
import traceback
from collections.abc import Callable
from typing import Any

from gpu_models import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    MLP_DROPOUT,
    MLP_LEARNING_RATE,
    NORM_EPSILON,
    GptShape,
    MlpShape,
    PointwiseShape,
    Shape,
    make_batches,
    make_parameters,
)
from gpu_timing import time_each, time_total

# Untyped, because the other parts of the project are checked without PyTorch.
torch: Any = importlib.import_module("torch")
functional: Any = importlib.import_module("torch.nn.functional")

WARMUP_STEPS = 3
COMPILE_MODES = {"compiled": "default", "autotuned": "max-autotune-no-cudagraphs"}

Loss = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to write a step.

    Attributes:
        attention: ``explicit`` softmax or ``sdpa``; empty where there is none.
        optimizer: ``fused`` or ``foreach``; empty where there is none.
        compiler: empty, or a key of `COMPILE_MODES`.
    """

    attention: str = ""
    optimizer: str = ""
    compiler: str = ""

    @property
    def name(self) -> str:
        """As in the tables."""
        parts = (self.attention, self.optimizer, self.compiler)
        return " ".join(["torch", *(part for part in parts if part)])


def list_variants(shape: Shape, compilers: tuple[str, ...]) -> list[Variant]:
    """Returns the ways to write a case; the best of them counts."""
    if isinstance(shape, PointwiseShape):
        return [Variant()]
    attentions = ("explicit", "sdpa") if isinstance(shape, GptShape) else ("",)
    plain = [Variant(a, optimizer) for a in attentions for optimizer in ("fused", "foreach")]
    return plain + [Variant(a, "fused", c) for c in compilers for a in attentions]


def compute_mlp_loss(parameters: Any, inputs: Any, target: Any) -> Any:
    """Linear, Dropout, Linear, Dropout and the mean square error."""
    hidden = functional.linear(inputs, parameters["in_weight"], parameters["in_bias"])
    hidden = functional.dropout(hidden, MLP_DROPOUT[0])
    output = functional.linear(hidden, parameters["out_weight"], parameters["out_bias"])
    return functional.mse_loss(functional.dropout(output, MLP_DROPOUT[1]), target)


def make_gpt_loss(shape: GptShape, attention: str) -> Loss:
    """Returns the loss of `gpu_models.compute_gpt_loss`, with one of two attentions."""
    width, heads = shape.width, shape.heads
    length = shape.tokens[1]
    attend = _attend_by_sdpa
    if attention == "explicit":
        is_future = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
        attend = functools.partial(_attend_explicitly, is_future)

    def compute_loss(parameters: Any, tokens: Any, targets: Any) -> Any:
        sequences = tokens.shape[0]

        def normalise(x: Any, block: Any, name: str) -> Any:
            gain, bias = block[f"{name}_gain"], block[f"{name}_bias"]
            return functional.layer_norm(x, (width,), gain, bias, NORM_EPSILON)

        def apply(x: Any, block: Any, name: str) -> Any:
            return functional.linear(x, block[f"{name}_weight"], block[f"{name}_bias"])

        def to_heads(x: Any) -> Any:
            return x.view(sequences, length, heads, width // heads).transpose(1, 2)

        x = functional.embedding(tokens, parameters["token_embedding"])
        x = x + parameters["position_embedding"][:length]
        for block in parameters["blocks"]:
            joined = apply(normalise(x, block, "norm_1"), block, "qkv")
            query, key, value = joined.split(width, dim=-1)
            mixed = attend(to_heads(query), to_heads(key), to_heads(value))
            mixed = mixed.transpose(1, 2).reshape(sequences, length, width)
            x = x + apply(mixed, block, "out")
            hidden = apply(normalise(x, block, "norm_2"), block, "up")
            x = x + apply(functional.gelu(hidden, approximate="tanh"), block, "down")
        logits = x @ parameters["token_embedding"].t()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return compute_loss


def _attend_explicitly(is_future: Any, query: Any, key: Any, value: Any) -> Any:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    # The least number of the dtype: under autocast the scores may be of 16 bits.
    least = torch.finfo(scores.dtype).min
    return torch.softmax(scores.masked_fill(is_future, least), dim=-1) @ value


def _attend_by_sdpa(query: Any, key: Any, value: Any) -> Any:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def to_device(tree: Any, name: str = "") -> Any:
    """Returns a tree of NumPy arrays as one of CUDA tensors.

    Whole numbers become int64, which losses need, and weights lie transposed, as in `nn.Linear`.

    Args:
        tree: of dicts, lists and arrays.
        name: its key.
    """
    if isinstance(tree, dict):
        return {key: to_device(value, key) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [to_device(value) for value in tree]
    tensor = torch.from_numpy(tree).cuda()
    if not tensor.is_floating_point():
        return tensor.long()
    return tensor.t().contiguous() if name.endswith("_weight") else tensor


def list_tensors(tree: Any) -> list[Any]:
    """Returns the tensors of a tree."""
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in list_tensors(value)]
    if isinstance(tree, list):
        return [tensor for value in tree for tensor in list_tensors(value)]
    return [tree]


def make_optimizer(shape: Shape, kind: str, parameters: list[Any]) -> Any:
    """Returns Adam for a GPT and SGD for the MLP, safe to capture."""
    flags = {"fused": kind == "fused", "foreach": kind == "foreach"}
    if isinstance(shape, MlpShape):
        return torch.optim.SGD(parameters, lr=MLP_LEARNING_RATE, **flags)
    return torch.optim.Adam(
        parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, capturable=True, **flags
    )


class GraphedStep:
    """A whole step as one CUDA graph: forward, backward and optimizer.

    Args:
        shape: of the case.
        variant: how it is written.
    """

    def __init__(self, shape: Shape, variant: Variant) -> None:
        self._batches = [to_device(batch) for batch in make_batches(shape, 2)]
        self._static = [torch.empty_like(tensor) for tensor in self._batches[0]]
        self._load(self._batches[0])
        self._index = 0
        self.calls = 0
        self._compute = self._make_compute(shape, variant)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._clear_gradients()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._result = self._compute()
        self._restart(shape)

    def advance(self) -> None:
        """Copies the next batch into the static inputs and replays."""
        self._load(self._batches[self._index])
        self._index ^= 1
        self.calls += 1
        self.graph.replay()

    def read_results(self, count: int) -> list[float]:
        """Advances so often, and returns the loss (or the mean of the result) of each call."""
        values = []
        for _ in range(count):
            self.advance()
            values.append(float(self._result.mean().item()))
        return values

    def _load(self, batch: list[Any]) -> None:
        for static, tensor in zip(self._static, batch, strict=True):
            static.copy_(tensor)

    def _make_compute(self, shape: Shape, variant: Variant) -> Callable[[], Any]:
        if isinstance(shape, PointwiseShape):
            self._parameters: list[Any] = []
            (x,) = self._static
            return (lambda: x * 2) if shape.kind == "double" else (lambda: torch.sin(x) * 2 + 1)
        parameters = to_device(make_parameters(shape))
        self._parameters = [tensor.requires_grad_() for tensor in list_tensors(parameters)]
        self._optimizer = make_optimizer(shape, variant.optimizer, self._parameters)
        loss_function: Loss = compute_mlp_loss
        if isinstance(shape, GptShape):
            loss_function = make_gpt_loss(shape, variant.attention)
        if variant.compiler:
            mode = COMPILE_MODES[variant.compiler]
            loss_function = torch.compile(loss_function, mode=mode, fullgraph=True, dynamic=False)

        def compute() -> Any:
            self._clear_gradients()
            loss = loss_function(parameters, *self._static)
            loss.backward()
            self._optimizer.step()
            return loss.detach()

        return compute

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _restart(self, shape: Shape) -> None:
        """Restores the initial numbers in place: the warm-up has changed them."""
        if isinstance(shape, PointwiseShape):
            return
        with torch.no_grad():
            initial = list_tensors(to_device(make_parameters(shape)))
            for parameter, value in zip(self._parameters, initial, strict=True):
                parameter.copy_(value)
            for state in self._optimizer.state.values():
                for value in state.values():
                    if torch.is_tensor(value):
                        value.zero_()


class GraphedChain:
    """A chain of small kernels as one CUDA graph, see `raw_graph.py`.

    Args:
        chain: elements, factor, kernels, static inputs, and whether `copy_` fills the first one
            before each replay.
    """

    def __init__(self, chain: tuple[int, float, int, int, bool]) -> None:
        size, factor, nodes, inputs, is_filled = chain
        statics = [torch.ones(size, device="cuda") for _ in range(inputs)]
        values = [torch.full((size,), value, device="cuda") for value in (1.0, 2.0)]
        # Loads the kernels before the capture.
        self._output = statics[0] * factor + statics[0]
        torch.cuda.synchronize()
        self._output = statics[0]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for other in statics[1:]:
                self._output = self._output + other
            for _ in range(nodes):
                self._output = self._output * factor
        turn = 0

        def fill_and_replay() -> None:
            nonlocal turn
            turn ^= 1
            statics[0].copy_(values[turn])
            self.graph.replay()

        self.advance = fill_and_replay if is_filled else self.graph.replay


class Peers:
    """The variants of the case that is being measured."""

    def __init__(self) -> None:
        # The precision that JAX has by default on this device.
        torch.set_float32_matmul_precision("high")
        self._steps: dict[str, GraphedStep] = {}
        # What is timed, by name: steps, and chains of `raw_graph.py`.
        self._timed: dict[str, GraphedStep | GraphedChain] = {}

    def describe(self) -> dict[str, str]:
        """Returns the versions that only this process knows."""
        return {"torch cuda": str(torch.version.cuda), "torch device": torch.cuda.get_device_name()}

    def list_names(self, shape: Shape, compilers: tuple[str, ...]) -> list[str]:
        """Returns the names that `prepare` takes, and forgets the case before."""
        self._steps.clear()
        self._timed.clear()
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()
        self._shape = shape
        self._variants = {each.name: each for each in list_variants(shape, compilers)}
        return list(self._variants)

    def prepare(self, name: str, count: int) -> list[float]:
        """Captures a variant, and returns the results of its first calls."""
        step = GraphedStep(self._shape, self._variants[name])
        self._steps[name] = self._timed[name] = step
        return step.read_results(count)

    def prepare_chain(self, name: str, chain: tuple[int, float, int, int, bool]) -> None:
        """Captures a chain, see `GraphedChain`."""
        self._timed[name] = GraphedChain(chain)

    def time_total(self, name: str, calls: int) -> float:
        """See `gpu_timing.time_total`."""
        return time_total(self._timed[name].advance, torch.cuda.synchronize, calls)

    def time_each(self, name: str) -> list[float]:
        """See `gpu_timing.time_each`."""
        return time_each(self._timed[name].advance, torch.cuda.synchronize)

    def time_launch(self, name: str) -> list[float]:
        """Times the replay alone, without the copies of the inputs."""
        return time_each(self._steps[name].graph.replay, torch.cuda.synchronize)

    def count_calls(self, name: str) -> int:
        """Returns how many calls a variant's state has gone through."""
        return self._steps[name].calls


def serve(connection: Any) -> None:
    """Answers requests until the pipe is closed.

    Args:
        connection: receives (name of a method of `Peers`, arguments), sends (True, its result) or
            (False, one line on the error).
    """
    find_peers = functools.lru_cache(Peers)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(find_peers(), method)(*arguments))
        except Exception as error:  # noqa: BLE001 one variant that fails must not end the run
            traceback.print_exc()
            answer = (False, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        connection.send(answer)
