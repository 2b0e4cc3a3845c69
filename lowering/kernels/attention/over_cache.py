"""The kernel of attention over a cache, for few rows.

Note [Attention over a cache]
One new token of a decoder compares its queries with the keys of all tokens before it, and mixes
their values. Queries that share keys and values are a group. What counts is how long the chain is
from the queries to the result, so one kernel does all of it:

* the positions of a group are split over the blocks of a cluster, and there over the threads: a
  few lanes have one position, each with a vector of its key and of its value;
* keys and values are asked for before the wait for the kernel ahead, see Note [Early loads]: all
  positions but the new one were there before;
* each block computes the queries, and the key and value of the new position, for itself, from what
  the kernel ahead has written: rotations of halves, scales, biases, whatever is element by element.
  One block writes the new position into the cache; all take it from their own shared memory, so
  that none reads what another one writes;
* a thread keeps the largest score so far, the sum of the shares relative to it, and the mixed
  values, and rescales them when a larger score comes (Milakov and Gimelshein, "Online normalizer
  calculation for softmax", 2018; Dao et al., "FlashAttention", 2022). No thread waits for another
  one before the end: then slices of a warp, warps of a block and blocks of a cluster are joined.

Scores, shares and sums are float32. The new key and value are rounded to the cache's type before
they are used, as later tokens will find them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracegraph.lowering.kernels.attention.over_cache_problem import (
    THREADS,
    Attention,
    AttentionTiling,
    choose_attention_tiling,
    count_attention_ring,
    count_attention_shared,
)
from tracegraph.lowering.kernels.attention.over_cache_source import (
    ATTENTION_BODY,
    ATTENTION_FUNCTIONS,
)
from tracegraph.lowering.kernels.device_head import HEAD, TYPES
from tracegraph.lowering.kernels.element_functions import ElementLines
from tracegraph.lowering.kernels.matmuls.few_rows_ends import indent
from tracegraph.lowering.kernels.matmuls.few_rows_problem import SHARED_BYTES, fill_grid
from tracegraph.lowering.kernels.own_kernel import OwnKernel, name_kernel
from tracegraph.runtime.definition.nodes import LaunchShape


def write_attention(problem: Attention, processors: int) -> OwnKernel:
    """Returns the kernel, see Note [Attention over a cache].

    Its parameters are the arrays that are read, the result with the shape (groups, rows, width),
    and the keys and the values where they are updated: the same memory as what is read.

    Args:
        problem: without a problem, see `find_attention_problem`.
        processors: multiprocessors of the GPU.
    """
    tiling = choose_attention_tiling(problem, processors)
    kinds = [*problem.kinds, problem.kind]
    kinds += [problem.cache_kind for each in (problem.keys, problem.values) if each.update]
    score = ElementLines(problem.score, "s")
    groups = {name: name for name in _name_axes("g", problem.groups)}
    head = score.write(groups)
    updates, stores = _write_updates(problem)
    parts = {
        "BASES": indent([*_write_axes("g", "group", problem.groups), *_write_bases(problem)], 4),
        "QUERY": indent(_write_query(problem), 12),
        "UPDATES": indent(updates, 4),
        "STORES": indent(stores, 8),
        "SCORE_HEAD": indent(head, 4),
        "SCORE": indent(_write_score(problem, score), 20),
    }
    body = ATTENTION_BODY
    for name, text in parts.items():
        body = body.replace(f"{{{name}}}\n", text)
    sizes = _write_sizes(problem, tiling)
    symbol = name_kernel("attention", sizes + ATTENTION_FUNCTIONS + body)
    parameters = ", ".join(f"{TYPES[kind]} *p{number}" for number, kind in enumerate(kinds))
    opening = f"KERNEL(THREADS){' CLUSTERED(SPLIT)' if tiling.split > 1 else ''}"
    declared = f"{opening} {symbol}({parameters}) {{\n{body}}}\n"
    blocks = fill_grid(_count_blocks(problem, tiling), tiling.split, processors)
    shared = max(count_attention_shared(problem, tiling), SHARED_BYTES)
    shape = LaunchShape((blocks, 1, 1), (THREADS, 1, 1), shared_bytes=shared)
    cached = [problem.keys, problem.values]
    early = sorted({each.parameter for each in cached}) if _is_early(problem) else []
    return OwnKernel(symbol, HEAD + sizes + ATTENTION_FUNCTIONS + declared, shape, tuple(early))


def _is_early(problem: Attention) -> bool:
    return problem.keys.is_settled and problem.values.is_settled


def _count_blocks(problem: Attention, tiling: AttentionTiling) -> int:
    return problem.group_count * _count_chunks(problem, tiling) * tiling.split


def _count_chunks(problem: Attention, tiling: AttentionTiling) -> int:
    return -(-problem.row_count // tiling.chunk)


def _write_sizes(problem: Attention, tiling: AttentionTiling) -> str:
    sizes = {
        "ROWS": problem.row_count,
        "CHUNK": tiling.chunk,
        "CHUNKS": _count_chunks(problem, tiling),
        "LENGTH": problem.length,
        "WIDTH": problem.width,
        "VECTOR": problem.vector,
        "KEY_STRIDE": problem.keys.stride,
        "VALUE_STRIDE": problem.values.stride,
        "SPLIT": tiling.split,
        "PART": tiling.part,
        "GROUP": tiling.group,
        "PLACES": tiling.places,
        "IS_EARLY": int(_is_early(problem)),
        "BLOCKS": _count_blocks(problem, tiling),
        "THREADS": THREADS,
        "RING_BYTES": count_attention_ring(tiling),
    }
    lines = [f"constexpr int {name} = {size};" for name, size in sizes.items()]
    lines += [
        f"typedef {TYPES[problem.cache_kind]} Kept;",
        f"typedef {TYPES[problem.kind]} Result;",
        "#define MASKED literal(0xff800000u)",
    ]
    return "\n".join(lines) + "\n"


def _name_axes(letter: str, sizes: Sequence[int]) -> list[str]:
    return [f"{letter}{axis}" for axis in range(len(sizes))]


def _write_axes(letter: str, flat: str, sizes: Sequence[int]) -> list[str]:
    """Returns what finds the place along each axis from the place among all elements."""
    lines, stride = [], 1
    for axis in reversed(range(len(sizes))):
        lines.append(f"const int {letter}{axis} = {flat} / {stride} % {sizes[axis]};")
        stride *= sizes[axis]
    return lines


def _write_bases(problem: Attention) -> list[str]:
    groups = {name: name for name in _name_axes("g", problem.groups)}
    lines: list[str] = []
    for name, cached in (("keys", problem.keys), ("values", problem.values)):
        written = ElementLines(cached.base, f"{name}_")
        lines += written.write(groups)
        (base,) = written.name_results()
        lines += [f"const int {name}_base = {base};"]
        lines += [f"const Kept *{name} = p{cached.parameter} + {name}_base;"]
    return [*lines, f"Result *result = p{len(problem.kinds)};"]


def _write_query(problem: Attention) -> list[str]:
    names = [*_name_axes("g", problem.groups), *_name_axes("r", problem.rows), "d"]
    written = ElementLines(problem.query, "q")
    lines = _write_axes("r", "row", problem.rows)
    lines += written.write({name: name for name in names})
    return [*lines, f"query = {written.name_results()[0]};"]


def _write_updates(problem: Attention) -> tuple[list[str], list[str]]:
    """Returns what computes the new key and value and where they are, and what stores them."""
    groups = {name: name for name in _name_axes("g", problem.groups)}
    lines: list[str] = []
    stores: list[str] = []
    parameter = len(problem.kinds) + 1
    for number, (name, cached) in enumerate((("key", problem.keys), ("value", problem.values))):
        if cached.update is None:
            lines.append(f"const int new_{name} = -1;")
            continue
        position = ElementLines(cached.update.position, f"{name}_at_")
        lines += position.write(groups)
        lines.append(f"const int new_{name} = {position.name_results()[0]};")
        element = ElementLines(cached.update.element, f"{name}_")
        lines += element.write({**groups, "d": "d"})
        lines.append(f"const Kept kept_{name} = narrow({element.name_results()[0]}, Kept());")
        place = f"p{parameter}[{name}s_base + new_{name} * {name.upper()}_STRIDE + d]"
        stores += [
            f"fresh[{number} * WIDTH + d] = widen(kept_{name});",
            f"if (first == 0 && new_{name} >= begin && new_{name} < end) {place} = kept_{name};",
        ]
        parameter += 1
    return lines, stores


def _write_score(problem: Attention, score: ElementLines) -> list[str]:
    rows = _name_axes("r", problem.rows)
    names = {name: name for name in [*rows, "t", "sum"]}
    lines = [*_write_axes("r", "row", problem.rows), *score.write(names)]
    return [*lines, f"score = {score.name_results()[0]};"]
