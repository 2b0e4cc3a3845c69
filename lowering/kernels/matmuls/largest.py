"""The largest element of each row of a matmul, chosen while its kernel has the rows.

Note [Largest of a row]
A greedy decoder needs of its logits the place of the largest one alone. XLA stores all of them,
reads them again, and needs two kernels for a row of a vocabulary, since one block is not enough. A
block of our kernel for few rows has its columns in shared memory when they are finished: a warp for
each row chooses among them, and stores one candidate. A second kernel, of a block for each row,
chooses among the candidates of all blocks. Logits are stored only where something else needs them.

Of equal elements the first is chosen, and NaN is larger than all others: what `jax.lax.argmax`
does. So the value that is chosen is also the row's maximum. Elements are compared as the program
has them, rounded to their type: two that differ behind the last place there are equal.
"""

from __future__ import annotations

from tracegraph.lowering.kernels.device_head import HEAD, TYPES
from tracegraph.lowering.kernels.own_kernel import OwnKernel, name_kernel
from tracegraph.runtime.definition.nodes import LaunchShape

THREADS = 256

BEST = """\
struct Best { float value; int column; };
DEVICE Best find_none() { return {literal(0xff800000u), 0x7fffffff}; }
DEVICE Best choose(Best a, Best b) {
    const bool a_is_nan = a.value != a.value, b_is_nan = b.value != b.value;
    if (a_is_nan != b_is_nan) return a_is_nan ? a : b;
    if (!a_is_nan && a.value != b.value) return a.value > b.value ? a : b;
    return a.column < b.column ? a : b;
}
// Of all lanes of a warp.
DEVICE Best choose_of_lanes(Best best) {
    #pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
        const float column = shuffle_xor(literal((unsigned)best.column), mask);
        best = choose(best, {shuffle_xor(best.value, mask), (int)read_bits(column)});
    }
    return best;
}
"""
_BODY = """\
    start_dependents();
    wait();
    Best *bests = (Best *)shared_memory(), best = find_none();
    const int first = blockIdx.x * CANDIDATES;
    for (int index = threadIdx.x; index < CANDIDATES; index += THREADS)
        best = choose(best, {p0[first + index], p1[first + index]});
    best = choose_of_lanes(best);
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best;
    sync_block();
    if (threadIdx.x) return;
    for (int warp = 1; warp < THREADS / 32; ++warp) best = choose(best, bests[warp]);
    p2[blockIdx.x] = best.column;
    p3[blockIdx.x] = narrow(best.value, Value());
"""


def write_largest(rows: int, candidates: int, kind: str) -> OwnKernel:
    """Returns the kernel that chooses among candidates, see Note [Largest of a row].

    Its parameters are the candidates' values in float32 and their columns, both of rows by
    candidates, and for each row the column and the value of the largest.

    Args:
        rows: how many.
        candidates: of each row.
        kind: XLA's name of the type of the values that are returned.
    """
    sizes = {"CANDIDATES": candidates, "THREADS": THREADS}
    lines = [f"constexpr int {name} = {size};" for name, size in sizes.items()]
    text = "\n".join([*lines, f"typedef {TYPES[kind]} Value;", f"{BEST}{{\n{_BODY}}}\n"])
    symbol = name_kernel("largest", text)
    opening = f"KERNEL(THREADS) {symbol}(float *p0, int *p1, int *p2, Value *p3) {{"
    source = HEAD + text.replace("\n{\n", f"\n{opening}\n", 1)
    shape = LaunchShape((rows, 1, 1), (THREADS, 1, 1), shared_bytes=8 * THREADS // 32)
    return OwnKernel(symbol, source, shape)
