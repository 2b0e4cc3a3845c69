"""Kernels that exchange arrays between GPUs, each over the memory of the others.

Note [Meetings]
All GPUs launch the same kernel on as many blocks. Block b of one meets block b of the others: it
writes a count into a place of its own on each of them, behind all that it has written before, and
waits until their counts have come to its own memory. Counts only grow, from launch to launch, so
that a graph needs no new value. All blocks do the same elements on every GPU, so no other meeting
is needed: what block b reads of another GPU, block b has written there. A word beside the counts
ends all waiting, if a GPU could not be launched.

Note [Two ways to add]
A small sum is done in one shot: each GPU writes its array to all others, they meet once, and each
adds all. The arrays go to one of two places in turn, which is free again: who writes there has met
the others since, at the launch between, and they came there when they had read it.
A large one is done in two: each GPU adds its own part of the arrays where they are, in place if it
must, and after a second meeting all read each other's parts. That moves the fewest bytes. A third
meeting keeps what is still read from being written.
Both add in the order of the GPUs, so that all have the same bits, run after run.
"""

from __future__ import annotations

import dataclasses

from tracegraph.lowering.kernels.device_head import HEAD
from tracegraph.lowering.kernels.own_kernel import name_kernel
from tracegraph.runtime.definition.collective_nodes import (
    MAX_MEMBERS,
    ONE_SHOT_BYTES,
    CollectiveKind,
    Exchange,
)
from tracegraph.runtime.definition.nodes import LaunchShape
from tracegraph.runtime.definition.signals import (
    BLOCKS,
    COUNTS_OFFSET,
    GENERATIONS_OFFSET,
    PLACES_OFFSET,
    SMALL_BLOCKS,
)

THREADS = 512

# By XLA's names: how elements are stored, and what they are added in.
_ELEMENTS = {
    "F32": ("float", "float"),
    "F64": ("double", "double"),
    "F16": ("float16", "float"),
    "BF16": ("bfloat16", "float"),
    "S8": ("signed char", "int"),
    "U8": ("unsigned char", "unsigned"),
    "S16": ("short", "int"),
    "U16": ("unsigned short", "unsigned"),
    "S32": ("int", "int"),
    "U32": ("unsigned", "unsigned"),
    "S64": ("long long", "long long"),
    "U64": ("unsigned long long", "unsigned long long"),
}
_NARROW = ("F16", "BF16")
# As NCCL: a NaN loses against a number.
_JOINS = {
    "SUM": "a + b",
    "PRODUCT": "a * b",
    "MIN": "a < b || b != b ? a : b",
    "MAX": "a > b || b != b ? a : b",
    "": "b",
}

_PEERS = """\
#ifdef __CUDACC__
DEVICE void send_count(unsigned *place, unsigned count) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(place), "r"(count) : "memory");
}
DEVICE unsigned read_count(const unsigned *place) {
    unsigned count;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(count) : "l"(place) : "memory");
    return count;
}
DEVICE void store_vector(void *global, Vector v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(global), "r"(v.words[0]), "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])
                 : "memory");
}
#endif
"""

_COMMON = """\
struct Table {
    const char *sources[MEMBERS];
    char *targets[MEMBERS];
    char *signals[MEMBERS];
    long long count;
    int rank, sender, is_aligned, unused;
};
constexpr int PER_VECTOR = 16 / sizeof(Element);
union Pack { Vector vector; Element elements[PER_VECTOR]; };

DEVICE Value join(Value a, Value b) { return JOIN; }
DEVICE unsigned *find_generation(const Table &table) {
    return (unsigned *)(table.signals[table.rank] + GENERATIONS_OFFSET) + blockIdx.x;
}
DEVICE unsigned *find_count(const Table &table, int on, int from) {
    char *counts = table.signals[on] + COUNTS_OFFSET;
    return (unsigned *)counts + blockIdx.x * MAX_MEMBERS + from;
}
// See Note [Meetings].
DEVICE unsigned meet(const Table &table, unsigned generation) {
    generation += 1;
    sync_block();
    if (threadIdx.x < SIZE) {
        int peer = threadIdx.x;
        send_count(find_count(table, peer, table.rank), generation);
        const unsigned *stop = (const unsigned *)table.signals[table.rank];
        while ((int)(read_count(find_count(table, table.rank, peer)) - generation) < 0)
            if (read_count(stop)) break;
    }
    sync_block();
    return generation;
}
DEVICE void leave(const Table &table, unsigned generation) {
    if (threadIdx.x == 0) *find_generation(table) = generation;
}
DEVICE Element load(const char *array, long long index) {
    return ((const Element *)array)[index];
}
// What a thread has of a range, in turns of all threads: the same on every GPU.
#define FOR_OWN(index, first, last)                                                        \\
    for (long long index = (first) + blockIdx.x * (long long)blockDim.x + threadIdx.x;     \\
         index < (last); index += gridDim.x * (long long)blockDim.x)
DEVICE long long count_vectors(const Table &table, long long count) {
    return table.is_aligned ? count / PER_VECTOR : 0;
}
// The sum of all arrays at one place.
DEVICE Pack join_vectors(const char *const *arrays, long long vector) {
    Pack packs[SIZE], sum;
    #pragma unroll
    for (int i = 0; i < SIZE; i++) packs[i].vector = load_vector(arrays[i] + vector * 16);
    #pragma unroll
    for (int k = 0; k < PER_VECTOR; k++) {
        Value value = open(packs[0].elements[k]);
        #pragma unroll
        for (int i = 1; i < SIZE; i++) value = join(value, open(packs[i].elements[k]));
        sum.elements[k] = close(value);
    }
    return sum;
}
DEVICE Element join_elements(const char *const *arrays, long long index) {
    Value value = open(load(arrays[0], index));
    for (int i = 1; i < SIZE; i++) value = join(value, open(load(arrays[i], index)));
    return close(value);
}
// Elements `first` to `last` of all arrays, joined, to those from `to` on.
DEVICE void join_range(const Table &table, const char *const *arrays, long long first,
                       long long last, char *target, long long to) {
    bool is_even = first % PER_VECTOR == 0 && to % PER_VECTOR == 0;
    long long vectors = is_even ? count_vectors(table, last - first) : 0;
    FOR_OWN(i, 0, vectors)
        store_vector(target + (to / PER_VECTOR + i) * 16,
                     join_vectors(arrays, first / PER_VECTOR + i).vector);
    FOR_OWN(i, vectors * PER_VECTOR, last - first)
        ((Element *)target)[to + i] = join_elements(arrays, first + i);
}
// The same of one array.
DEVICE void copy_range(const Table &table, const char *array, long long first, long long last,
                       char *target, long long to) {
    bool is_even = first % PER_VECTOR == 0 && to % PER_VECTOR == 0;
    long long vectors = is_even ? count_vectors(table, last - first) : 0;
    FOR_OWN(i, 0, vectors)
        store_vector(target + (to / PER_VECTOR + i) * 16,
                     load_vector(array + (first / PER_VECTOR + i) * 16));
    FOR_OWN(i, vectors * PER_VECTOR, last - first)
        ((Element *)target)[to + i] = load(array, first + i);
}
"""

# Each between `unsigned generation = ...` and `leave(...)`; see Note [Two ways to add].
_ONE_SHOT = """\
    char *places = table.signals[table.rank] + PLACES_OFFSET;
    long long offset = (generation & 1) * (long long)SIZE * ONE_SHOT_BYTES;
    for (int i = 0; i < SIZE; i++) {
        int peer = (table.rank + i) % SIZE;
        char *place = table.signals[peer] + PLACES_OFFSET + offset;
        place += table.rank * (long long)ONE_SHOT_BYTES;
        copy_range(table, source, 0, table.count, place, 0);
    }
    generation = meet(table, generation);
    const char *arrays[SIZE];
    for (int i = 0; i < SIZE; i++) arrays[i] = places + offset + i * (long long)ONE_SHOT_BYTES;
    join_range(table, arrays, 0, table.count, target, 0);
"""
_TWO_SHOTS = """\
    long long part = (table.count + SIZE - 1) / SIZE;
    part = (part + PER_VECTOR - 1) / PER_VECTOR * PER_VECTOR;
    long long first = at_most(table.rank * part, table.count);
    generation = meet(table, generation);
    join_range(table, table.sources, first, at_most(first + part, table.count), target, first);
    generation = meet(table, generation);
    for (int i = 1; i < SIZE; i++) {
        int peer = (table.rank + i) % SIZE;
        first = at_most(peer * part, table.count);
        copy_range(table, table.targets[peer], first, at_most(first + part, table.count), target,
                   first);
    }
    generation = meet(table, generation);
"""
_REDUCE_SCATTER = """\
    long long part = table.count / SIZE;
    generation = meet(table, generation);
    join_range(table, table.sources, table.rank * part, (table.rank + 1) * part, target, 0);
    generation = meet(table, generation);
"""
_ALL_GATHER = """\
    generation = meet(table, generation);
    for (int i = 0; i < SIZE; i++) {
        int peer = (table.rank + i) % SIZE;
        copy_range(table, table.sources[peer], 0, table.count, target, peer * table.count);
    }
    generation = meet(table, generation);
"""
_ALL_TO_ALL = """\
    long long part = table.count / SIZE;
    generation = meet(table, generation);
    for (int i = 0; i < SIZE; i++) {
        int peer = (table.rank + i) % SIZE;
        copy_range(table, table.sources[peer], table.rank * part, (table.rank + 1) * part, target,
                   peer * part);
    }
    generation = meet(table, generation);
"""
_PERMUTE = """\
    generation = meet(table, generation);
    if (table.sender >= 0)
        copy_range(table, table.sources[table.sender], 0, table.count, target, 0);
    else FOR_OWN(i, 0, table.count) target[i] = 0;
    generation = meet(table, generation);
"""
_BODIES = {
    CollectiveKind.REDUCE_SCATTER: _REDUCE_SCATTER,
    CollectiveKind.ALL_GATHER: _ALL_GATHER,
    CollectiveKind.ALL_TO_ALL: _ALL_TO_ALL,
    CollectiveKind.PERMUTE: _PERMUTE,
}


@dataclasses.dataclass(frozen=True)
class CollectiveKernel:
    """A kernel for one kind of exchange.

    Attributes:
        symbol: its name in the source.
        source: in C++.
        shape: of a launch.
    """

    symbol: str
    source: str = dataclasses.field(repr=False)
    shape: LaunchShape


def is_one_shot(exchange: Exchange) -> bool:
    """True for a sum that is small enough, see Note [Two ways to add]."""
    element_bytes = 2 if exchange.dtype == "BF16" else int(exchange.dtype[1:]) // 8
    is_sum = exchange.kind is CollectiveKind.ALL_REDUCE
    return is_sum and exchange.count * element_bytes <= ONE_SHOT_BYTES


def write_collective(exchange: Exchange) -> CollectiveKernel:
    """Returns the kernel of an exchange: the same for all arrays of a type, and on all GPUs.

    Args:
        exchange: what it does.
    """
    size = len(exchange.groups[0])
    one_shot = is_one_shot(exchange)
    body = _BODIES.get(exchange.kind) or (_ONE_SHOT if one_shot else _TWO_SHOTS)
    element, value = _ELEMENTS[exchange.dtype]
    is_narrow = exchange.dtype in _NARROW
    opened = "widen(element)" if is_narrow else "element"
    closed = "narrow(value, Element{})" if is_narrow else "(Element)value"
    names = {
        "MEMBERS": MAX_MEMBERS,
        "MAX_MEMBERS": MAX_MEMBERS,
        "SIZE": size,
        "JOIN": _JOINS[exchange.reduction],
        "ONE_SHOT_BYTES": ONE_SHOT_BYTES,
        "GENERATIONS_OFFSET": GENERATIONS_OFFSET,
        "COUNTS_OFFSET": COUNTS_OFFSET,
        "PLACES_OFFSET": PLACES_OFFSET,
    }
    parts = [
        HEAD,
        _PEERS,
        *(f"#define {name} {text}" for name, text in names.items()),
        f"typedef {element} Element;",
        f"typedef {value} Value;",
        f"DEVICE Value open(Element element) {{ return {opened}; }}",
        f"DEVICE Element close(Value value) {{ return {closed}; }}",
        "DEVICE long long at_most(long long a, long long b) { return a < b ? a : b; }",
        _COMMON,
    ]
    symbol = name_kernel("exchange", "\n".join([*parts, body]))
    parts += [
        f"KERNEL({THREADS}) {symbol}(const Table table, const char *source, char *target) {{",
        "    wait();",
        "    unsigned generation = *find_generation(table);",
        f"{body}    leave(table, generation);\n}}\n",
    ]
    blocks = SMALL_BLOCKS if one_shot else BLOCKS
    shape = LaunchShape((blocks, 1, 1), (THREADS, 1, 1))
    return CollectiveKernel(symbol, "\n".join(parts), shape)
