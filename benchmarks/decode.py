"""One token of a decoder with a cache: one graph against `jax.jit` and PyTorch's, on a GPU.

    PYTHONPATH=. python benchmarks/decode.py [--output DIR] [--models M,M] [--batches N,N]
        [--compilers C,C] [--repeats N] [--dry-run]

The models have the shapes of Llama, in bfloat16 with random weights, and are written as users write
them: RMS norms, rotary embeddings, grouped queries, a gated MLP. A call takes the tokens of the
last one, writes its keys and values into the cache at a position that moves, and takes the most
probable token. It is captured twice: with XLA's kernels, and with those that may take their place
(`numerics="equivalent"`), whose report is printed. PyTorch's peers do the same in a CUDA graph, op
by op or compiled; the best one counts. The sides take turns; each peer has a process of its own.
Before anything is timed, the largest logits of the first step are compared with those of the same
weights in float32: by how much each side is off is printed.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from decode_models import SHAPES, Shape, Weights
from gpu_timing import time_total
from machine import read_driver, read_processor, read_version, write_files
from peer_process import answer_requests, start_peer

_OUTPUT = flags.DEFINE_string("output", "benchmarks/results", "folder of the result file")
_MODELS = flags.DEFINE_list("models", ["llama_1b", "small"], "names of shapes")
_BATCHES = flags.DEFINE_list("batches", ["1"], "sequences that are decoded at once")
_COMPILERS = flags.DEFINE_list("compilers", ["default"], "modes of torch.compile, or none")
_REPEATS = flags.DEFINE_integer("repeats", 7, "turns of each side", 1)
_CALLS = flags.DEFINE_integer("calls", 50, "tokens per turn", 1)
_DRY_RUN = flags.DEFINE_bool("dry-run", False, "a tiny model on any device, without PyTorch")

# Of the time of the best peer; published rate of an H200's memory, in bytes per second.
LIMITS, BATCH_LIMIT = {"llama_1b": 0.70, "small": 0.6}, 0.8
MEMORY_RATES = {"NVIDIA H200": 4.8e12}
CHECKED_STEPS, WARMUP_STEPS, THETA, EPSILON = 4, 3, 500_000.0, 1e-5
# Of a logit, relative to the largest in float32: eight bits of a factor, in layers one after the
# other.
TOLERANCE = 3e-2
CAPTURED, EQUIVALENT, JIT = "tg.capture", "tg.capture, equivalent", "jax.jit"


class JaxDecoder:
    """The decoder in JAX: one function.

    Args:
        shape: of the model.
        batch: how many sequences.
        side: `CAPTURED`, `EQUIVALENT` or `JIT`.
    """

    def __init__(self, shape: Shape, batch: int, side: str) -> None:
        # Imported here because the PyTorch process must not start JAX.
        jax = importlib.import_module("jax")
        self._weights = Weights().make_model(shape, jax.device_put)
        self._state = _make_jax_state(shape, batch)
        decode = _make_jax_decoder(shape, batch)
        if side == JIT:
            self._decode = jax.jit(decode, donate_argnums=0)
        else:
            numerics = "equivalent" if side == EQUIVALENT else "xla"
            capture = importlib.import_module("tracegraph").capture
            self._decode = capture(decode, donate_argnums=0, numerics=numerics)
        self._synchronise = jax.block_until_ready

    def advance(self) -> Any:
        """Decodes one token, and returns the largest logit of each sequence."""
        self._state, largest = self._decode(self._state, self._weights)
        return largest

    def synchronise(self) -> None:
        """Waits for the device."""
        self._synchronise(self._state)

    def report(self) -> str:
        """Returns what became of the replacements, and how many nodes there are."""
        lines = self._decode.explain(self._state, self._weights).splitlines()
        nodes = len(self._decode.get_graph_data(self._state, self._weights).nodes)
        report = lines.index("replaced:") if "replaced:" in lines else len(lines)
        return "\n".join([f"{nodes} nodes", *lines[report : report + 8]])


def _compute_exact_logits(shape: Shape, batch: int) -> np.ndarray[Any, Any]:
    """Returns the largest logits of the first step, computed in float32."""
    jax, jnp = importlib.import_module("jax"), importlib.import_module("jax.numpy")

    def widen(array: Any) -> Any:
        return array.astype(np.float32) if array.dtype == jnp.bfloat16 else array

    weights = Weights().make_model(shape, lambda array: jax.device_put(widen(array)))
    state = jax.tree.map(widen, _make_jax_state(shape, batch))
    with jax.default_matmul_precision("highest"):
        _, largest = jax.jit(_make_jax_decoder(shape, batch))(state, weights)
    return np.asarray(largest)


def _make_jax_state(shape: Shape, batch: int) -> Any:
    jnp = importlib.import_module("jax.numpy")
    sizes = (batch, shape.context, shape.groups, shape.head_width)
    caches = [tuple(jnp.zeros(sizes, jnp.bfloat16) for _ in "kv") for _ in range(shape.layers)]
    return caches, jnp.int32(shape.context // 2), jnp.arange(batch, dtype=jnp.int32)


def _make_jax_decoder(shape: Shape, batch: int) -> Callable[..., Any]:
    jax, jnp = importlib.import_module("jax"), importlib.import_module("jax.numpy")
    lax, half = jax.lax, shape.head_width // 2
    grouped = (batch, shape.groups, shape.heads // shape.groups, shape.head_width)

    def normalise(x: Any, gain: Any) -> Any:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPSILON)
        return (wide * scale).astype(x.dtype) * gain

    def rotate(x: Any, sine: Any, cosine: Any) -> Any:
        first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        return jnp.concatenate(turned, -1).astype(x.dtype)

    def decode(state: Any, weights: Any) -> tuple[Any, Any]:
        caches, position, tokens = state
        angles = position * THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
        sine, cosine = jnp.sin(angles), jnp.cos(angles)
        is_past = jnp.arange(shape.context) <= position
        x, written = weights["table"][tokens], []
        for block, cache in zip(weights["blocks"], caches, strict=True):
            hidden = normalise(x, block["norm_1"])
            query, key, value = (
                (hidden @ block[name]).reshape(batch, -1, shape.head_width)
                for name in ("query", "key", "value")
            )
            query, key = rotate(query, sine, cosine), rotate(key, sine, cosine)
            keys, values = (
                lax.dynamic_update_slice(kept, new[:, None], (0, position, 0, 0))
                for kept, new in zip(cache, (key, value), strict=True)
            )
            written.append((keys, values))
            scores = jnp.einsum("bgqd,btgd->bgqt", query.reshape(grouped), keys)
            scores = scores.astype(jnp.float32) * shape.head_width**-0.5
            shares = jax.nn.softmax(jnp.where(is_past, scores, -1e9)).astype(x.dtype)
            mixed = jnp.einsum("bgqt,btgd->bgqd", shares, values).reshape(batch, shape.width)
            x = x + mixed @ block["out"]
            hidden = normalise(x, block["norm_2"])
            x = x + (jax.nn.silu(hidden @ block["gate"]) * (hidden @ block["up"])) @ block["down"]
        logits = normalise(x, weights["norm"]) @ weights["head"]
        tokens = jnp.argmax(logits, -1).astype(jnp.int32)
        return (written, (position + 1) % shape.context, tokens), jnp.max(logits, -1)

    return decode


class TorchDecoder:
    """The decoder in PyTorch: a CUDA graph.

    Args:
        shape: of the model.
        batch: how many sequences.
        attention: ``explicit`` or ``sdpa``.
        compiler: a mode of `torch.compile`, or an empty text.
    """

    def __init__(self, shape: Shape, batch: int, attention: str, compiler: str) -> None:
        torch = self._torch = importlib.import_module("torch")
        self._weights = Weights().make_model(shape, functools.partial(_place_in_torch, torch))
        sizes = (batch, shape.context, shape.groups, shape.head_width)
        caches = [
            [torch.zeros(sizes, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
            for _ in range(shape.layers)
        ]
        position = torch.full((1,), shape.context // 2, dtype=torch.long, device="cuda")
        tokens = torch.arange(batch, device="cuda")
        step = _make_torch_decoder(torch, shape, batch, attention)
        if compiler:
            step = torch.compile(step, mode=compiler, dynamic=False, fullgraph=True)
        self._early: list[list[float]] = []

        def decode() -> Any:
            logits = step(self._weights, caches, position, tokens)
            tokens.copy_(logits.argmax(-1))
            position.add_(1).remainder_(shape.context)
            return logits.amax(-1)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(stream):
            # The tokens of the warm-up count: their logits are the first ones.
            self._early = [decode().float().tolist() for _ in range(WARMUP_STEPS)]
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(self._graph):
            self._largest = decode()

    def read_early(self) -> list[list[float]]:
        """Returns the logits of the warm-up, once."""
        early, self._early = self._early, []
        return early

    def advance(self) -> Any:
        """Decodes one token, and returns the largest logit of each sequence."""
        self._graph.replay()
        return self._largest

    def synchronise(self) -> None:
        """Waits for the device."""
        self._torch.cuda.synchronize()


def _place_in_torch(torch: Any, array: Any) -> Any:
    return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)


def _make_torch_decoder(torch: Any, shape: Shape, batch: int, attention: str) -> Callable[..., Any]:
    functional, half = importlib.import_module("torch.nn.functional"), shape.head_width // 2
    powers = torch.arange(half, dtype=torch.float32, device="cuda") / half
    steps = torch.arange(shape.context, device="cuda")
    grouped = (batch, shape.groups, shape.heads // shape.groups, shape.head_width)

    def rotate(x: Any, sine: Any, cosine: Any) -> Any:
        first, second = x[..., :half].float(), x[..., half:].float()
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        return torch.cat(turned, -1).to(x.dtype)

    def attend(query: Any, keys: Any, values: Any, is_past: Any) -> Any:
        if attention == "sdpa":
            return functional.scaled_dot_product_attention(
                query.unsqueeze(2),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=is_past[None],
                enable_gqa=True,
            )
        scores = torch.einsum("bgqd,btgd->bgqt", query.reshape(grouped), keys)
        scores = (scores.float() * shape.head_width**-0.5).masked_fill(~is_past, -1e9)
        return torch.einsum("bgqt,btgd->bgqd", scores.softmax(-1).to(query.dtype), values)

    def decode(weights: Any, caches: Any, position: Any, tokens: Any) -> Any:
        angles = position * THETA**-powers
        sine, cosine, is_past = angles.sin(), angles.cos(), steps <= position
        x = functional.embedding(tokens, weights["table"])
        for block, (keys, values) in zip(weights["blocks"], caches, strict=True):
            hidden = functional.rms_norm(x, (shape.width,), block["norm_1"], EPSILON)
            query, key, value = (
                (hidden @ block[name]).view(batch, -1, shape.head_width)
                for name in ("query", "key", "value")
            )
            query, key = rotate(query, sine, cosine), rotate(key, sine, cosine)
            keys.index_copy_(1, position, key[:, None])
            values.index_copy_(1, position, value[:, None])
            mixed = attend(query, keys, values, is_past).reshape(batch, shape.width)
            x = x + mixed @ block["out"]
            hidden = functional.rms_norm(x, (shape.width,), block["norm_2"], EPSILON)
            gated = functional.silu(hidden @ block["gate"]) * (hidden @ block["up"])
            x = x + gated @ block["down"]
        x = functional.rms_norm(x, (shape.width,), weights["norm"], EPSILON)
        return x @ weights["head"]

    return decode


def serve(connection: Any, shape: Shape, batch: int, attention: str, compiler: str) -> None:
    """Answers ("logits", count) and ("time", calls) until the pipe is closed."""
    decoder = TorchDecoder(shape, batch, attention, compiler)
    answer_requests(connection, functools.partial(_answer, decoder))


def _answer(decoder: Any, request: str, count: int) -> Any:
    if request == "time":
        return time_total(decoder.advance, decoder.synchronise, count)
    early = decoder.read_early() if isinstance(decoder, TorchDecoder) else []
    later = [np.asarray(decoder.advance().tolist()).tolist() for _ in range(count - len(early))]
    return [*early, *later]


def main(argv: Sequence[str]) -> None:
    """Compares and times the sides of each model; ends with 1 when the logits differ."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    is_dry = _DRY_RUN.value
    models = ["tiny"] if is_dry else _MODELS.value
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"processor": read_processor(), "gpu": read_driver()},
        "versions": {name: read_version(name) for name in ("jax", "jaxlib", "torch")},
        "microseconds_per_token": {
            f"{model}, batch {batch}": measure(model, int(batch), is_dry=is_dry)
            for model in models
            for batch in _BATCHES.value
        },
    }
    write_files(_OUTPUT.value, "decode_dry_run" if is_dry else "decode", document)


def measure(model: str, batch: int, *, is_dry: bool) -> dict[str, list[float]]:
    """Returns the microseconds per token of each turn, by side."""
    shape = SHAPES[model]
    jax = importlib.import_module("jax")
    if not is_dry and jax.default_backend() != "gpu":
        sys.exit(f"JAX computes on {jax.default_backend()}, not on a GPU; try --dry-run")
    exact = _compute_exact_logits(shape, batch)
    with contextlib.ExitStack() as stack:
        sides: dict[str, Callable[[str, int], Any]] = {}
        for compiler in [] if is_dry else ["", *filter(None, _COMPILERS.value)]:
            for attention in ("explicit", "sdpa"):
                ask = stack.enter_context(start_peer(serve, shape, batch, attention, compiler))
                sides[" ".join(filter(None, ("torch graph", attention, compiler)))] = ask
        decoders = {side: JaxDecoder(shape, batch, side) for side in (CAPTURED, EQUIVALENT, JIT)}
        sides |= {side: functools.partial(_answer, each) for side, each in decoders.items()}
        logits = {name: ask("logits", CHECKED_STEPS) for name, ask in sides.items()}
        for name, found in logits.items():
            error = np.abs(found[0] - exact).max() / np.abs(exact).max()
            print(f"{model}, batch {batch}  {name:<34} logits are off by {error:.2%} at most")
            if not error <= TOLERANCE:
                sys.exit(f"logits of {model} are wrong: {name} {found[0]}, in float32 {exact}")
        if logits[CAPTURED] != logits[JIT]:
            sys.exit(f"logits of {model} differ: {logits[CAPTURED]}, {JIT} {logits[JIT]}")
        print(f"{model}, batch {batch}: {decoders[EQUIVALENT].report()}")
        repeats, calls = (2, 3) if is_dry else (_REPEATS.value, _CALLS.value)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, ask in sides.items():
                times[name].append(ask("time", calls))
            gc.collect()
    medians = {name: statistics.median(each) for name, each in times.items()}
    limit = LIMITS.get(model) if batch == 1 else BATCH_LIMIT
    _print_figures(f"{model}, batch {batch}", shape, medians, limit)
    return times


def _print_figures(case: str, shape: Shape, medians: dict[str, float], limit: float | None) -> None:
    rate = next((r for name, r in MEMORY_RATES.items() if name in str(read_driver())), None)
    for side, median in medians.items():
        percent = shape.count_bytes() / rate / median * 1e8 if rate else 0
        share = f", {percent:.0f} % of the memory's rate" if rate else ""
        print(f"{case:<18} {side:<32} {median:9.1f} us per token{share}")
    peers = [median for side, median in medians.items() if side.startswith("torch")]
    if peers and limit:
        ratio = medians[EQUIVALENT] / min(peers)
        verdict = "met" if ratio <= limit else "missed"
        print(f"{case:<18} ratio to PyTorch's best {ratio:.2f}, limit {limit}: {verdict}")


if __name__ == "__main__":
    app.run(main)
