"""The kernel of `row_fusion` in C++: what is the same for all problems."""

from __future__ import annotations

FUNCTIONS = """\
template <class T> struct alignas(sizeof(T) == 1 ? VECTOR : 16) Pack { T values[VECTOR]; };
// By all threads of a row.
template <class Combine> DEVICE float reduce_row(float value, float *scratch, Combine combine) {
    #pragma unroll
    for (int mask = 16; mask; mask >>= 1) value = combine(value, shuffle_xor(value, mask));
    if (READERS == 32) return value;
    // All have read what the sum before this one left there.
    sync_block();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    sync_block();
    value = scratch[0];
    #pragma unroll
    for (int warp = 1; warp < READERS / 32; ++warp) value = combine(value, scratch[warp]);
    return value;
}
"""

# The next row is on its way while this one is worked on, where shared memory has room for both.
# Else each vector of it takes the place of one that has been read for the last time.
BODY = """\
    float *scratch = (float *)shared_memory();
    const int lane = threadIdx.x % READERS, group = threadIdx.x / READERS;
    char *copies = shared_memory() + SCRATCH_BYTES + group * SLOTS * ROW_BYTES;
    const Slot slot = hold_slot((Vector *)copies);
    auto copy_vectors = [&](int r, int place, int column) {
{COPIES}
    };
    auto copy_row = [&](int r, int place) {
        #pragma unroll 4
        for (int step = 0; step < STEPS; ++step) {
            const int column = (step * READERS + lane) * VECTOR;
            if (!IS_EVEN && column >= COLUMNS) continue;
            copy_vectors(r, place, column);
        }
    };
{TOTALS}
    if (STARTS_EARLY) start_dependents();
    wait();
    int r = blockIdx.x * GROUPS + group;
    if (r < ROWS) copy_row(r, 0);
    commit_copies();
    // Where the compiler knows that all threads of a warp come here, sums of a row are shorter.
    constexpr bool IS_FULL = ROWS % GROUPS == 0;
    for (int place = 0; r - (IS_FULL ? group : 0) < ROWS; r += STRIDE, place = SLOTS - 1 - place) {
        if (SLOTS == 2) {
            if (r + STRIDE < ROWS) copy_row(r + STRIDE, 1 - place);
            commit_copies();
            await_copies<1>();
        } else await_copies<0>();
        const char *own = copies + place * ROW_BYTES;
{ROW}
        if (SLOTS == 1) commit_copies();
    }
{FINISH}
"""

TOTALS = "    float totals[SUMS][STEPS][VECTOR] = {};\n"

# What all rows of a block have of one sum.
JOIN = """\
    float *joined = scratch + SCRATCH_BYTES / 4, *const partials[SUMS] = {{PARTIALS}};
    #pragma unroll
    for (int sum = 0; sum < SUMS; ++sum) {
        sync_block();
        #pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int column = (step * READERS + lane) * VECTOR;
            if (!IS_EVEN && column >= COLUMNS) continue;
            #pragma unroll
            for (int each = 0; each < VECTOR; ++each)
                joined[group * COLUMNS + column + each] = totals[sum][step][each];
        }
        sync_block();
        // One turn is the rule: unrolled, the loop is four times as much code, and no faster.
        #pragma unroll 1
        for (int column = threadIdx.x; column < COLUMNS; column += THREADS) {
            float total = 0;
            #pragma unroll
            for (int each = 0; each < GROUPS; ++each) total += joined[each * COLUMNS + column];
            partials[sum][blockIdx.x * COLUMNS + column] = total;
        }
    }
"""
